"""The one layer of ours, as a tar whose every byte follows from its entries and one time stamp.

`write_layer` is this module's face. Python's own `tarfile` is not used for writing: the expected
digest can only be known beforehand when each field is set here, in the way in which Docker from 26
and buildah from 1.39 set it. It is the second, independent reader in `read_back`.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import IO

from deploy.errors import BadValues, BundleError, Exit, StaleLock

BLOCK = 512
SLICE = 1 << 20
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
_LAST_OCTAL_SIZE = 8**11  # the size field holds eleven octal digits


class Kind(str, Enum):
    """What an entry is."""

    FILE = "file"
    FOLDER = "folder"
    LINK = "link"
    WHITEOUT = "whiteout"  # `path` is what must go


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One path of the layer, relative to the image's root, without a leading slash.

    The content is either `data` or, for what is too big to hold, `size` bytes that `source` opens.
    `mode` holds permission bits only.
    """

    path: str
    kind: Kind = Kind.FILE
    mode: int = 0o644
    data: bytes = b""
    size: int = 0
    source: Callable[[], IO[bytes]] | None = None
    link: str = ""
    uid: int = 0
    gid: int = 0
    sha256: str = ""  # of the content, where somebody promised it

    @property
    def length(self) -> int:
        """The number of content bytes."""
        if self.kind is not Kind.FILE:
            return 0
        return self.size if self.source else len(self.data)

    @property
    def stored_path(self) -> str:
        """The path as the tar has it: a folder ends in a slash, a deletion has a marked name."""
        if self.kind is Kind.FOLDER:
            return self.path + "/"
        if self.kind is Kind.WHITEOUT:
            folder, _, name = self.path.rpartition("/")
            return f"{folder}/{WHITEOUT}{name}" if folder else WHITEOUT + name
        return self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What was written: `diff_id` is `sha256:` and the digest of the uncompressed tar."""

    diff_id: str
    size: int
    entries: int
    path: Path | None = None

    @property
    def hex(self) -> str:
        return self.diff_id.removeprefix("sha256:")


@dataclass(frozen=True, slots=True)
class Owner:
    """Mode and owner of a folder that the base already has and the layer must not change."""

    mode: int = 0o755
    uid: int = 0
    gid: int = 0


def write_layer(
    entries: Iterable[Entry],
    out: IO[bytes],
    *,
    epoch: int,
    folders: Mapping[str, Owner] | None = None,
) -> Layer:
    """Write the layer tar to `out` and say what it is. Every time stamp is `epoch` (seconds, UTC).

    Parent folders are added, with the mode and owner that `folders` gives them: an engine stamps a
    missing parent with the clock, and then no digest repeats.

    Raises:
        BadValues: an entry that no engine could store as meant; all such entries at once.
    """
    table = _complete(entries, folders or {})
    _check(table, epoch)
    sink = _Sink(out)
    for entry in table:
        for block in _encode(entry, epoch):
            sink.write(block)
    sink.write(bytes(2 * BLOCK))
    return Layer(diff_id="sha256:" + sink.hash.hexdigest(), size=sink.size, entries=len(table))


@dataclass(slots=True)
class _Sink:
    out: IO[bytes]
    size: int = 0
    hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def write(self, block: bytes) -> None:
        self.out.write(block)
        self.hash.update(block)
        self.size += len(block)


def _complete(entries: Iterable[Entry], folders: Mapping[str, Owner]) -> list[Entry]:
    """Return the entries with their parents, depth first, siblings by the bytes of their names."""
    given = list(entries)
    known = {entry.path for entry in given if entry.kind is Kind.FOLDER}
    parents = {parent for entry in given for parent in _parents(entry.path)} - known
    for path in parents:
        owner = folders.get(path, Owner())
        given.append(
            Entry(path=path, kind=Kind.FOLDER, mode=owner.mode, uid=owner.uid, gid=owner.gid)
        )
    return sorted(given, key=lambda entry: _order(entry.stored_path))


def _order(path: str) -> tuple[bytes, ...]:
    return tuple(part.encode() for part in path.rstrip("/").split("/"))


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _check(table: list[Entry], epoch: int) -> None:
    faults = [fault for entry in table for fault in _faults(entry)]
    seen: set[str] = set()
    for entry in table:
        if entry.path in seen:
            faults.append(f"{entry.path!r} stands there twice")
        seen.add(entry.path)
    flat = {entry.path for entry in table if entry.kind is not Kind.FOLDER}
    faults += [
        f"{entry.path!r} lies below {parent!r}, which is no folder"
        for entry in table
        for parent in _parents(entry.path)
        if parent in flat
    ]
    if not 0 < epoch < 8**11:
        faults.append(f"the time stamp {epoch} is not between 1 and {8**11 - 1}")
    if faults:
        raise BadValues(
            "cannot write this layer",
            why="; ".join(faults),
            fix="mend these paths in the source or in the manifest",
        )


def _faults(entry: Entry) -> Iterator[str]:
    parts = entry.path.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in entry.path:
        yield f"{entry.path!r} is no plain path below the root"
    if entry.kind is not Kind.WHITEOUT and any(part.startswith(WHITEOUT) for part in parts):
        yield f"{entry.path!r} would be taken for a deletion by the engine"
    if entry.mode & ~0o7777:
        yield f"{entry.path!r} has mode {entry.mode:o}, which is more than permission bits"
    if not (0 <= entry.uid < 8**7 and 0 <= entry.gid < 8**7):
        yield f"{entry.path!r} has an owner that does not fit into a header"


def _encode(entry: Entry, epoch: int) -> Iterator[bytes]:
    records = _pax_records(entry)
    if records:
        yield from _pax_header(entry.stored_path, records)
    yield _header(entry, epoch, plain=not records)
    if not entry.length:
        return
    written = 0
    for block in _content(entry):
        written += len(block)
        yield block
    if written != entry.length:
        raise BundleError(
            f"{entry.path} changed while it was being packed",
            why=f"expected {entry.length} bytes, read {written}",
            fix="run it again when nothing else writes there",
            exit=Exit.STALE,
        )
    yield bytes(-written % BLOCK)


def _content(entry: Entry) -> Iterator[bytes]:
    if entry.source is None:
        yield entry.data
        return
    with entry.source() as stream:
        while block := stream.read(SLICE):
            yield block


def _pax_records(entry: Entry) -> dict[str, str]:
    """The extended records that the entry needs; empty when a plain header can say it all."""
    path, link, size = entry.stored_path, entry.link, entry.length
    records = {}
    if len(link.encode()) > 100 or not link.isascii():
        records["linkpath"] = link
    if size >= _LAST_OCTAL_SIZE:
        records["size"] = str(size)
    long = len(path.encode()) > 100 or not path.isascii()
    if long and (records or not _split(path)):
        records["path"] = path
    return dict(sorted(records.items()))


def _split(path: str) -> tuple[str, str] | None:
    """Cut an ASCII path into the header's prefix (<= 155) and name (<= 100), or return None."""
    if len(path) <= 100 or not path.isascii():
        return None
    length = min(len(path), 156)
    if length == len(path) and path.endswith("/"):
        length -= 1
    cut = path.rfind("/", 0, length)
    prefix, name = path[:cut], path[cut + 1 :]
    if cut <= 0 or not 0 < len(name) <= 100:
        return None
    return prefix, name


