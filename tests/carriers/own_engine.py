"""Starts a dockerd of a test's own, in its own network and mounts, and ends it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def own_engine(script: str, *words: str, folder: Path, patience: float) -> Iterator[str]:
    """The URL of the engine that a shell script runs, which makes ``sock`` and ``log`` in `folder`.

    `patience` is how many seconds it may take until it answers.
    """
    argv = ("unshare", "-n", "-m", "sh", "-c", script, "sh", *words)
    process = subprocess.Popen(argv, start_new_session=True)
    url = f"unix://{folder}/sock"
    try:
        _wait(process, url, folder / "log", patience)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path, patience: float) -> None:
    argv = ("docker", "-H", url, "version")
    end = time.monotonic() + patience
    while subprocess.run(argv, capture_output=True, timeout=20, check=False).returncode:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(log.read_text()[-800:])
        time.sleep(0.1)
