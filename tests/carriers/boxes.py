"""Containers with an sshd and the wheel's tree; `rm -f` and `run` make a rebuilt one."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from deploy import manifest, wheel
from deploy.layout import HERE
from tests.carriers.sshd import free_port, make_key

BASE = "dcu-test/base:1"
SITE = "/usr/local/lib/python3.11/dist-packages"
# What is started: new host keys, since the image has none, then the server.
_START = (
    "ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/k && "
    "exec /usr/sbin/sshd -D -e -h /etc/ssh/k -o UsePAM=no -o PasswordAuthentication=no"
)


def docker(*argv: str, stdin: bytes = b"") -> str:
    done = subprocess.run(
        ["docker", *argv], input=stdin, capture_output=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"docker {argv[0]}: {done.stderr.decode()}")
    return done.stdout.decode().strip()


def wheel_image() -> str:
    """Return an image that holds the demo's wheel in its site; made once and kept."""
    pinned = manifest.load(HERE.manifest("demo")).source.wheel
    assert pinned is not None
    name = f"dcu-test/wheel:{pinned.sha256[:12]}"
    with contextlib.suppress(RuntimeError):
        docker("image", "inspect", name)
        return name
    spec = wheel.WheelSpec(
        name=pinned.name, version=pinned.version, sha256=pinned.sha256, platform=pinned.platform
    )
    fetched = wheel.fetch(spec, HERE.cache / "wheels")
    box = docker("create", "--label", "dcu-bundle.test=ssh", BASE)
    tree = HERE.cache / f"tree-{pinned.sha256[:12]}"
    try:
        if not tree.exists():
            wheel.unpack(fetched, tree)
        docker("cp", f"{tree}/.", f"{box}:{SITE}/")
        docker("commit", box, name)
    finally:
        docker("rm", "-f", box)
    return name


class Box:
    """One container; its address outlives it, as a scheduler's port forward does."""

    def __init__(self, name: str, image: str, home: Path, key: Path) -> None:
        self.name, self._image, self._home, self._key = name, image, home, key
        self.port = free_port()
        self.id = ""

    def start(self) -> None:
        self.id = docker(
            "run", "-d", "--init", "--label", "dcu-bundle.test=ssh",
            "-p", f"127.0.0.1:{self.port}:22", "-v", f"{self._home}:/home/shared",
            self._image, "sh", "-c", _START,
        )  # fmt: skip
        public = self._key.with_name(self._key.name + ".pub").read_bytes()
        self.sh(
            "umask 077; mkdir -p /root/.ssh /root/submission; cat >/root/.ssh/authorized_keys",
            public,
        )
        self._await()

    def rebuild(self) -> None:
        self.remove()
        self.start()

    def remove(self) -> None:
        if self.id:
            docker("rm", "-f", self.id)
            self.id = ""

    def sh(self, script: str, stdin: bytes = b"") -> str:
        return docker("exec", "-i", self.id, "sh", "-c", script, stdin=stdin)

    @property
    def fingerprint(self) -> str:
        return self.sh("ssh-keygen -lf /etc/ssh/k.pub").split()[1]

    def stamps(self) -> str:
        """Every file of the site with inode, times, size and mode."""
        return self.sh(f"find {SITE} -printf '%p %i %T@ %C@ %s %m\\n' | sort")

    def _await(self) -> None:
        argv = ["ssh-keyscan", "-T", "2", "-p", str(self.port), "127.0.0.1"]
        end = time.monotonic() + 30
        while time.monotonic() < end:
            done = subprocess.run(argv, capture_output=True, timeout=20, check=False)
            if b"ssh-ed25519" in done.stdout:
                return
            time.sleep(0.2)
        raise RuntimeError(docker("logs", self.id))


@contextlib.contextmanager
def boxes(folder: Path, *names: str) -> Iterator[dict[str, Box]]:
    """Run one container for each name; all share one persistent home."""
    image, home = wheel_image(), folder / "home"
    home.mkdir()
    make_key(folder / "key")
    made = {name: Box(name, image, home, folder / "key") for name in names}
    try:
        for box in made.values():
            box.start()
        yield made
    finally:
        for box in made.values():
            box.remove()
