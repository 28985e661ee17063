"""(Plan, base's files, bytecode, further files) -> the entries of our layer. Pure.

What a deploy would do to a live target is said here as a layer: files to put, deletions as
whiteouts, no bytecode left that a touched module does not own, no folder left without a file, and
the receipt of all that.
"""

from __future__ import annotations

import hashlib
import io
import posixpath
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from deploy.agent.plan import Plan, PlannedFile
from deploy.agent.pyc import belongs, cache_file

from . import record
from .base import Files, Seen, resolve
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

    `python` says what made it (tag, version, magic); empty in an image without Python. `said` is
    what the receipt says beside the files; without it there is none.
    """

    plan: Plan
    site: str
    blobs: Mapping[str, Opener]
    pycs: Mapping[str, bytes] = field(default_factory=dict)
    python: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, Any] = field(default_factory=dict)
    extras: tuple[Extra, ...] = ()


def entries(contents: Contents, files: Files) -> tuple[list[Entry], dict[str, Owner]]:
    """Return the layer's entries, and mode and owner of the base's folders that they lie in."""
    changed = [*_files(contents, files), *_bytecode(contents, files)]
    emptied = _emptied(changed, contents.site.lstrip("/"), files)
    found = [
        *_without_covered([*changed, *map(_deletion, emptied)]),
        *_receipt(contents, changed, emptied, files),
        *_extras(contents.extras, files),
    ]
    found += _launch_dir(contents.plan, files, {entry.path for entry in found})
    return found, dict(_folders(found, files))


def _deletion(path: str) -> Entry:
    return Entry(path=path, kind=Kind.WHITEOUT)


def _without_covered(found: Sequence[Entry]) -> Iterator[Entry]:
    """The entries without deletions that another entry says already.

    A folder that goes takes all below it; a file that comes covers the folder that was there, and a
    folder that comes, the file.
    """
    gone = {entry.path for entry in found if entry.kind is Kind.WHITEOUT}
    coming = {entry.path for entry in found if entry.kind is not Kind.WHITEOUT}
    folders = {parent for path in coming for parent in _parents(path)}
    for entry in found:
        covered = entry.path in folders | coming or not coming.union(gone).isdisjoint(
            _parents(entry.path)
        )
        if entry.kind is not Kind.WHITEOUT or not covered:
            yield entry


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = _folder(path)
        yield path


def _emptied(changed: Iterable[Entry], site: str, files: Files) -> dict[str, Seen]:
    """The folders below the site that lose their last file: a left-over imports as a namespace."""
    gone = {entry.path for entry in changed if entry.kind is Kind.WHITEOUT}
    coming = [entry.path for entry in changed if entry.kind is not Kind.WHITEOUT]
    emptied: dict[str, Seen] = {}
    for path in sorted(gone, key=lambda p: (-p.count("/"), p)):
        for folder in _chain(path, site):
            known = {p.rpartition("/")[2] for p in {*gone, *emptied} if _folder(p) == folder}
            stays = any(other.startswith(folder + "/") for other in coming)
            if stays or files.other(f"/{folder}", known):
                break
            emptied[folder] = files.look(f"/{folder}")
    return emptied


def _folder(path: str) -> str:
    return path.rpartition("/")[0]


def _chain(path: str, site: str) -> Iterator[str]:
    """The folders above `path`, the nearest first, without the site itself."""
    while (path := _folder(path)) != site:
        yield path


def _receipt(
    contents: Contents, changed: Iterable[Entry], emptied: Mapping[str, Seen], files: Files
) -> Iterator[Entry]:
    if not contents.said:
        return
    site = contents.site.lstrip("/")
    put = [entry.path for entry in changed if entry.kind is not Kind.WHITEOUT]
    parents = {folder for path in put for folder in _chain(path, site)}
    made = [folder for folder in parents if files.look(f"/{folder}").kind != "folder"]
    data = record.receipt(
        contents.plan,
        contents.site,
        files,
        head=contents.said,
        pycs=contents.pycs,
        python=contents.python,
        folders=[path[len(site) + 1 :] for path in made],
        removed={path[len(site) + 1 :]: seen for path, seen in emptied.items()},
    )
    owner = files.look(contents.site)
    yield Entry(path=f"{site}/{record.RECEIPT}", data=data, uid=owner.uid, gid=owner.gid)


def _files(contents: Contents, files: Files) -> Iterator[Entry]:
    for planned in contents.plan.files:
        path = f"{contents.site}/{planned.path}"
        before = files.look(path)
        relative = path.lstrip("/")
        want = planned.want
        if want.absent:
            if before.kind != "absent":
                yield _deletion(relative)
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
        path = f"{contents.site}/{cache_file(module, contents.python['tag'])}"
        made.add(path)
        yield Entry(path=path.lstrip("/"), data=body)
    for planned in contents.plan.files:
        if _is_module(planned):
            for path in _stale(f"{contents.site}/{planned.path}", files):
                if path not in made:
                    yield _deletion(path.lstrip("/"))


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
