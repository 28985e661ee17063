"""A zip as parts that can be changed one by one, and put together so that the rest still fits.

Only what a bundle is made of: stored members. `fuzz.run` mutates a bundle by these parts, since a
flipped byte of a zip is caught by the first checksum and tells nothing of what comes behind it.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_LOCAL, _ENTRY, _END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), b"PK\5\6"
_ZIP64_END, _ZIP64_LOCATOR = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI")
# The fields of both headers that a reader may believe, and where they stand in the record.
_IN_LOCAL = {"version": 1, "flags": 2, "method": 3, "crc": 6, "packed": 7, "plain": 8}
_IN_ENTRY = {"version": 2, "flags": 3, "method": 4, "crc": 7, "packed": 8, "plain": 9}
_IN_ENTRY |= {"disk": 13, "at": 16}
_SHORT = frozenset({"version", "flags", "method", "disk"})
_EDGES = (0, 1, 8, 0x800, 0x808, 0x7FFF, 0xFFFE, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF)
_NAMES = (
    *("plan.json", "inputs.json", "base.files", "__main__.py", "agent/", "agent/plan.py"),
    *("agent/../plan.json", "blobs/" + "0" * 64, "plan.json\0", "/plan.json", "PLAN.JSON", ""),
    *("plan.json/", "agent\\x.py", "\u6587.py", "a" * 300),
)


@dataclass
class Member:
    name: bytes
    content: bytes
    extra: bytes = b""  # of the directory
    local_extra: bytes = b""
    local_name: bytes | None = None  # another one than the directory's
    lies: dict[str, int] = field(default_factory=dict)  # in the directory
    local_lies: dict[str, int] = field(default_factory=dict)


@dataclass
class Parts:
    members: list[Member]
    before: bytes = b""  # what stands in front of the first member
    between: bytes = b""  # between the last member and the directory
    comment: bytes = b""
    behind: bytes = b""  # after the comment
    lies: dict[int, int] = field(default_factory=dict)  # of the end record, by index
    zip64: bool = False


def parts_of(data: bytes) -> Parts | None:
    """Take a zip apart. What was lied about is lost; None for what is no zip any more."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as found:
            infos = found.infolist()
            if any(info.compress_type != zipfile.ZIP_STORED for info in infos) or len(infos) > 60:
                return None
            members = [Member(i.filename.encode(), found.read(i), i.extra) for i in infos]
            return Parts(members, comment=found.comment)
    except Exception:  # noqa: BLE001  whatever a damaged zip raises
        return None


def joined(parts: Parts) -> bytes:
    """Put the parts together: every size, offset and checksum is right unless it is a lie."""
    out, table = bytearray(parts.before), bytearray()
    for member in parts.members:
        at, size, crc = len(out), len(member.content), zlib.crc32(member.content)
        name = member.name if member.local_name is None else member.local_name
        head = [b"PK\3\4", 20, 0, 0, 0, 33, crc, size, size, len(name), len(member.local_extra)]
        out += _LOCAL.pack(*_lied(head, member.local_lies, _IN_LOCAL))
        out += name + member.local_extra + member.content
        row = [b"PK\1\2", 0x314, 20, 0, 0, 0, 33, crc, size, size, len(member.name)]
        row += [len(member.extra), 0, 0, 0, 0o100644 << 16, at]
        table += _ENTRY.pack(*_lied(row, member.lies, _IN_ENTRY))
        table += member.name + member.extra
    out += parts.between
    at, count = len(out), len(parts.members)
    out += table
    if parts.zip64:
        there = len(out)
        out += _ZIP64_END.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(table), at)
        out += _ZIP64_LOCATOR.pack(b"PK\6\7", 0, there, 1)
    end = [0, 0, count, count, len(table), at, len(parts.comment)]
    for index, value in parts.lies.items():
        end[index] = value & (0xFFFFFFFF if index in (4, 5) else 0xFFFF)
    return bytes(out + _END + struct.pack("<4H2IH", *end) + parts.comment + parts.behind)


def _lied(record: list[Any], lies: dict[str, int], index: dict[str, int]) -> list[Any]:
    for name, value in lies.items():
        if name in index:
            record[index[name]] = value & (0xFFFF if name in _SHORT else 0xFFFFFFFF)
    return record


Anew = Callable[[bytes, int], bytes]


def mutate(data: bytes, most: int, seed: int, anew: Anew) -> bytes:
    """Change one to three things of a bundle. `anew` is the fuzzer's own change of some bytes."""
    choose = random.Random(seed)
    parts = parts_of(data)
    if parts is None or not parts.members or choose.random() < 0.1:
        return anew(data, most)
    for _ in range(choose.choice((1, 1, 1, 2, 3))):
        choose.choice(_ACTS)(parts, choose, anew)
    made = joined(parts)
    return made if len(made) <= most else data


def _content(parts: Parts, choose: random.Random, anew: Anew) -> None:
    member = choose.choice(parts.members)
    member.content = anew(member.content or b"x", 2000)


