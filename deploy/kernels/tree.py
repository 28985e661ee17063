"""Lay the files of one commit on disk, and hash what lies there back to the commit's tree id.

Every content comes from git's object store, so no filter or line-end setting takes part. A file
whose bytes changed gets the present time, whatever time its sender had: builds compare times.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import BadValues, BundleError
from deploy.git import GITLINK, LINK, Git, Objects

Listing = Mapping[str, tuple[str, str]]  # path -> (git's mode, object id)


@dataclass(frozen=True, slots=True)
class Laid:
    """What a call to `lay` did: `listing` is the whole tree, the others are the changes."""

    tree: str
    listing: Listing
    written: tuple[str, ...]
    removed: tuple[str, ...]


def lay(git: Git, commit: str, folder: Path, keep: Iterable[str] = ()) -> Laid:
    """Make `folder` hold exactly the files of `commit`; `keep` names paths left as they are.

    Raises:
        BadValues: the commit is not there, a link leads out of it, or what lies there afterwards
            has another tree id.
    """
    with git.objects() as objects:
        want = _read(git, objects, commit)
        listing = want.listing
        before = scan(folder)
        kept = set(keep)
        removed = sorted(path for path in before if path not in listing and path not in kept)
        stale = sorted(path for path, row in listing.items() if before.get(path) != row)
        for path in removed:
            (folder / path).unlink()
        _drop_empty_folders(folder)
        for path in stale:
            _write(objects, folder, path, *listing[path])
    after = {path: row for path, row in scan(folder).items() if path not in kept}
    laid = tree_id({**after, **_submodules(listing)})
    if laid != want.tree:
        raise BadValues(
            f"what was laid out in {folder} is not commit {commit}",
            why=f"it has the tree id {laid}, the commit says {want.tree}",
            fix="look for another process that writes there, and build again",
        )
    _refuse_links_out(folder, listing)
    return Laid(want.tree, listing, tuple(stale), tuple(removed))


def of(git: Git, commit: str) -> Laid:
    """Return the tree of a commit without laying it anywhere."""
    with git.objects() as objects:
        return _read(git, objects, commit)


def scan(folder: Path) -> dict[str, tuple[str, str]]:
    """Return path -> (git's mode, blob id) of every file and link below `folder`, by content."""
    return {path: _row(folder / path) for path in files(folder)}


def files(folder: Path) -> Iterator[str]:
    """Yield the relative path of every file and link below `folder`; links are not followed."""
    if not folder.is_dir():
        return
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(folder / below) as rows:
            for row in rows:
                if row.is_dir(follow_symlinks=False):
                    pending.append(f"{below}{row.name}/")
                else:
                    yield f"{below}{row.name}"


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def tree_id(listing: Listing) -> str:
    """Return the id that git gives to a tree with these files."""
    root: dict[str, Any] = {}
    for path, row in listing.items():
        *folders, name = path.split("/")
        at = root
        for part in folders:
            at = at.setdefault(part, {})
        at[name] = row
    return _hash_tree(root)


def _hash_tree(node: Mapping[str, Any]) -> str:
    rows = []
    for name, child in node.items():
        raw = os.fsencode(name)
        if isinstance(child, dict):
            # git sorts a folder as if its name ended with a slash.
            rows.append((raw + b"/", b"40000 " + raw, _hash_tree(child)))
        else:
            mode, oid = child
            rows.append((raw, mode.encode() + b" " + raw, oid))
    body = b"".join(head + b"\0" + bytes.fromhex(oid) for _, head, oid in sorted(rows))
    return hashlib.sha1(b"tree %d\0" % len(body) + body, usedforsecurity=False).hexdigest()


def _listing(objects: Objects, tree: str) -> dict[str, tuple[str, str]]:
    listing = {}
    for entry in objects.files(tree):
        path = os.fsdecode(entry.name)
        if any(part in ("", ".", "..", ".git") for part in path.split("/")):
            raise BadValues(
                f"the tree {tree} holds the path {path!r}",
                why="such a path leads out of the folder it is laid into",
                fix="remove it from the commit",
            )
        listing[path] = (entry.mode, entry.oid)
    return listing


def _read(git: Git, objects: Objects, commit: str) -> Laid:
    found = objects.commit(commit)
    if found is None:
        raise BadValues(
            f"cannot lay out commit {commit}",
            why=f"{git.folder} does not hold it",
            fix="fetch it, or correct source.head in the manifest",
        )
    return Laid(found.tree, _listing(objects, found.tree), (), ())


def _submodules(listing: Listing) -> dict[str, tuple[str, str]]:
    return {path: row for path, row in listing.items() if row[0] == GITLINK}


def _refuse_links_out(folder: Path, listing: Listing) -> None:
    """Refuse links to what is no part of the commit: its id says nothing about their text."""
    home = os.path.realpath(folder)
    links = (path for path, (mode, _) in sorted(listing.items()) if mode == LINK)
    out = [path for path in links if not _inside(os.path.realpath(folder / path), home)]
    if out:
        more = f" (and {len(out) - 1} more)" if len(out) > 1 else ""
        raise BadValues(
            "a link of the source leads out of it",
            why=f"{out[0]} -> {(folder / out[0]).readlink()}{more}",
            fix="put the file itself into the commit, or link to one of the same tree",
        )


def _inside(path: str, home: str) -> bool:
    return path == home or path.startswith(f"{home}/")


def _row(path: Path) -> tuple[str, str]:
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        return LINK, blob_id(os.fsencode(path.readlink()))
    if not stat.S_ISREG(info.st_mode):
        raise BundleError(
            f"{path} is neither a file nor a link",
            why="only this tool writes into that folder",
            fix="remove it, and build again",
            exit=BadValues.exit,
        )
    return "100755" if info.st_mode & 0o100 else "100644", blob_id(path.read_bytes())


def _write(objects: Objects, folder: Path, path: str, mode: str, oid: str) -> None:
    target = folder / path
    if mode == GITLINK:
        target.mkdir(parents=True, exist_ok=True)
        return
    _make_folders(folder, path)
    target.unlink(missing_ok=True)
    data = objects.read(oid)
    if mode == LINK:
        target.symlink_to(os.fsdecode(data))
        return
    target.write_bytes(data)
    target.chmod(0o755 if mode == "100755" else 0o644)


def _make_folders(folder: Path, path: str) -> None:
    """Make the parents of a file; whatever else has such a name was of an earlier tree and goes."""
    at = folder
    at.mkdir(parents=True, exist_ok=True)
    for part in path.split("/")[:-1]:
        at = at / part
        if at.is_symlink() or (at.exists() and not at.is_dir()):
            at.unlink()
        at.mkdir(exist_ok=True)


def _drop_empty_folders(folder: Path) -> None:
    for at, _, _ in os.walk(folder, topdown=False):
        if at != str(folder) and not os.listdir(at):
            os.rmdir(at)
