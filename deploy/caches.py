"""What calls of this product keep below out/, how large and how old it is, and what may go.

Everything there can be made again. What a lock names stays all the same, and so does the newest of
each kind: making it again is what a cache is there to save. What a process works with stays, too.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.layout import Layout

__all__ = ["Unit", "remove", "survey"]

_HEX = re.compile(r"[0-9a-f]{12,64}")
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing that is kept or removed as a whole. `age` is in days since it was last changed."""

    path: Path
    kind: str
    bytes: int
    age: float
    kept: str = ""  # why it stays; "" where it may go


def survey(layout: Layout, now: float | None = None) -> list[Unit]:
    """Return every unit, the largest first. `now` is in seconds since the epoch."""
    now = time.time() if now is None else now
    pinned = _pinned(layout)
    units: list[Unit] = []
    for kind, paths in _kinds(layout):
        found = [_unit(path, kind, now) for path in paths]
        newest = min(found, key=lambda unit: (unit.age, unit.path), default=None)
        units += [_judged(unit, pinned, newest=unit is newest) for unit in found]
    return sorted(units, key=lambda unit: (-unit.bytes, str(unit.path)))


def remove(units: Iterable[Unit]) -> list[Unit]:
    """Remove what is not kept; return what is gone. What vanished meanwhile is gone, too."""
    gone = []
    for unit in units:
        if unit.kept:
            continue
        # Renamed first: whoever starts now makes it again, and finds no half of it.
        aside = unit.path.with_name(f".{unit.path.name}.{os.getpid()}.gone")
        try:
            unit.path.rename(aside)
        except FileNotFoundError:
            continue
        _discard(aside)
        gone.append(unit)
    return gone


def _kinds(layout: Layout) -> Iterator[tuple[str, list[Path]]]:
    """Yield each kind with its units: bundles, and the entries of each folder of the cache."""
    yield "bundle", sorted(layout.out.glob("*.pyz"))
    for folder in sorted(layout.cache.glob("*")):
        if folder.is_dir() and not folder.is_symlink():
            yield folder.name, [path for path in sorted(folder.iterdir()) if _is_unit(path)]


def _is_unit(path: Path) -> bool:
    # A lock file belongs to whoever holds it, and costs nothing.
    return path.name != "lock" and not path.name.endswith(".lock")


def _pinned(layout: Layout) -> set[str]:
    """Return every digest that a manifest or its lock names, even where it cannot be understood."""
    paths = sorted(layout.manifest("x").parent.glob("*.yaml"))
    return {found for path in paths for found in _HEX.findall(path.read_text("utf-8", "replace"))}


def _unit(path: Path, kind: str, now: float) -> Unit:
    size, newest = 0, 0.0
    seen: set[tuple[int, int]] = set()
    for info in _infos(path):
        newest = max(newest, info.st_mtime)
        if (info.st_dev, info.st_ino) not in seen:
            seen.add((info.st_dev, info.st_ino))
            size += info.st_blocks * 512
    return Unit(path, kind, size, max(0.0, (now - newest) / _DAY))


def _infos(path: Path) -> Iterator[os.stat_result]:
    try:
        yield path.lstat()
        if path.is_dir() and not path.is_symlink():
            for child in sorted(path.iterdir()):
                yield from _infos(child)
    except FileNotFoundError:
        return  # somebody else cleans up, or a build goes on


def _judged(unit: Unit, pinned: set[str], *, newest: bool) -> Unit:
    names = _HEX.findall(unit.path.name)
    if _in_use(unit.path):
        return replace(unit, kept="a process uses it")
    if any(digest.startswith(name) for name in names for digest in pinned):
        return replace(unit, kept="a lock names it")
    return replace(unit, kept="the newest of its kind") if newest else unit


def _in_use(path: Path) -> bool:
    """True while somebody holds the lock of it, or a process runs whose .pid lies beside it."""
    locks = (path.with_name(f"{path.name}.lock"), path / "lock", path / ".lock")
    return any(map(_held, locks)) or _runs(path.with_suffix(".pid"))


def _held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # there is none, or none that this user could hold up
    return False


def _runs(noted: Path) -> bool:
    try:
        text = noted.read_text("ascii").strip()
    except (OSError, ValueError):
        return False
    return text.isdecimal() and Path("/proc", text).exists()


def _discard(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    for folder, _, _ in os.walk(path):
        os.chmod(folder, 0o700)
    shutil.rmtree(path)