def _document(parts: Parts, choose: random.Random, _: Anew) -> None:
    """Change one value of a JSON document, so that it is one still, in the form of a bundle's."""
    found = [m for m in parts.members if m.name.endswith(b".json")]
    if not found:
        return
    member = choose.choice(found)
    try:
        root = {"": json.loads(member.content)}
        text = json.dumps(
            _changed(root, choose)[""],
            sort_keys=True,
            separators=(",", ":"),
            ensure_ascii=choose.random() < 0.1,
        )
    except (ValueError, RecursionError, KeyError):
        return
    member.content = text.encode("utf-8", "surrogatepass")


_VALUES = (
    *(None, True, False, 0, -1, 1.5, 2**64, 1e308, "", "x", "\0", "\ud800", "..", "/", "a/../b"),
    *([], {}, [[]], {"": {}}, "file", "link", "absent", "module", "data", "extension"),
    *("0644", "0755", "4755", "p/a.py", "p", "p/a.py/b", "/s", "plan/1", "0" * 64, ".dcu-bundle"),
)


def _changed(root: dict[str, Any], choose: random.Random) -> dict[str, Any]:
    place: Any = root
    key: Any = ""
    while isinstance(place[key], (dict, list)) and place[key] and choose.random() < 0.85:
        place = place[key]
        key = (
            choose.choice(sorted(place))
            if isinstance(place, dict)
            else choose.randrange(len(place))
        )
    act = choose.randrange(4)
    if act == 0 and place is not root:
        del place[key]
    elif act == 1 and isinstance(place, list):
        place.insert(key, place[choose.randrange(len(place))])
    elif act == 2 and isinstance(place, dict) and place is not root:
        place[str(choose.choice(_VALUES))] = place[key]
    else:
        place[key] = choose.choice(_VALUES)
    return root


def _blob(parts: Parts, choose: random.Random, anew: Anew) -> None:
    """Other contents under the right name, in the plan too."""
    found = [m for m in parts.members if m.name.startswith(b"blobs/")]
    if not found:
        return
    member = choose.choice(found)
    member.content = anew(member.content or b"x", 500)
    old, member.name = member.name, b"blobs/" + hashlib.sha256(member.content).hexdigest().encode()
    for other in parts.members:
        if other.name == b"plan.json":
            other.content = other.content.replace(old[6:], member.name[6:])


def _rename(parts: Parts, choose: random.Random, anew: Anew) -> None:
    member = choose.choice(parts.members)
    name = choose.choice([*_NAMES, *(m.name.decode("utf-8", "replace") for m in parts.members)])
    raw = anew(member.name or b"x", 100) if choose.random() < 0.3 else name.encode()
    if choose.random() < 0.5:
        member.local_name = raw
    else:
        member.name = raw


def _list(parts: Parts, choose: random.Random, _: Anew) -> None:
    """Add, drop, double or move a member."""
    at = choose.randrange(len(parts.members))
    act = choose.randrange(4)
    if act == 0:
        parts.members.insert(at, Member(choose.choice(_NAMES).encode(), b"V = 2\n"))
    elif act == 1 and len(parts.members) > 1:
        del parts.members[at]
    elif act == 2:
        chosen = parts.members[at]
        parts.members.append(Member(chosen.name, chosen.content + b" "))
    else:
        parts.members.append(parts.members.pop(at))


def _lie(parts: Parts, choose: random.Random, _: Anew) -> None:
    """One field of a header says what is not so."""
    member = choose.choice(parts.members)
    near = [len(member.content) + n for n in (-1, 1)]
    value = choose.choice([*_EDGES, *near, choose.getrandbits(32)]) % 2**32
    if choose.random() < 0.5:
        member.lies[choose.choice(sorted(_IN_ENTRY))] = value
    else:
        member.local_lies[choose.choice(sorted(_IN_LOCAL))] = value
    if choose.random() < 0.3:  # both headers tell the same
        name = choose.choice(sorted(_IN_LOCAL))
        member.lies[name] = member.local_lies[name] = value


def _extra(parts: Parts, choose: random.Random, _: Anew) -> None:
    """An extra field; a zip64 one may say other sizes and another offset."""
    member = choose.choice(parts.members)
    size = len(member.content)
    numbers = [choose.choice((size, 0, 1, 2**40)) for _ in range(choose.randrange(4))]
    body = struct.pack(f"<{len(numbers)}Q", *numbers)
    made = struct.pack("<HH", choose.choice((1, 0x7075, 0x9999)), len(body)) + body
    if choose.random() < 0.5:
        member.extra = made
        for name in ("plain", "packed", "at")[: len(numbers)]:
            member.lies[name] = 0xFFFFFFFF
    else:
        member.local_extra = made


def _end(parts: Parts, choose: random.Random, anew: Anew) -> None:
    """What stands around: in front, behind, in the comment, in the end record."""
    end = _END + bytes(18)
    some = choose.choice([b"#!/usr/bin/python3\n", end, end[:10], b"PK\3\4", bytes(40), b"\n"])
    some = anew(some, 200) if choose.random() < 0.3 else some
    act = choose.randrange(6)
    if act == 0:
        parts.before = some
    elif act == 1:
        parts.between = some
    elif act == 2:
        parts.comment = some
    elif act == 3:
        parts.behind = some
    elif act == 4:
        parts.zip64 = True
    else:
        parts.lies[choose.randrange(7)] = choose.choice([*_EDGES, choose.getrandbits(16)])


_ACTS = (_content, _document, _document, _blob, _rename, _list, _lie, _lie, _extra, _end)
