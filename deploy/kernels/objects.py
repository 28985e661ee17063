"""The objects of a build: what each was compiled from, and whether that is what is there now.

ninja compares times, so a source whose sender kept an old time is never compiled again. Here the
contents of all that an object was compiled from, as the compiler listed them, are recorded when it
is compiled and compared ever after.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_HEAD = re.compile(r"(\S.*): #deps (\d+), deps mtime (\d+) \((VALID|STALE|MISSING)\)")
FUTURE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Object:
    """One object file and the files it was compiled from that lie below source or build folder."""

    path: str
    inputs: tuple[str, ...]


def dependencies(text: str, binary: Path, source: Path) -> tuple[Object, ...]:
    """Read what `ninja -t deps` prints. Inputs become `src/…` or `build/…`; others are left out."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if head := _HEAD.fullmatch(line):
            current = found.setdefault(head[1], [])
        elif line.startswith("    ") and (name := named(line.strip(), binary, source)):
            current.append(name)
    return tuple(Object(path, tuple(sorted(set(names)))) for path, names in sorted(found.items()))


def named(path: str, binary: Path, source: Path) -> str:
    full = os.path.normpath(os.path.join(binary, path))
    for root, prefix in ((source, "src"), (binary, "build")):
        if full.startswith(f"{root}/"):
            return f"{prefix}/{full[len(str(root)) + 1 :]}"
    return ""


def on_disk(name: str, binary: Path, source: Path) -> Path:
    prefix, _, rest = name.partition("/")
    return (source if prefix == "src" else binary) / rest


class Contents:
    """Digests of files below source and build folder, each read once in a run."""

    def __init__(self, binary: Path, source: Path) -> None:
        self._binary, self._source = binary, source
        self._known: dict[str, str] = {}

    def of(self, name: str) -> str:
        """Return the sha256 of one input, "absent" when it is not there."""
        if name not in self._known:
            try:
                data = on_disk(name, self._binary, self._source).read_bytes()
                self._known[name] = hashlib.sha256(data).hexdigest()
            except OSError:
                self._known[name] = "absent"
        return self._known[name]

    def all_of(self, item: Object) -> str:
        """Return one digest over an object and all its inputs, names included."""
        sha = hashlib.sha256(self.of(f"build/{item.path}").encode())
        for name in item.inputs:
            sha.update(f"{name}\0{self.of(name)}\n".encode())
        return sha.hexdigest()


def stale(
    items: Iterable[Object], recorded: Mapping[str, str], contents: Contents
) -> tuple[Object, ...]:
    """Return the objects whose inputs are no longer what they were compiled from."""
    return tuple(item for item in items if recorded.get(item.path) != contents.all_of(item))


def uses(
    items: Iterable[Object], changed: Iterable[str], names: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Return changed source -> objects compiled from it, by way of its copy or twin.

    `names` maps a source to the paths it may have in the build folder.
    """
    found = {}
    for source in changed:
        wanted = {f"src/{source}", *(f"build/{name}" for name in names[source])}
        found[source] = tuple(item.path for item in items if wanted & set(item.inputs))
    return found


def in_the_future(folder: Path, paths: Iterable[str]) -> tuple[str, ...]:
    """Return the files ahead of the clock: ninja would build from them again at every call."""
    limit = time.time() + FUTURE_SECONDS
    found = []
    for path in paths:
        try:
            if (folder / path).lstat().st_mtime > limit:
                found.append(path)
        except OSError:
            continue
    return tuple(found)
