"""podman and buildah with a store, and a service on a socket, of one test's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_STORAGE = '[storage]\ndriver = "overlay"\nrunroot = "{0}/run"\ngraphroot = "{0}/root"\n'
# Inside a container or a small machine the default limits cannot be set.
_CONTAINERS = """\
[containers]
default_ulimits = []
[engine]
cgroup_manager = "cgroupfs"
tmp_dir = "{0}/tmp"
"""


class Pods:
    """Runs `podman` and `buildah` in one store; `url` is what DOCKER_HOST takes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "storage.conf").write_text(_STORAGE.format(folder))
        (folder / "containers.conf").write_text(_CONTAINERS.format(folder))
        self._env = {
            **os.environ,
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "TMPDIR": str(folder),
        }
        self._socket = folder / "sock"
        self.url = f"unix://{self._socket}"

    def run(self, *words: str) -> str:
        done = subprocess.run(words, capture_output=True, env=self._env, timeout=300, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    @contextlib.contextmanager
    def service(self) -> Iterator[None]:
        argv = ("podman", "system", "service", "--time", "0", self.url)
        with (self._socket.parent / "log").open("wb") as log:
            process = subprocess.Popen(argv, env=self._env, stderr=log, start_new_session=True)
        try:
            end = time.monotonic() + 30
            while not self._socket.exists():
                assert process.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            yield
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def pods(folder: Path) -> Iterator[Pods]:
    """A store that is empty, for the time of the block."""
    if missing := [name for name in ("podman", "buildah") if shutil.which(name) is None]:
        pytest.skip(f"apt-get install {' '.join(missing)}")
    found = Pods(folder)
    try:
        with found.service():
            yield found
        found.run("podman", "system", "reset", "--force")
    finally:
        # Who watched a command in a container cleans up 300 s later, and mounts the store again.
        for pid in _watchers(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # The store mounts its own folder on itself, once or more, and some versions leave it so.
        for mounted in _mounts(folder):
            subprocess.run(("umount", "--lazy", mounted), timeout=30, check=True)


def _watchers(folder: Path) -> list[int]:
    """Every process that has a place below the folder among its words."""
    found = []
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"{folder}/".encode() in words.read_bytes():
                found.append(int(words.parent.name))
    return found


def _mounts(folder: Path) -> list[str]:
    """Every mount below a folder, the last first. A bind mount of itself is_mount() cannot see."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    places = [line.split()[4] for line in lines]
    return [place for place in reversed(places) if place.startswith(f"{folder}/")]
