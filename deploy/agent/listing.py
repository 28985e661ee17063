"""What a base holds, as text: one line a file, sorted by path, the same bytes everywhere.

    files/1
    <sha256> <size> <mode> <owner> <path>

The mode is four octal digits, "link" (the sha256 is then that of the link's text), or "-" where
nobody knows it: a wheel's RECORD has none. The owner is "base" or "vendor". A path that holds a
character no terminal shows stands there as a JSON string.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterable
from typing import NamedTuple

from .words import Damaged, printable

HEAD = "files/1"
OWNERS = ("base", "vendor")
_URLSAFE = str.maketrans("-_", "+/")
# What pip adds to the dist-info of what it installs; no wheel holds it.
_NOTES = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"})


class Entry(NamedTuple):
    """One file of a base. `mode` is "" where it is not known."""

    path: str
    sha256: str
    size: int
    mode: str = ""
    owner: str = "base"


def text_of(entries: Iterable[Entry]) -> str:
    """Return the one text of these files."""
    ordered = sorted(entries, key=lambda entry: entry.path.encode("utf-8", "surrogateescape"))
    return "\n".join([HEAD, *map(_line, ordered), ""])


def _line(entry: Entry) -> str:
    path = entry.path
    if not path.isprintable() or path[:1] == '"':
        path = json.dumps(path)
    return f"{entry.sha256} {entry.size} {entry.mode or '-'} {entry.owner} {path}"


def parse(text: str) -> dict[str, Entry]:
    """Return path -> entry. Raises Damaged, which names every line that is wrong."""
    first, *rest = text.split("\n")
    entries: dict[str, Entry] = {}
    faults = [] if first == HEAD else [f"line 1: {first[:40]!r} is not {HEAD}"]
    if rest[-1:] != [""]:
        faults.append("its last line has no end")
    for number, line in enumerate(rest[:-1], 2):
        try:
            entry = _entry(line)
            if entry.path in entries:
                raise ValueError(f"{entry.path} stands there twice")
        except ValueError as err:
            faults.append(f"line {number}: {err}")
        else:
            entries[entry.path] = entry
    if faults:
        more = f"; and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise Damaged(
            "the listing of the base cannot be read",
            why=printable("; ".join(faults[:20]) + more),
            fix="make it again with `./inv files`, then `./inv lock`",
        )
    return entries


def _entry(line: str) -> Entry:
    parts = line.split(" ", 4)
    if len(parts) != 5:
        raise ValueError(f"{len(parts)} fields, 5 are due")
    sha, size, mode, owner, path = parts
    if len(sha) != 64 or not set(sha) <= set("0123456789abcdef"):
        raise ValueError(f"{sha[:70]!r} is no sha256")
    if not (size.isascii() and size.isdigit()):
        raise ValueError(f"{size!r} is no size")
    if mode not in ("-", "link") and not (len(mode) == 4 and set(mode) <= set("01234567")):
        raise ValueError(f"{mode!r} is no mode")
    if owner not in OWNERS:
        raise ValueError(f"{owner!r} is neither of {', '.join(OWNERS)}")
    if path.startswith('"'):
        path = str(json.loads(path))
    if _escapes(path):
        raise ValueError(f"{path!r} is no path below the site")
    return Entry(path, sha, int(size), "" if mode == "-" else mode, owner)


def _escapes(path: str) -> bool:
    return "\0" in path or any(part in ("", ".", "..") for part in path.split("/"))


def of_record(text: str, record: str) -> list[Entry]:
    """Return what a RECORD promises of the wheel itself, without what an installer adds to it.

    An installer appends rows for scripts outside of the site, for bytecode and for its own notes;
    what is left is the same for a wheel and for every place that it was installed to.

    Raises ValueError when it is no RECORD.
    """
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.rsplit(",", 2)
        if len(fields) != 3:
            raise ValueError(f"line {number} has {len(fields)} fields, 3 are due")
        path, spec, size = fields
        if path.startswith('"'):
            path = path[1:-1].replace('""', '"')
        if path == record or not spec or installed(path) or _escapes(path):
            continue
        kind, _, value = spec.partition("=")
        if kind != "sha256":
            raise ValueError(f"{path}: hashed by {kind}, not by sha256")
        sha = binascii.a2b_base64(value.translate(_URLSAFE) + "=" * (-len(value) % 4))
        found[path] = Entry(path, sha.hex(), int(size or 0))
    return list(found.values())


def installed(path: str) -> bool:
    """True for the notes that an installer leaves in a dist-info."""
    folder, _, name = path.rpartition("/")
    return folder.endswith(".dist-info") and name in _NOTES


def normal(name: str) -> str:
    """Return a distribution's name as indexes compare it: case and runs of - _ . do not matter."""
    parts = name.lower().replace("_", "-").replace(".", "-").split("-")
    return "-".join(part for part in parts if part)
