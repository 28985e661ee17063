"""What was resolved: manifests/NAME.lock.yaml, which knows when it is stale or was edited.

`read_lock`, `write_lock` and `check_fresh` are this module's face. The file has one spelling: what
does not come back byte for byte from the values it holds was not written by `./inv lock`.

It is YAML of the narrowest kind, so that every reader agrees: texts in double quotes with JSON's
escapes, decimal numbers, true, false and null. Commit ids like 61e9540 stay text for all of them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deploy.agent.words import digest, printable
from deploy.errors import StaleLock
from deploy.regular import read_regular

if TYPE_CHECKING:
    from deploy.manifest import Manifest

SCHEMA = 1
SIZE_LIMIT = 64 * 2**20  # bytes; a difference of 100,000 files stays below
KEY_LIMIT = 1000  # characters; YAML readers stop at 1024
HEADER = "# Written by `inv lock`: what was resolved, and what must come out. Do not edit.\n"

# YAML wants these escaped, JSON does not.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LINE = re.compile(r'(?P<pad> *)(?:- (?P<item>.+)|(?P<key>"(?:[^"\\]|\\.)*"):(?: (?P<value>.+))?)')
ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Lock:
    """`inputs` is what a bundle is made from, and travels in it; `expect` is what must come out.

    Both hold only dicts with text keys, lists, texts, whole numbers, truth values and None.
    """

    inputs: Mapping[str, Any]
    expect: Mapping[str, Any]

    @property
    def digest(self) -> str:
        """The identity `inputs`."""
        return digest(self.inputs)


def lock_text(lock: Lock) -> str:
    """Return the one text of a lock. Raises ValueError for a value that a lock cannot hold."""
    _check_value({"expect": lock.expect, "inputs": lock.inputs}, "lock")
    expect = dict(lock.expect) | {"inputs": lock.digest}
    body = {"expect": expect, "inputs": dict(lock.inputs)}
    return HEADER + "".join(_lines(body | {"seal": digest(body)}, 0))


def write_lock(path: Path, lock: Lock) -> bool:
    """Write the lock beside its place, then rename; return False when the file was already so."""
    raw = lock_text(lock).encode()
    with contextlib.suppress(OSError):
        if read_regular(path, SIZE_LIMIT) == raw:
            return False
    with tempfile.NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", delete=False
    ) as file:
        try:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
    return True


def read_lock(path: Path) -> Lock:
    """Return the lock of a file. Raises StaleLock when it is absent, or not as it was written."""
    name = _manifest_name(path)
    try:
        raw = read_regular(path, SIZE_LIMIT)
    except FileNotFoundError as err:
        raise StaleLock(
            f"{name} is not locked",
            why=f"there is no {path.name}",
            fix=f"run `./inv lock -n {name}`",
        ) from err
    except OSError as err:
        raise _edited(path, f"it cannot be read: {err.strerror}") from err
    return _parse(path, raw)


def check_fresh(lock: Lock, manifest: Manifest) -> None:
    """Raise StaleLock when the manifest means something else than what was locked."""
    locked, asked = lock.inputs["manifest"], manifest.meaning()
    found = next(differences(locked, asked, ""), None)
    if found is None:
        return
    place, old, new = found
    raise StaleLock(
        f"the lock of {manifest.name} is stale",
        why=f"{place} was locked as {_short(old)} and is {_short(new)} in the manifest",
        fix=f"run `./inv lock -n {manifest.name}` and read the difference, or undo the edit",
    )


# --- writing ------------------------------------------------------------------------------------


def _lines(value: Mapping[str, Any], depth: int) -> Iterator[str]:
    """Mappings as blocks; lists of records one a line, which is what a person compares."""
    pad = "  " * depth
    for key in sorted(value):
        child = value[key]
        if isinstance(child, Mapping) and child:
            yield f"{pad}{_inline(key)}:\n"
            yield from _lines(child, depth + 1)
        elif isinstance(child, list) and any(isinstance(item, dict | list) for item in child):
            yield f"{pad}{_inline(key)}:\n"
            yield from (f"{pad}  - {_inline(item)}\n" for item in child)
        else:
            yield f"{pad}{_inline(key)}: {_inline(child)}\n"


def _inline(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def _check_value(value: Any, where: str) -> None:
    if isinstance(value, Mapping):
        for key, child in value.items():
            if not isinstance(key, str) or len(key) > KEY_LIMIT:
                raise ValueError(f"{where}: a key must be text of {KEY_LIMIT} characters at most")
            _check_value(key, where)
            _check_value(child, f"{where}.{key}")
    elif isinstance(value, list):
        for i, child in enumerate(value):
            _check_value(child, f"{where}[{i}]")
    elif isinstance(value, str):
        if _SURROGATE.search(value):
            raise ValueError(f"{where}: {value!r} is not UTF-8")
    elif value is not None and not isinstance(value, int):
        raise ValueError(f"{where}: a {type(value).__name__} cannot be locked")


# --- reading ------------------------------------------------------------------------------------


def _parse(path: Path, raw: bytes) -> Lock:
    try:
        text = raw.decode()
    except UnicodeDecodeError as err:
        line = raw.count(b"\n", 0, err.start) + 1
        raise _edited(path, f"line {line} is not UTF-8") from err
    value = _blocks(path, text.split("\n"))
    if set(value) != {"expect", "inputs", "seal"}:
        raise _edited(path, f"it holds {', '.join(sorted(value))}; expect, inputs and seal are due")
    lock = Lock(value["inputs"], value["expect"])
    if not isinstance(lock.inputs, dict) or not isinstance(lock.expect, dict):
        raise _edited(path, "inputs and expect must be mappings")
    if lock.inputs.get("schema") != SCHEMA or "manifest" not in lock.inputs:
        found = lock.inputs.get("schema")
        raise _edited(path, f"its schema is {found!r}, this product writes {SCHEMA}")
    try:
        _check_seal(path, lock, value["seal"], text)
    except (ValueError, RecursionError) as err:  # a value that no lock can hold
        raise _edited(path, f"it holds what cannot be locked ({err})") from err
    return lock


def _check_seal(path: Path, lock: Lock, seal: Any, text: str) -> None:
    if lock.expect.get("inputs") != lock.digest:
        raise _edited(path, "what stands below inputs is not what its digest in expect says")
    if seal != digest({"expect": lock.expect, "inputs": lock.inputs}):
        raise _edited(path, "what stands below expect is not what the seal says")
    pairs = zip_longest(text.split("\n"), lock_text(lock).split("\n"))
    for number, (found, written) in enumerate(pairs, 1):
        if found != written:
            raise _edited(path, f"line {number} is not spelled as it was written")


def _blocks(path: Path, lines: list[str]) -> dict[str, Any]:
    """Read what `_lines` writes, leniently: the spelling is compared afterwards."""
    top: dict[str, Any] = {}
    stack: list[Any] = [top]
    for number, line in enumerate(lines, 1):
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        try:
            if match is None:
                raise ValueError("not a key or an item")
            _take(stack, match, _peek_item(lines, number))
        except (ValueError, RecursionError) as err:
            raise _edited(path, f"line {number} was not written by it ({err})") from err
    return top


def _peek_item(lines: list[str], number: int) -> bool:
    return number < len(lines) and lines[number].lstrip(" ").startswith("- ")


def _take(stack: list[Any], match: re.Match[str], items_follow: bool) -> None:
    depth = len(match["pad"]) // 2 + 1
    if depth > len(stack):
        raise ValueError("deeper than the line before")
    del stack[depth:]
    if match["item"] is not None:
        if not isinstance(stack[-1], list):
            raise ValueError("an item where a key is due")
        stack[-1].append(json.loads(match["item"]))
        return
    key, parent = json.loads(match["key"]), stack[-1]
    if not isinstance(parent, dict) or key in parent:
        raise ValueError("a key that stands there twice, or in a list")
    if match["value"] is not None:
        parent[key] = json.loads(match["value"])
    else:
        parent[key] = [] if items_follow else {}
        stack.append(parent[key])


# --- saying -------------------------------------------------------------------------------------


def _edited(path: Path, why: str) -> StaleLock:
    name = _manifest_name(path)
    return StaleLock(
        f"{path.name} is not as `./inv lock` wrote it",
        why=printable(why),
        fix=f"`git checkout -- manifests/{path.name}`, or run `./inv lock -n {name}`",
    )


def _manifest_name(path: Path) -> str:
    return path.name.removesuffix(".lock.yaml")


def differences(old: Any, new: Any, place: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each place where two values differ, with both sides; ABSENT where one lacks it."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{place}.{key}" if place else key
            yield from differences(old.get(key, ABSENT), new.get(key, ABSENT), inner)
    elif isinstance(old, list) and isinstance(new, list):
        for i in range(max(len(old), len(new))):
            was, now = (side[i] if i < len(side) else ABSENT for side in (old, new))
            yield from differences(was, now, f"{place}[{i}]")
    elif type(old) is not type(new) or old != new:
        yield place, old, new


def _short(value: Any) -> str:
    if value is ABSENT:
        return "absent"
    text = printable(json.dumps(value, ensure_ascii=False, sort_keys=True))
    return text if len(text) <= 120 else f"{text[:117]}..."
