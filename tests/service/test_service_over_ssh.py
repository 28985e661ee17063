"""The same verbs over a real sshd: the agent runs from memory there, and brings what is needed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import bundle as bundles
from deploy.agent.launch import Launch
from deploy.agent.words import Exit, Verb
from deploy.bundle import Bundle
from deploy.carriers import Request
from deploy.evidence import Evidence
from tests.carriers.remote import Remote
from tests.carriers.sshd import free_port
from tests.service.test_service_verbs import BODY, STANDIN, START, fill, inputs, own_processes, plan

pytestmark = [pytest.mark.sshd, pytest.mark.slow]


class Service:
    """A site and a launch folder behind `ssh:a`."""

    def __init__(self, remote: Remote, folder: Path) -> None:
        self.remote, self.folder, self.port = remote, folder / "submission", free_port()
        self.site = folder / "site"
        (self.site / "vllm").mkdir(parents=True)
        (self.site / "vllm" / "__init__.py").write_bytes(BODY)
        (self.folder / "model").mkdir(parents=True)
        (self.folder / "model" / "config.json").write_text("{}")
        self.launch = Launch.of_manifest(inputs(self.folder, self.port)["manifest"])
        made = bundles.pack(plan(), inputs(self.folder, self.port), fill, folder / "out")
        self.bundle: Bundle = bundles.read(made.path)

    def ask(self, verb: Verb, **options: object) -> Evidence:
        request = Request(
            verb=verb, site=str(self.site), python=sys.executable, launch_dir=str(self.folder),
            options={"launch": self.launch.to_json(), **options},
        )  # fmt: skip
        carrier = self.remote.carrier()
        return carrier.deliver_in_turn(self.bundle, [request], tell=self.remote.lines.append)[0]

    def start(self) -> Evidence:
        overrides = f"--site {self.site} --python {sys.executable} --launch-dir {self.folder}"
        text = START.format(
            python=sys.executable, standin=STANDIN, overrides=overrides,
            words=" ".join(self.launch.argv[1:]),
        )  # fmt: skip
        scripts = {"start_vllm.sh": {"mode": "0755", "text": text}}
        bundle = {"name": self.bundle.path.name, "sha256": self.bundle.sha256}
        return self.ask(Verb.START, scripts=scripts, bundle=bundle, ready=30)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with own_processes() as inside:
        # Others may run servers on this machine: whoever comes in finds this test's processes only.
        enter = f'ForceCommand {" ".join(inside)} sh -c "$SSH_ORIGINAL_COMMAND"'
        remote = Remote(tmp_path / "remote", "SetEnv SHLVL=5", enter, root="/").start()
        yield Service(remote, tmp_path)
        remote.stop()


def test_a_service_is_started_seen_and_stopped_over_a_line(service: Service) -> None:
    started = service.start()
    assert started.error is None, started.error
    assert started.outcome == "running"
    brought = service.folder / service.bundle.path.name
    assert brought.read_bytes() == service.bundle.path.read_bytes()

    # The line that started it is closed: it runs on, and another line finds it again.
    seen = service.ask(Verb.SERVICE, expect="running")
    assert seen.exit is Exit.OK
    assert seen.raw["service"]["faults"] == []

    again = service.start()
    assert again.exit is Exit.REFUSED

    stopped = service.ask(Verb.STOP)
    assert (stopped.exit, stopped.outcome) == (Exit.OK, "stopped")
    clean = service.ask(Verb.SERVICE, expect="clean")
    assert clean.exit is Exit.OK
