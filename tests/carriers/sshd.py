"""A real sshd for tests: own configuration and keys, a free port of 127.0.0.1, our own account."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"


class Sshd:
    """One server. `config` are further lines of sshd_config. Start anew after `rebuild`."""

    def __init__(self, folder: Path, *config: str, port: int = 0) -> None:
        self.folder, self._config = folder, config
        folder.mkdir(parents=True, exist_ok=True)
        self.port = port or free_port()
        self.user_key = folder / "user"
        make_key(self.user_key)
        self.rebuild()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def fingerprint(self) -> str:
        said = subprocess.run(
            ["ssh-keygen", "-lf", str(self.folder / "host.pub")],
            capture_output=True, text=True, check=True, timeout=20,
        )  # fmt: skip
        return said.stdout.split()[1]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def rebuild(self) -> None:
        """Make a new host key, as a rebuilt container does."""
        make_key(self.folder / "host")

    def start(self) -> Sshd:
        lines = [
            f"Port {self.port}",
            "ListenAddress 127.0.0.1",
            f"HostKey {self.folder}/host",
            f"AuthorizedKeysFile {self.folder}/user.pub",
            f"PidFile {self.folder}/pid",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin yes",
            *self._config,
        ]
        conf = self.folder / "sshd_config"
        conf.write_text("\n".join(lines) + "\n")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [SSHD, "-D", "-e", "-f", str(conf)], stdin=subprocess.DEVNULL, stderr=log
            )
        self._await()
        return self

    def _await(self) -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end:
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError((self.folder / "log").read_text())

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(10)
            self._process = None

    def config_of(self, alias: str, *more: str, port: int = 0) -> str:
        """The lines of ~/.ssh/config that lead here."""
        lines = [
            f"Host {alias}",
            "  HostName 127.0.0.1",
            f"  Port {port or self.port}",
            f"  IdentityFile {self.user_key}",
            "  UserKnownHostsFile none",
            *(f"  {line}" for line in more),
        ]
        return "\n".join(lines) + "\n"


def make_key(path: Path, kind: str = "ed25519") -> None:
    for old in (path, path.with_name(path.name + ".pub")):
        old.unlink(missing_ok=True)
    argv: Sequence[str] = ["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)]
    subprocess.run(argv, check=True, timeout=30)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
