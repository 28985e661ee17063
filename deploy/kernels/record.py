"""What a build folder remembers: what it was configured for, and what each object came from.

Without this record a folder is never trusted. It holds absolute paths, so a copied folder is known
for a copy, and it is written last, so an interrupted build is known for one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.errors import BadValues, Refused
from deploy.git import LINK

from .request import BuildRequest
from .tree import Laid, Listing

FILE = "record.json"
MARK = ".kernels-build"
SCHEMA = "build-record/1"


@dataclass(slots=True)
class Record:
    """The last build in one folder. `complete` is False from a build's start to its end.

    `listing` is the source of the last complete build, `objects` maps an object to the digest of
    all that it was compiled from, `files` caches digests of large toolchain files.
    """

    folder: Path
    asked: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = False
    head: str = ""
    tree: str = ""
    listing: Mapping[str, Any] = field(default_factory=dict)
    objects: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changed(self) -> list[str]:
        """The changed sources that the last build proved to be compiled."""
        return list(self.evidence.get("changed", ()))

    def differs(self, listing: Listing) -> set[str]:
        """Return the paths whose content is not that of the last complete build."""
        every = set(listing) | set(self.listing)
        return {p for p in every if tuple(self.listing.get(p, ())) != tuple(listing.get(p, ()))}

    def moved(self, listing: Listing) -> bool:
        """True when a path came, went or is another link since the last complete build.

        A header may then come before the one that an object was compiled from, or answer a
        `__has_include`; no list of what the compiler read names a file that was not there.
        """
        return _places(self.listing) != _places(listing)

    def finish(self, laid: Laid, objects: Mapping[str, str], evidence: Mapping[str, Any]) -> None:
        self.complete = True
        self.tree = laid.tree
        self.listing = {path: list(row) for path, row in laid.listing.items()}
        self.objects = dict(objects)
        self.evidence = dict(evidence)
        self.write()

    def write(self) -> None:
        body = {name: getattr(self, name) for name in self.__slots__ if name != "folder"}
        put(self.folder / FILE, json.dumps({"schema": SCHEMA, **body}).encode())


def read(folder: Path) -> Record:
    """Return the record of a build folder; an empty one when there is none that can be read."""
    try:
        raw = json.loads((folder / FILE).read_text("utf-8"))
        if raw.pop("schema") != SCHEMA:
            return Record(folder)
        return Record(folder, **raw)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Record(folder)


def started(
    before: Record, asked: Mapping[str, Any], files: Mapping[str, str], head: str, *, clean: bool
) -> Record:
    """Write down that a build is under way; what the objects came from stays known."""
    now = Record(
        before.folder,
        asked=dict(asked),
        head=head,
        listing={} if clean else before.listing,
        objects={} if clean else before.objects,
        files=dict(files),
    )
    now.write()
    return now


def why_clean(before: Record, asked: Mapping[str, Any], request: BuildRequest) -> tuple[str, ...]:
    """Return the reasons to configure in an empty folder; none when the old one can go on.

    What the record, CMake's cache and this call say must be one and the same.
    """
    cache = request.binary / "CMakeCache.txt"
    if not cache.is_file() or not (request.binary / "build.ninja").is_file():
        return ("there is no configured build folder yet",)
    if not before.asked:
        return ("the build folder has no record of what it was made for",)
    reasons = [
        f"{key} changed from {before.asked.get(key)} to {value}"
        for key, value in asked.items()
        if before.asked.get(key) != value
    ]
    reasons += _cache_differs(cache.read_text("utf-8", "replace"), request)
    if not before.complete and not before.listing:
        reasons.append("the first build in this folder did not come to its end")
    return tuple(reasons)


def configured_by(path: str) -> bool:
    """True for a file that decides how a tree is configured: its cached values would stay."""
    name = path.rsplit("/", 1)[-1]
    return name in ("CMakeLists.txt", "CMakePresets.json") or name.endswith((".cmake", ".cmake.in"))


def own(folder: Path, *ours: Path) -> None:
    """Mark a folder as ours, or refuse one that holds files of others than us (`ours`)."""
    mark = folder / MARK
    if mark.exists():
        return
    known = {"lock", MARK, FILE, *(path.name for path in ours if path.parent == folder)}
    others = sorted(set(os.listdir(folder)) - known)
    if others:
        raise Refused(
            f"{folder} is not a build folder of ours",
            why=f"it holds {', '.join(others[:5])}; a build deletes what it finds in its folder",
            fix="set kernels.build_dir to a folder of its own",
        )
    mark.write_text("A build folder: everything in it is made anew when needed.\n", "utf-8")


def put(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as out:
            out.write(data)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Hold the build folder and give the lock's descriptor; a second build there is refused.

    The lock ends with the last process that has the descriptor open.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("a+")
    except OSError as err:
        raise BadValues(
            f"cannot build in {folder}",
            why=str(err),
            fix="set kernels.build_dir to a folder on local disk that you may write to",
        ) from err
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            file.seek(0)
            raise Refused(
                f"another build runs in {folder}",
                why=f"process {file.read().strip() or 'unknown'}, or a compiler it left,"
                f" holds {folder}/lock",
                fix="wait for it, or give this manifest a kernels.build_dir of its own",
            ) from err
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield file.fileno()


def _places(listing: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {path: tuple(row) if row[0] == LINK else () for path, row in listing.items()}


def _cache_differs(text: str, request: BuildRequest) -> list[str]:
    entries = dict(re.findall(r"^([A-Za-z_0-9-]+):[A-Z]+=(.*)$", text, re.MULTILINE))
    wanted = {
        "CMAKE_HOME_DIRECTORY": str(request.source),
        "CMAKE_CACHEFILE_DIR": str(request.binary),
        "CMAKE_GENERATOR": "Ninja",
        "VLLM_PYTHON_EXECUTABLE": request.python,
    }
    return [
        f"CMake's cache says {key} is {entries[key]}, not {value}"
        for key, value in wanted.items()
        if key in entries and entries[key] != value
    ]
