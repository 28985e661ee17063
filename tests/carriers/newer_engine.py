"""A dockerd of a later Debian that keeps images in containerd, in its own network and mounts.

tests/provision.d/docker.sh lays it into a folder; data, socket and pid file are of one test.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.carriers.own_engine import own_engine

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
    with own_engine(_START, str(ROOT), str(folder), folder=folder, patience=60) as url:
        yield url