def _pax_header(path: str, records: Mapping[str, str]) -> Iterator[bytes]:
    body = b"".join(_pax_record(key, value) for key, value in records.items())
    folder, _, base = path.rpartition("/")
    name = "/".join(part for part in (folder, "PaxHeaders.0", base) if part)
    # Written as Go's tar package does it: no owner, no time, and the device fields left empty.
    fields = {
        "name": _ascii(name)[:100].rstrip(b"/"),
        "mode": _octal(0, 8),
        "uid": _octal(0, 8),
        "gid": _octal(0, 8),
        "size": _octal(len(body), 12),
        "mtime": _octal(0, 12),
        "type": b"x",
    }
    yield _block(fields)
    yield body + bytes(-len(body) % BLOCK)


def _pax_record(key: str, value: str) -> bytes:
    """One line, `<length> key=value`, where the length counts its own digits and the newline."""
    rest = f" {key}={value}\n".encode()
    size = len(rest)
    while size != (total := len(rest) + len(str(size))):
        size = total
    return str(size).encode() + rest


def _header(entry: Entry, epoch: int, plain: bool) -> bytes:
    path = entry.stored_path
    split = _split(path) if plain else None
    prefix, name = split or ("", path)
    size = entry.length if entry.length < _LAST_OCTAL_SIZE else 0
    return _block(
        {
            "name": _cut(name),
            "mode": _octal(_mode_field(entry), 8),
            "uid": _octal(entry.uid, 8),
            "gid": _octal(entry.gid, 8),
            "size": _octal(size, 12),
            "mtime": _octal(epoch, 12),
            "type": {Kind.FOLDER: b"5", Kind.LINK: b"2"}.get(entry.kind, b"0"),
            "link": _cut(entry.link),
            "devmajor": _octal(0, 8),
            "devminor": _octal(0, 8),
            "prefix": prefix.encode(),
        }
    )


