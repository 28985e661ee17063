"""The objects of a build: what each was compiled from, and whether that is what is there now.

ninja compares times, so a source whose sender kept an old time is never compiled again. Here the
contents of all that an object was compiled from, as the compiler listed them, are recorded when it
is compiled and compared ever after.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_HEAD = re.compile(r"(\S.*): #deps (\d+), deps mtime (\d+) \((VALID|STALE|MISSING)\)")
_SEARCH = re.compile(r"""(?:^|\s)-(?:I|isystem|iquote|idirafter)\s*((?:\\.|"[^"]*"|'[^']*'|\S)+)""")
_SEARCHED = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
FUTURE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Object:
    """One object file and what it was compiled from.

    An input is a file as `src/…` or `build/…`, any other by its whole path; one that ends with a
    slash is a folder outside in which the compiler looks for headers.
    """

    path: str
    inputs: tuple[str, ...]


def dependencies(
    text: str, binary: Path, source: Path, folders: Iterable[str] = ()
) -> tuple[Object, ...]:
    """Read what `ninja -t deps` prints; `folders` are inputs of every object."""
    found: dict[str, set[str]] = {}
    names: dict[str, str] = {}  # most headers are those of all objects
    current: set[str] = set()
    for line in text.splitlines():
        if head := _HEAD.fullmatch(line):
            current = found.setdefault(head[1], set(folders))
        elif line.startswith("    "):
            if line not in names:
                names[line] = named(line.strip(), binary, source)
            current.add(names[line])
    return tuple(Object(path, tuple(sorted(inputs))) for path, inputs in sorted(found.items()))


def named(path: str, binary: Path, source: Path) -> str:
    full = os.path.normpath(os.path.join(binary, path))
    for root, prefix in ((source, "src"), (binary, "build")):
        if full == str(root) or full.startswith(f"{root}/"):
            return f"{prefix}/{full[len(str(root)) + 1 :]}"
    return full


def searched(commands: str, env: Mapping[str, str], binary: Path, source: Path) -> tuple[str, ...]:
    """Return the folders outside in which these compile commands look for headers.

    A folder that holds the build's own has other names at every call, and is left out.
    """
    paths = {word for text in _SEARCH.findall(commands) for word in shlex.split(text)}
    paths |= {path for name in _SEARCHED for path in env.get(name, "").split(":") if path}
    paths |= {
        "/usr/local/include",
        f"{env.get('ROCM_PATH', '/usr')}/include",
    }  # compilers know them
    full = {named(path, binary, source) for path in paths}
    outside = (f"{path.rstrip('/')}/" for path in full if path.startswith("/"))
    return tuple(sorted(path for path in outside if not f"{source}/".startswith(path)))


def on_disk(name: str, binary: Path, source: Path) -> Path:
    prefix, _, rest = name.partition("/")
    return (source if prefix == "src" else binary) / rest


class Contents:
    """Digests of inputs, each read once in a run; `outside` are those of whole paths."""

    def __init__(self, binary: Path, source: Path, outside: Mapping[str, str]) -> None:
        self._binary, self._source = binary, source
        self._known = dict(outside)

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
        names = (f"build/{item.path}", *item.inputs)
        text = "\n".join(f"{name}\0{self.of(name)}" for name in names)
        return hashlib.sha256(os.fsencode(text)).hexdigest()


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
