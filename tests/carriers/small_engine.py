"""A second dockerd with a disk of its own that is soon full, in its own network and mounts.

In the host's network namespace `--bridge=none` would delete the first engine's bridge.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_START = """
set -e
mount -t tmpfs -o size=$2 none "$1/data"
exec dockerd --bridge=none --iptables=false --ip6tables=false --data-root "$1/data" \
    --exec-root "$1/exec" --pidfile "$1/pid" --host "unix://$1/sock" >"$1/log" 2>&1
"""


@contextlib.contextmanager
def small_engine(size: str) -> Iterator[str]:
    """The engine's URL, for the time of the block. `size` is as tmpfs takes it: 48m."""
    # The paths of its sockets hold 107 bytes at the most; a test's own folder may lie deep.
    with (
        tempfile.TemporaryDirectory(prefix="dcu-") as folder,
        _running(Path(folder), size) as url,
    ):
        yield url


@contextlib.contextmanager
def _running(folder: Path, size: str) -> Iterator[str]:
    for name in ("data", "exec"):
        (folder / name).mkdir(parents=True)
    argv = ("unshare", "-n", "-m", "sh", "-c", _START, "sh", str(folder), size)
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
    end = time.monotonic() + 30
    while subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError((folder / "log").read_text()[-800:])
        time.sleep(0.1)
