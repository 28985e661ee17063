"""Plan + blobs + agent -> one deterministic, self-running .pyz, and back again.

A bundle is a zip with nothing of its maker in it: members stored (never deflated, since zlib's
output differs between versions), in a fixed order, with one fixed time and mode. Its name carries
the first 12 hex digits of its own sha256.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from deploy.agent.plan import Plan
from deploy.agent.words import LISTING, SCRIPTS, canonical
from deploy.errors import StaleLock

AGENT = Path(__file__).resolve().parent / "agent"
# The earliest time a zip can hold; a bundle has no clock.
_TIME = (1980, 1, 1, 0, 0, 0)
_CHUNK = 1 << 20
# What zipfile raises on bytes that are no zip, or no longer the one they were.
DAMAGE = (
    *(OSError, ValueError, KeyError, IndexError, EOFError, OverflowError, RuntimeError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)

# Copies the content of each sha256 it is handed into the stream beside it, in the order given.
Fill = Callable[[Iterator[tuple[str, "Sink"]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A bundle on disk. `sha256` is that of the whole file, the identity `bundle`."""

    path: Path
    sha256: str
    plan: Plan
    inputs: Mapping[str, Any]
    agent: str  # sha256 over the agent's sources, see `agent_digest`


class Sink:
    """A stream into one member of the zip, which hashes what passes."""

    def __init__(self, target: IO[bytes]) -> None:
        self._target = target
        self.sha256 = hashlib.sha256()

    def write(self, piece: bytes) -> int:
        self.sha256.update(piece)
        return self._target.write(piece)


def pack(
    plan: Plan,
    inputs: Mapping[str, Any],
    fill: Fill,
    out: Path,
    *,
    listing: str = "",
    scripts: Mapping[str, bytes] | None = None,
) -> Bundle:
    """Write ``out/NAME-<12 hex>.pyz`` and return it; the same arguments give the same bytes.

    `fill` is asked once for the contents of all that `plan.blobs()` names; they are streamed and
    re-hashed on the way. `listing` says what the base holds, where a target cannot know; `scripts`
    are what belongs into launch.dir, as `inputs` pins them.

    Raises:
        StaleLock: a blob's bytes are not those of its name.
    """
    out.mkdir(parents=True, exist_ok=True)
    beside = out / f".{plan.name}.{os.getpid()}.pyz"
    try:
        with zipfile.ZipFile(beside, "w", zipfile.ZIP_STORED, strict_timestamps=True) as archive:
            for name, text in _members(plan, inputs, listing):
                archive.writestr(_info(name), text)
            for name, text in sorted((scripts or {}).items()):
                archive.writestr(_info(SCRIPTS + name), text)
            fill(_sinks(archive, plan.blobs()))
        sha256 = file_sha256(beside)
        path = out / f"{plan.name}-{sha256[:12]}.pyz"
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return Bundle(path=path, sha256=sha256, plan=plan, inputs=inputs, agent=agent_digest())


def read(path: Path, *, pinned: str = "") -> Bundle:
    """Open a bundle that somebody brought; every member is checked before anything is believed.

    With `pinned`, the sha256 of a bundle that was packed here, the file must be that one to the
    byte, and then its members need no check of their own.

    Raises:
        StaleLock: it is not a whole, unaltered bundle of this product, or not the pinned one.
    """
    try:
        sha256 = file_sha256(path)
        if pinned and sha256 != pinned:
            raise _not_pinned(path, sha256, pinned)
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if not pinned:
                _check_members(names, archive)
            plan = Plan.parse(_document(archive, "plan.json"))
            inputs = _document(archive, "inputs.json")
            if not isinstance(inputs, dict):
                raise ValueError("inputs.json is no mapping")
            agent = _agent_digest(
                (n.removeprefix("agent/"), archive.read(n)) for n in names if _is_agent(n)
            )
            if not pinned:
                _check_contents(path, plan, inputs, archive)
    except DAMAGE as err:
        raise StaleLock(
            f"cannot read the bundle {path}",
            why=f"{type(err).__name__}: {err}",
            fix="fetch or make it again (`./inv bundle`) and compare its sha256 with the lock's",
        ) from err
    return Bundle(path=path, sha256=sha256, plan=plan, inputs=inputs, agent=agent)


def _not_pinned(path: Path, sha256: str, pinned: str) -> StaleLock:
    return StaleLock(
        f"{path.name} is not the bundle that was locked",
        why=f"its sha256 is {sha256}, the lock pins {pinned}",
        fix=f"remove {path}; it is made again from the source",
    )


def agent_digest() -> str:
    """Return the sha256 over names and bytes of the agent's sources in this checkout."""
    return _agent_digest(_agent_sources())


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file's bytes, read in pieces."""
    found = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            found.update(piece)
    return found.hexdigest()


def listing_of(bundle: Bundle) -> str:
    """Return what the base holds, as the bundle carries it; "" where it carries none."""
    with zipfile.ZipFile(bundle.path) as archive:
        if LISTING not in archive.namelist():
            return ""
        return archive.read(LISTING).decode("utf-8", "surrogateescape")


def _members(plan: Plan, inputs: Mapping[str, Any], listing: str) -> Iterator[tuple[str, bytes]]:
    for name, text in _agent_sources():
        if name == "__main__.py":
            yield "__main__.py", text
        else:
            yield f"agent/{name}", text
    if listing:
        yield LISTING, listing.encode("utf-8", "surrogateescape")
    yield "inputs.json", canonical(inputs)
    yield "plan.json", canonical(plan.to_json())


