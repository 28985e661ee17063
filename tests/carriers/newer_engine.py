"""A dockerd of a later Debian that keeps images in containerd, in its own network and mounts.

tests/provision.d/docker.sh lays it into a folder; data, socket and pid file are of one test.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_HOME = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
_CACHE = Path(os.environ.get("DCU_TEST_CACHE") or Path(_HOME, "dcu-bundle"))
ROOT = _CACHE / "docker" / "newer"

# All of it is gone with the namespace. A chroot would not do: the engine remounts its own root.
_START = """
set -e
mount --bind "$1" "$1"
mkdir -p "$1/run/dcu" "$1/proc" "$1/sys" "$1/dev"
mount --bind "$2" "$1/run/dcu"
mount -t proc none "$1/proc"
mount --rbind /sys "$1/sys"
mount --rbind /dev "$1/dev"
exec >"$2/log" 2>&1
cd "$1"
mkdir -p before
pivot_root . before
umount -l /before
exec dockerd --bridge=none --iptables=false --ip6tables=false \
    --config-file /run/dcu/daemon.json --data-root /run/dcu/data --exec-root /run/dcu/exec \
    --pidfile /run/dcu/pid --host unix:///run/dcu/sock
"""


@contextlib.contextmanager
def newer_engine(folder: Path) -> Iterator[str]:
    """The engine's URL, for the time of the block."""
    if not (ROOT / "usr/sbin/dockerd").exists():
        pytest.skip("no newer engine is laid: tests/provision.sh start docker")
    folder.mkdir(parents=True)
    settings = {"features": {"containerd-snapshotter": True}}
    (folder / "daemon.json").write_text(json.dumps(settings))
    argv = ("unshare", "-n", "-m", "sh", "-c", _START, "sh", str(ROOT), str(folder))
    process = subprocess.Popen(argv, start_new_session=True)
    try:
        _wait(process, folder)
        yield f"unix://{folder}/sock"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], folder: Path) -> None:
    argv = ("docker", "-H", f"unix://{folder}/sock", "version")
    end = time.monotonic() + 60
    while subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError((folder / "log").read_text()[-800:])
        time.sleep(0.1)