def _mode_field(entry: Entry) -> int:
    return {Kind.LINK: 0o777, Kind.WHITEOUT: 0o600}.get(entry.kind, entry.mode)


_FIELDS = {
    "name": (0, 100),
    "mode": (100, 8),
    "uid": (108, 8),
    "gid": (116, 8),
    "size": (124, 12),
    "mtime": (136, 12),
    "type": (156, 1),
    "link": (157, 100),
    "devmajor": (329, 8),
    "devminor": (337, 8),
    "prefix": (345, 155),
}


def _block(fields: Mapping[str, bytes]) -> bytes:
    block = bytearray(BLOCK)
    for key, value in fields.items():
        start, _ = _FIELDS[key]
        block[start : start + len(value)] = value
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _octal(value: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, value)


def _ascii(text: str) -> bytes:
    return text.encode("ascii", "ignore")


def _cut(text: str) -> bytes:
    """A name for the hundred-byte field; where it is cut at a slash, that slash goes as well.

    Old readers take a regular file whose short name ends in a slash for a folder.
    """
    name = _ascii(text)
    if len(name) > 100 and name[99:100] == b"/":
        return name[:99]
    return name[:100]


def confirm(entries: Iterable[Entry], stream: IO[bytes]) -> None:
    """Raise StaleLock unless Python's own tar reader finds exactly the entries, and their bytes."""
    found = {row[0]: row[1:] for row in read_back(stream)}
    faults = []
    for entry in entries:
        row = found.pop(entry.stored_path.rstrip("/"), None)
        if row is None or not _matches(entry, row):
            faults.append(f"{entry.path}: packed as {entry.kind.value}, read back as {row}")
    faults += [f"{path}: nobody packed it" for path, row in found.items() if row[0] != "folder"]
    if faults:
        raise StaleLock(
            "the layer does not hold what was put into it",
            why="; ".join(sorted(faults)),
            fix="remove out/ and build again; if it stays so, this is a bug",
        )


def _matches(entry: Entry, row: tuple[str, int, int, str, str]) -> bool:
    kind, mode, size, link, sha256 = row
    if entry.kind is Kind.FILE:
        want = entry.sha256 or ("" if entry.source else hashlib.sha256(entry.data).hexdigest())
        same = (kind, mode, size) == ("file", entry.mode, entry.length)
        return same and want in ("", sha256)
    if entry.kind is Kind.LINK:
        return (kind, link) == ("link", entry.link)
    return (kind, size) == (("folder", 0) if entry.kind is Kind.FOLDER else ("file", 0))


def read_back(stream: IO[bytes]) -> list[tuple[str, str, int, int, str, str]]:
    """Read a layer with Python's own tar reader: (path, kind, mode, size, link, sha256) per entry.

    It shares no code with the writer, so it can contradict it.
    """
    rows = []
    with tarfile.open(fileobj=stream, mode="r|") as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            digest = _hash(content) if content else ""
            kind = "folder" if member.isdir() else "link" if member.issym() else "file"
            mode = member.mode & 0o7777
            rows.append((member.name, kind, mode, member.size, member.linkname, digest))
    return rows


def _hash(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := stream.read(SLICE):
        digest.update(block)
    return digest.hexdigest()
