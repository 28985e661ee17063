"""What the base of a manifest holds, file by file, so that a whole package can be audited.

Three places know it: the RECORD of a pinned wheel (the target has its own copy, so only a digest is
pinned), the tree of the base commit, and for a vendor's image manifests/NAME.files, which is made
on a target and says what is the vendor's own. The text's form is the agent's (`agent/listing.py`).
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deploy.agent.listing import Entry, of_record, parse, text_of
from deploy.agent.plan import Plan
from deploy.agent.words import BundleError, printable
from deploy.errors import BadValues, StaleLock
from deploy.git import GITLINK, LINK, Git
from deploy.regular import read_regular
from deploy.wheel import DAMAGE, Wheel

__all__ = ["Base", "of_tree", "of_wheel", "read", "unlike_base", "with_vendor", "write"]

_MOST_BYTES = 32 << 20  # 100,000 files stay below
_MODES = {"100644": "0644", "100755": "0755", LINK: "link"}


@dataclass(frozen=True, slots=True)
class Base:
    """One listing. `pin` goes into the lock; `text` travels, or is "" where the target has it."""

    pin: Mapping[str, str] = field(default_factory=dict)
    text: str = ""


def of_wheel(wheel: Wheel) -> Base:
    """Return the base of a wheel: its RECORD's digest; the text is made anew on every target.

    Raises:
        StaleLock: the wheel has no RECORD of its own, or one that cannot be read.
    """
    record, text = _record(wheel)
    return Base({"from": "record", "record": record, "sha256": _sha256(text)})


def _record(wheel: Wheel) -> tuple[str, str]:
    """Return the RECORD's path, and the listing that is made of it."""
    try:
        with zipfile.ZipFile(wheel.path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
            if len(names) != 1 or names[0].count("/") != 1:
                raise ValueError(f"it holds {len(names)} RECORD files")
            return names[0], text_of(of_record(archive.read(names[0]).decode("utf-8"), names[0]))
    except DAMAGE as err:
        raise StaleLock(
            f"the wheel {wheel.path.name} does not say what it holds",
            why=printable(str(err)),
            fix="fetch it from a source that you trust, and pin the sha256 of that one",
        ) from err


def of_tree(repo: Path, commit: str, package: str, cache: Path) -> Base:
    """Return the base of a commit: every file below `package`; kept in `cache`, by the commit's id.

    What a build adds (extensions, generated versions) is in no commit: that is what
    manifests/NAME.files is for.
    """
    kept = cache / "listings" / f"{commit}-{package}.files"
    try:
        text = kept.read_text("utf-8", "surrogateescape")
        parse(text)
    except (OSError, BundleError):
        text = text_of(_entries(repo, commit, package))
        _write(kept, text)
    return Base({"from": "tree", "sha256": _sha256(text)}, text)


def _entries(repo: Path, commit: str, package: str) -> Iterator[Entry]:
    with Git(repo).objects() as objects:
        found = objects.commit(commit)
        if found is None:
            return  # `deploy.source` has named it already
        inside = [
            e for e in objects.files(found.tree) if e.name.startswith(package.encode() + b"/")
        ]
        for entry in inside:
            if entry.mode == GITLINK:
                continue
            sha, size = hashlib.sha256(), 0
            for piece in objects.stream(entry.oid):
                sha.update(piece)
                size += len(piece)
            path = entry.name.decode("utf-8", "surrogateescape")
            yield Entry(path, sha.hexdigest(), size, _MODES[entry.mode])


def with_vendor(base: Base, files: Path, wheel: Wheel | None = None) -> Base:
    """Return the base of a vendor's image: what `files` lists, each marked as base or vendor.

    A file is the base's where the base has the same bytes; its mode is then the image's.

    Raises:
        BadValues: `files` is no listing.
    """
    vendor = read(files)
    text = base.text or (_record(wheel)[1] if wheel else "")
    known = parse(text) if text else {}
    marked = text_of(
        entry._replace(owner="base" if _same(entry, known.get(entry.path)) else "vendor")
        for entry in vendor.values()
    )
    raw = hashlib.sha256(files.read_bytes()).hexdigest()
    return Base({"from": "files", "files": raw, "sha256": _sha256(marked)}, marked)


def read(path: Path) -> dict[str, Entry]:
    """Return what a manifests/NAME.files lists. Raises BadValues naming every wrong line."""
    try:
        return parse(read_regular(path, _MOST_BYTES).decode("utf-8"))
    except (BundleError, OSError, ValueError) as err:
        why = err.why if isinstance(err, BundleError) else getattr(err, "strerror", "") or str(err)
        raise BadValues(
            f"cannot use {path.name}",
            why=why,
            fix="make it again: `./inv files -n NAME -t TARGET`, from one as the vendor made it",
        ) from err


def write(path: Path, text: str) -> bool:
    """Write a listing that an agent sent; return whether the file changed. Raises Damaged."""
    parse(text)
    if path.exists() and path.read_bytes() == text.encode("utf-8", "surrogateescape"):
        return False
    _write(path, text)
    return True


def unlike_base(plan: Plan, base: Base) -> list[Entry]:
    """Return the vendor's own bytes that stand where the plan wants to write, and it forbids."""
    vendor = (
        {e.path: e for e in parse(base.text).values() if e.owner == "vendor"} if base.text else {}
    )
    found = []
    for entry in plan.files:
        known = vendor.get(entry.path)
        allowed = {state.sha256 for state in (*entry.assume, entry.want)}
        if known is not None and known.sha256 not in allowed:
            found.append(known)
    return found


def _same(one: Entry, other: Entry | None) -> bool:
    links = other is not None and (one.mode == "link") == (other.mode == "link")
    return other is not None and links and one.sha256 == other.sha256


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(text.encode("utf-8", "surrogateescape"))
    beside.replace(path)
