"""A second dockerd with a disk of its own that is soon full, in its own network and mounts.

In the host's network namespace `--bridge=none` would delete the first engine's bridge.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.carriers.own_engine import own_engine

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
    with tempfile.TemporaryDirectory(prefix="dcu-") as name:
        folder = Path(name)
        for part in ("data", "exec"):
            (folder / part).mkdir()
        with own_engine(_START, name, size, folder=folder, patience=30) as url:
            yield url
