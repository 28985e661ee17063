"""Where the contents come from: a bundle, a folder, or memory. Nobody here is trusted.

A source only promises to find bytes; whoever takes them hashes them (`take`).
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from .plan import Plan
from .tree import TreeReader
from .words import Damaged, printable

Begin = Callable[[Sequence[str]], None]

CHUNK = 1 << 18
_END, _ENTRY, _LOCAL = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_MOST_DIRECTORY = 64 << 20  # bytes of a central directory that we are willing to read


class Blobs(Protocol):
    """Finds contents by their sha256."""

    def has(self, sha256: str) -> bool: ...

    def prepare(self, wanted: Sequence[str]) -> None:
        """Get ready to hand out these contents, in this order: one call, before the first."""
        ...

    def fetch(self, tree: TreeReader, plan: Plan, begin: Begin) -> None:
        """Bring what a deploy will need close by, before the site is locked.

        `begin` takes paths of modules whose contents have come: compiling can start meanwhile.
        """
        ...

    def chunks(self, sha256: str) -> Iterator[bytes]:
        """Yield the bytes that are said to have this digest. Raises KeyError."""
        ...


class MemoryBlobs:
    """Contents that came over a line, or none at all."""

    def __init__(self, contents: Mapping[str, bytes] | None = None) -> None:
        self._contents = dict(contents or {})

    def has(self, sha256: str) -> bool:
        return sha256 in self._contents

    def prepare(self, wanted: Sequence[str]) -> None:
        """All of it is at hand."""

    def fetch(self, tree: TreeReader, plan: Plan, begin: Begin) -> None:
        """All of it is at hand."""

    def chunks(self, sha256: str) -> Iterator[bytes]:
        data = self._contents[sha256]
        return (data[i : i + CHUNK] for i in range(0, len(data), CHUNK))


class ZipBlobs:
    """A bundle, read where it lies. Its entries are stored, so each is one range of the file.

    `zipfile` would do, but its import alone takes longer than a whole verify may.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._entries = _directory(self._fd)
        except (OSError, struct.error, UnicodeDecodeError) as err:
            raise _damaged(path, f"{type(err).__name__}: {err}") from err

    def names(self) -> list[str]:
        return sorted(self._entries)

    def has(self, sha256: str) -> bool:
        return f"blobs/{sha256}" in self._entries

    def prepare(self, wanted: Sequence[str]) -> None:
        """All of it is at hand."""

    def fetch(self, tree: TreeReader, plan: Plan, begin: Begin) -> None:
        """All of it is at hand."""

    def chunks(self, sha256: str) -> Iterator[bytes]:
        return self.entry(f"blobs/{sha256}")

    def whole(self) -> Iterator[bytes]:
        """Yield the bundle's own bytes."""
        with open(self.path, "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk

    def entry(self, name: str) -> Iterator[bytes]:
        """Yield one entry's bytes. Raises KeyError, or Damaged where the file is cut off."""
        offset, size = self._entries[name]
        head = os.pread(self._fd, 30, offset)
        if len(head) != 30 or head[:4] != _LOCAL:
            raise _damaged(self.path, f"{printable(name)} does not start where it should")
        offset += 30 + sum(struct.unpack("<HH", head[26:30]))  # the name and an extra field follow
        while size:
            chunk = os.pread(self._fd, min(CHUNK, size), offset)
            if not chunk:
                raise _damaged(self.path, f"it ends inside {printable(name)}")
            size -= len(chunk)
            offset += len(chunk)
            yield chunk


def take(blobs: Blobs, sha256: str, sink: Callable[[bytes], object]) -> int:
    """Hand the content to `sink`, chunk by chunk; return its size.

    Raises Damaged when it is missing, or when its digest is another one (after the last chunk).
    """
    sha, size = hashlib.sha256(), 0
    try:
        for chunk in blobs.chunks(sha256):
            sha.update(chunk)
            size += len(chunk)
            sink(chunk)
    except KeyError as err:
        raise Damaged(
            "a content of the plan is not in the bundle",
            why=f"there is no blob {sha256} (the bundle that an image holds has no big ones)",
            fix="deploy the whole bundle that `./inv bundle` makes: `./inv deploy` brings it",
        ) from err
    if sha.hexdigest() != sha256:
        raise Damaged(
            "a blob of the bundle is damaged",
            why=f"the blob {sha256} holds bytes with the digest {sha.hexdigest()}",
            fix="make the bundle again with `./inv bundle`, or send it again",
        )
    return size


def _directory(fd: int) -> dict[str, tuple[int, int]]:
    """Return name -> (offset, size) of every entry; refuse what our own bundles never hold."""
    length = os.fstat(fd).st_size
    tail_at = max(0, length - 66000)
    tail = os.pread(fd, length - tail_at, tail_at)
    at = tail.rfind(_END)
    if at < 0:
        raise struct.error("no end of a zip directory in it")
    count, size, offset = struct.unpack("<HII", tail[at + 10 : at + 20])
    if size > _MOST_DIRECTORY or offset + size > tail_at + at:
        raise struct.error("its directory lies outside the file")
    table, entries, pos = os.pread(fd, size, offset), {}, 0
    while pos < len(table):
        fields = struct.unpack("<4s6H3I5H2I", table[pos : pos + 46])
        if fields[0] != _ENTRY:
            raise struct.error("its directory is torn")
        method, packed, plain, name_size, extra, comment = *fields[4:5], *fields[8:13]
        name = table[pos + 46 : pos + 46 + name_size].decode("utf-8")
        if method != 0 or packed != plain:
            raise struct.error(f"{printable(name)} is packed; our bundles only store")
        if name in entries:
            raise struct.error(f"{printable(name)} stands in it twice")
        entries[name] = (fields[16], plain)
        pos += 46 + name_size + extra + comment
    if len(entries) != count:
        raise struct.error(f"it promises {count} entries and lists {len(entries)}")
    return entries


def _damaged(path: str, why: str) -> Damaged:
    return Damaged(
        f"the bundle {printable(path)} is damaged",
        why=why,
        fix="make it again with `./inv bundle`, or upload it again; compare the sha256 first",
    )
