"""A target behind a real sshd on this machine: a root folder, a persistent folder, and the carrier.

A second folder on the same sshd is no rebuilt container; tests of rebuilds use real containers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy import bundle as bundles
from deploy.agent.words import Verb
from deploy.bundle import Bundle
from deploy.carriers import Request
from deploy.carriers.ssh import Ssh
from deploy.carriers.ssh_config import load
from deploy.carriers.ssh_line import Limits
from deploy.evidence import Evidence
from deploy.inventory import Host
from tests.agent.target import BASE_FILES, NEW_FILES, Target
from tests.carriers.sshd import Sshd

# The usual time-outs, but retries that do not keep a test waiting.
USUAL = Limits(attempts=4, pause=0.1)
# For tests in which a line dies on purpose.
QUICK = Limits(connect=5, banner=5, login=5, channel=5, silence=5, attempts=4, pause=0.1)


class Remote:
    """One target as `ssh:a`; `more` are further lines of its ssh configuration."""

    def __init__(self, folder: Path, *config: str, **host: Any) -> None:
        self.folder = folder
        self.target = Target(folder / "root")
        self.target.make(BASE_FILES)
        self.sshd = Sshd(folder / "sshd", *config)
        self.state = folder / "state"
        options: dict[str, Any] = {
            "ssh": "a",
            "root": str(self.target.root),
            "state_dir": str(self.state),
            "python": "",
            **host,
        }
        self.host = Host(**options)
        self.lines: list[str] = []
        self.port = self.sshd.port
        self.limits = USUAL

    def start(self) -> Remote:
        self.sshd.start()
        return self

    def stop(self) -> None:
        self.sshd.stop()

    def carrier(self, *config: str, **changed: Any) -> Ssh:
        path = self.folder / "ssh_config"
        path.write_text(self.sshd.config_of("a", *config, port=self.port))
        values: dict[str, Any] = {
            "alias": "a",
            "host": self.host,
            "pins": {"a": {self.sshd.fingerprint: "pinned by the test"}},
            "config": load([path]),
            "limits": self.limits,
            "memory": self.folder / "memory",
        }
        return Ssh(**{**values, **changed})

    def bundle(self, files: Mapping[str, bytes | None] | None = None) -> Bundle:
        return bundles.read(self.target.usual(files).path)

    def deploy(self, bundle: Bundle | None = None, *, if_needed: bool = False) -> list[Evidence]:
        """Deploy and verify, as the flow does; progress lands in `lines`."""
        return self.carrier().deliver_in_turn(
            bundle or self.bundle(),
            [Request(verb=Verb.DEPLOY, operator="tester"), Request(verb=Verb.VERIFY)],
            if_needed=if_needed,
            tell=self.lines.append,
        )

    def ask(self, verb: Verb, bundle: Bundle | None = None) -> Evidence:
        return self.carrier().deliver_in_turn(
            bundle or self.bundle(), [Request(verb=verb)], tell=self.lines.append
        )[0]

    def is_new(self) -> bool:
        return all(
            (self.target.read(path) if self.target.exists(path) else None) == data
            for path, data in NEW_FILES.items()
        )

    def is_base(self) -> bool:
        found = {
            path: self.target.read(path) if self.target.exists(path) else None
            for path in {*NEW_FILES, *BASE_FILES}
        }
        return found == {path: BASE_FILES.get(path) for path in found}