def _agent_sources() -> list[tuple[str, bytes]]:
    found = [(path.name, path.read_bytes()) for path in AGENT.glob("*.py")]
    return sorted(found)


def _agent_digest(sources: Any) -> str:
    found = hashlib.sha256()
    for name, text in sorted(sources):
        found.update(f"{name}\0{len(text)}\0".encode())
        found.update(text)
    return found.hexdigest()


def _is_agent(name: str) -> bool:
    return name == "__main__.py" or name.startswith("agent/")


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _TIME)
    info.create_system = 3  # Unix, whatever wrote it
    info.external_attr = 0o100644 << 16
    return info


def _sinks(archive: zipfile.ZipFile, blobs: Sequence[str]) -> Iterator[tuple[str, Sink]]:
    """Open one member after the other; each is checked when the next one is asked for."""
    for sha in blobs:
        with archive.open(_info(f"blobs/{sha}"), "w") as member:
            sink = Sink(member)
            yield sha, sink
        if sink.sha256.hexdigest() != sha:
            raise StaleLock(
                f"cannot pack the blob {sha}",
                why=f"its content has the sha256 {sink.sha256.hexdigest()}",
                fix="remove out/cache and run again, so that it is derived from the source anew",
            )


def _check_members(names: list[str], archive: zipfile.ZipFile) -> None:
    if len(names) != len(set(names)):
        raise ValueError("a member stands in it twice")
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise ValueError(f"{info.filename!r} is compressed; a bundle is stored")
        known = info.filename in ("__main__.py", "plan.json", "inputs.json", LISTING)
        if not known and not info.filename.startswith(("agent/", "blobs/", SCRIPTS)):
            raise ValueError(f"{info.filename!r} does not belong into a bundle")


def _document(archive: zipfile.ZipFile, name: str) -> Any:
    """Return a JSON document in the one form that has a digest: no key twice, no half character."""
    raw = archive.read(name)
    found = json.loads(raw)
    if canonical(found) != raw:
        raise ValueError(f"{name} is not written as a bundle's")
    return found


def _check_contents(
    path: Path, plan: Plan, inputs: Mapping[str, Any], archive: zipfile.ZipFile
) -> None:
    _check_blobs(plan, archive)
    if LISTING in archive.namelist():
        archive.read(LISTING)  # by its checksum; nothing in here names its digest
    _check_scripts(inputs, archive)
    _check_frame(path, archive)


def _check_frame(path: Path, archive: zipfile.ZipFile) -> None:
    """Every byte must stand where `pack` puts it, so that it has one meaning.

    zipfile, Python's importer of zips and the agent each search the directory in their own way. A
    second end record, a zip64 one or a header that contradicts it would make what is checked here,
    what runs and what is deployed three different things.
    """
    at, table = 0, b""
    with path.open("rb") as file:
        for found in archive.infolist():
            info, name, size = (
                _info(found.filename),
                found.filename.encode("ascii"),
                found.file_size,
            )
            info.CRC, info.file_size, info.compress_size = found.CRC, size, size
            head = info.FileHeader(zip64=False)
            file.seek(at)
            if found.header_offset != at or file.read(len(head)) != head:
                raise ValueError(f"{found.filename!r} does not begin as a bundle's member does")
            made_by = info.create_version | info.create_system << 8
            fields = (info.extract_version, 0, 0, *struct.unpack("<2H", head[10:14]))
            sizes = (found.CRC, size, size, len(name), 0, 0, 0, 0, info.external_attr, at)
            table += struct.pack("<4s6H3L5H2L", b"PK\1\2", made_by, *fields, *sizes) + name
            at += len(head) + size
        count = len(archive.infolist())
        end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, len(table), at, 0)
        file.seek(at)
        if file.read(len(table) + len(end) + 1) != table + end:
            raise ValueError("its directory is not as a bundle's")


def _check_blobs(plan: Plan, archive: zipfile.ZipFile) -> None:
    for sha in plan.blobs():
        found = hashlib.sha256()
        with archive.open(f"blobs/{sha}") as stream:
            while piece := stream.read(_CHUNK):
                found.update(piece)
        if found.hexdigest() != sha:
            raise ValueError(f"blob {sha} has the content of {found.hexdigest()}")


def _check_scripts(inputs: Mapping[str, Any], archive: zipfile.ZipFile) -> None:
    """Hold the scripts against what the inputs say of them; none may lack, none may be added."""
    names = {n.removeprefix(SCRIPTS) for n in archive.namelist() if n.startswith(SCRIPTS)}
    promised = inputs.get("scripts") or {}
    if not isinstance(promised, dict) or not all(isinstance(r, dict) for r in promised.values()):
        raise ValueError("the scripts of inputs.json are no mapping of mappings")
    if names != set(promised):
        raise ValueError(f"it holds the scripts {sorted(names)}, promised are {sorted(promised)}")
    for name in names:
        found = hashlib.sha256(archive.read(SCRIPTS + name)).hexdigest()
        if found != promised[name]["sha256"]:
            raise ValueError(f"the script {name} has the sha256 {found}")


def drop_older(out: Path, keep: Bundle, *, locked: str = "") -> None:
    """Remove other bundles of this name from `out`, so that nobody uploads yesterday's.

    That of the sha256 `locked` stays: it undoes a deploy when the source is gone or edited.
    """
    kept = (keep.path, out / f"{keep.plan.name}-{locked[:12]}.pyz")
    for path in sorted(out.glob(f"{keep.plan.name}-" + "[0-9a-f]" * 12 + ".pyz")):
        if path not in kept:
            path.unlink()


__all__ = ["Bundle", "agent_digest", "drop_older", "file_sha256", "listing_of", "pack", "read"]
