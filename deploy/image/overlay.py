"""(Plan, base's files, bytecode, further files) -> the entries of our layer. Pure.

What a deploy would do to a live target is said here as a layer: files to put, deletions as
whiteouts, and no bytecode left that a touched module does not own.
"""

from __future__ import annotations

import hashlib
import io
import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from deploy.agent.plan import Plan, PlannedFile
from deploy.agent.pyc import belongs, cache_file

from .base import Files, resolve
from .layer import Entry, Kind, Owner

Opener = Callable[[], IO[bytes]]


@dataclass(frozen=True, slots=True)
class Extra:
    """A file beside the site: absolute path as the manifest has it, content, permission bits."""

    path: str
    size: int
    sha256: str
    source: Opener
    mode: int = 0o644

    @classmethod
    def held(cls, path: str, data: bytes, mode: int = 0o644) -> Extra:
        """A file whose content is at hand."""
        sha256 = hashlib.sha256(data).hexdigest()
        return cls(path, len(data), sha256, lambda: io.BytesIO(data), mode)

    @classmethod
    def file(cls, path: str, source: Path, sha256: str, mode: int = 0o644) -> Extra:
        """A file whose content lies at `source`."""
        return cls(path, source.stat().st_size, sha256, lambda: source.open("rb"), mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What the layer is made of. `pycs` is the bytecode of each compiled module, by module path.

    `tag` is the cache tag of the interpreter that made it; empty in an image without Python.
    """

    plan: Plan
    site: str
    blobs: Mapping[str, Opener]
    pycs: Mapping[str, bytes] = field(default_factory=dict)
    tag: str = ""
    extras: tuple[Extra, ...] = ()


def entries(contents: Contents, files: Files) -> tuple[list[Entry], dict[str, Owner]]:
    """Return the layer's entries, and mode and owner of the base's folders that they lie in."""
    found = [
        *_files(contents, files),
        *_bytecode(contents, files),
        *_extras(contents.extras, files),
    ]
    found += _launch_dir(contents.plan, files, {entry.path for entry in found})
    return found, dict(_folders(found, files))


def _files(contents: Contents, files: Files) -> Iterator[Entry]:
    for planned in contents.plan.files:
        path = f"{contents.site}/{planned.path}"
        before = files.look(path)
        relative = path.lstrip("/")
        want = planned.want
        if want.absent:
            if before.kind != "absent":
                yield Entry(path=relative, kind=Kind.WHITEOUT)
        elif want.type == "link":
            yield Entry(path=relative, kind=Kind.LINK, link=want.link)
        else:
            yield Entry(
                path=relative,
                mode=int(want.mode, 8),
                size=want.size,
                sha256=want.sha256,
                source=contents.blobs[want.sha256],
                uid=before.uid,  # a replaced file keeps its owner, as in a live target
                gid=before.gid,
            )


def _bytecode(contents: Contents, files: Files) -> Iterator[Entry]:
    made: set[str] = set()
    for module, body in contents.pycs.items():
        path = f"{contents.site}/{cache_file(module, contents.tag)}"
        made.add(path)
        yield Entry(path=path.lstrip("/"), data=body)
    for planned in contents.plan.files:
        if _is_module(planned):
            for path in _stale(f"{contents.site}/{planned.path}", files):
                if path not in made:
                    yield Entry(path=path.lstrip("/"), kind=Kind.WHITEOUT)


def _is_module(planned: PlannedFile) -> bool:
    return planned.path.endswith(".py")


def _stale(module: str, files: Files) -> Iterator[str]:
    """Every pyc that the base holds for a module, for whatever interpreter."""
    folder, name = posixpath.split(module)
    stem = name.removesuffix(".py")
    cache = f"{folder}/__pycache__"
    yield from (f"{cache}/{entry}" for entry in files.names(cache) if belongs(entry, stem))
    legacy = f"{folder}/{stem}.pyc"  # importable without its source
    if files.look(legacy).kind != "absent":
        yield legacy


def _launch_dir(plan: Plan, files: Files, paths: Collection[str]) -> Iterator[Entry]:
    """The folder that the service starts in, where neither the base nor a file of ours makes it."""
    path = resolve(files, plan.launch_dir or "/").lstrip("/")
    made = any(other.startswith(path + "/") for other in paths)
    if path and not made and files.look("/" + path).kind == "absent":
        yield Entry(path=path, kind=Kind.FOLDER, mode=0o755)


def _extras(extras: Iterable[Extra], files: Files) -> Iterator[Entry]:
    for extra in extras:
        path = resolve(files, extra.path).lstrip("/")
        yield Entry(
            path=path,
            mode=extra.mode,
            size=extra.size,
            sha256=extra.sha256,
            source=extra.source,
        )


def _folders(found: Iterable[Entry], files: Files) -> Iterator[tuple[str, Owner]]:
    """Mode and owner of every parent that the base has: a layer's folder entry overrides both."""
    seen: set[str] = set()
    for entry in found:
        path = entry.path
        while "/" in path:
            path = path.rpartition("/")[0]
            if path in seen:
                break
            seen.add(path)
            folder = files.look("/" + path)
            if folder.kind == "folder":
                yield path, Owner(folder.mode, folder.uid, folder.gid)
