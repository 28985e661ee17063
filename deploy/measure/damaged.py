"""Hold the record of a measured run (bench/1) against the shape that its readers rely on.

A record comes from a target, or by hand: what is not in it, or is of another kind, is said with its
place, all of it at once, before a number is looked at.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from deploy.agent.words import printable
from deploy.measure import result as results

SCHEMA = "bench/1"
_LARGEST = 1 << 62


class _Kind(NamedTuple):
    """What a value has to be: how it is called, and whether one is."""

    name: str
    fits: Callable[[Any], bool]


def _all(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(kind, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LARGEST


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_shape(value: Any) -> bool:
    return bool(value) and _all(_is_whole)(value)


def _are_counters(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_number, value.values()))


_TEXT, _WHOLE, _NUMBER = (
    _Kind("a text", _is_text),
    _Kind("a whole number", _is_whole),
    _Kind("a number", _is_number),
)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_LIST = _Kind("a list", lambda value: isinstance(value, list))
_TEXTS = _Kind("a list of texts", _all(_is_text))
_WHOLES = _Kind("a list of whole numbers", _all(_is_whole))
_OBJECT = _Kind("an object", lambda value: isinstance(value, Mapping))
_COUNTERS = _Kind("an object of numbers", _are_counters)
_SHAPE = _Kind("a list of whole numbers, one or more", _is_shape)
_VERDICT = _Kind(
    "a verdict", lambda value: value in ("passed", "failed", "not reached", "not applicable")
)
_GATE_NUMBER = _Kind("1 to 7", lambda value: _is_whole(value) and 1 <= value <= 7)

# Keys that end in "?" may be missing, or null.
_RUN = {
    "buckets": _LIST, "flags?": _TEXTS, "started?": _NUMBER, "locked?": _OBJECT,
    "versions?": _OBJECT, "cleared?": _TEXTS, "gates?": _LIST, "plan?": _TEXT, "target?": _TEXT,
}  # fmt: skip
_LOCKED = {"requests": _WHOLE, "sha256": _TEXT}
_GATE = {
    "gate": _GATE_NUMBER, "name": _TEXT, "verdict": _VERDICT, "reason": _TEXT, "proofs": _TEXTS,
    "faults": _TEXTS,
}  # fmt: skip
_BUCKET = {"bucket": _TEXT, "sha256": _TEXT, "requests": _WHOLE, "argv": _TEXTS, "rounds": _LIST}
_ROUND = {
    "round": _TEXT, "exit?": _WHOLE, "begun?": _NUMBER, "seconds?": _NUMBER, "result?": _OBJECT,
    "stale?": _TEXTS, "before?": _OBJECT, "after?": _OBJECT, "counters?": _OBJECT,
    "markers?": _OBJECT, "compiled?": _WHOLE, "compiling?": _TEXTS,
}  # fmt: skip
_STATE = {
    "pid": _WHOLE, "start_ticks": _WHOLE, "boot_id": _TEXT, "faults?": _LIST, "members?": _WHOLES,
    "listeners?": _LIST, "mapped?": _LIST,
}  # fmt: skip
_ROWS_OF_STATE = {
    "faults": ("a fault", {"text": _TEXT, "warning": _FLAG}),
    "listeners": ("a listener", {"address": _TEXT, "port": _WHOLE}),
    "mapped": ("a mapping", {"path": _TEXT, "state": _TEXT, "inode": _WHOLE}),
}
_SCAN = {"markers": _LIST, "pids": _WHOLES}
_MARKER = {
    "pid": _WHOLE, "shape": _SHAPE, "dtype": _TEXT, "selected": _FLAG, "window": _WHOLE,
    "before": _WHOLE,
}  # fmt: skip
# Flags whose number says how many requests the client sends.
_COUNTED_FLAGS = {
    "--num-warmups": r"\d{1,9}", "--ready-check-timeout-sec": r"\d{1,9}(\.\d+)?",
}  # fmt: skip


def faults(raw: Any) -> Iterator[str]:
    """Say all that is missing or of another kind, each with its place; nothing of a whole one."""
    if not isinstance(raw, Mapping) or raw.get("schema") != SCHEMA:
        yield f"its schema is not {SCHEMA}"
        return
    yield from _of(raw, "it", _RUN)
    locked = _mapping(raw, "locked")
    yield from _of(locked, "what was locked", {"buckets?": _OBJECT, "flags?": _LIST})
    for name, row in _mapping(locked, "buckets").items():
        yield from _of(row, f"the locked bucket {name}", _LOCKED)
    for number, row in enumerate(_rows(raw, "gates"), 1):
        yield from _of(row, f"gate {number}", _GATE)
    buckets = _rows(raw, "buckets")
    for number, row in enumerate(buckets, 1):
        yield from _of_bucket(row, f"bucket {number}")
    yield from _twice("bucket", buckets, "it")


def _of_bucket(raw: Any, where: str) -> Iterator[str]:
    yield from _of(raw, where, _BUCKET)
    words = list(map(str, _rows(raw, "argv")))
    for flag, pattern in _COUNTED_FLAGS.items():
        for value in _values(words, flag):
            if not re.fullmatch(pattern, value, re.ASCII):
                yield f"'argv' of {where} has {value!r} behind {flag}, which is no number"
    rounds = _rows(raw, "rounds")
    for number, row in enumerate(rounds, 1):
        yield from _of_round(row, f"round {number} of {where}")
    yield from _twice("round", rounds, where)


def _of_round(raw: Any, where: str) -> Iterator[str]:
    yield from _of(raw, where, _ROUND)
    for key in ("before", "after"):
        if state := _mapping(raw, key):
            place = f"{key!r} in {where}"
            yield from _of(state, place, _STATE)
            for rows, (name, kinds) in _ROWS_OF_STATE.items():
                for row in _rows(state, rows):
                    yield from _of(row, f"{name} of {place}", kinds)
    read = {"before?": _COUNTERS, "after?": _COUNTERS}
    yield from _of(_mapping(raw, "counters"), f"the counters of {where}", read)
    if scan := _mapping(raw, "markers"):
        yield from _of(scan, f"the markers of {where}", _SCAN)
        for row in _rows(scan, "markers"):
            yield from _of(row, f"a marker of {where}", _MARKER)
    if found := _mapping(raw, "result"):
        try:
            results.of_json(found)
        except (TypeError, ValueError) as err:
            yield f"the result of {where}: {err}"


def _of(raw: Any, where: str, kinds: Mapping[str, _Kind]) -> Iterator[str]:
    if not isinstance(raw, Mapping):
        yield f"{printable(where)} is no object"
        return
    for asked, kind in kinds.items():
        key, optional = asked.removesuffix("?"), asked.endswith("?")
        if raw.get(key) is None and (optional or key not in raw):
            if not optional:
                yield f"{printable(where)} has no {key!r}"
        elif not kind.fits(raw[key]):
            yield f"{key!r} of {printable(where)} is not {kind.name}"


def _twice(key: str, rows: list[Any], where: str) -> Iterator[str]:
    """Which of two would count, nobody knows."""
    names = [row[key] for row in rows if isinstance(row, Mapping) and _is_text(row.get(key))]
    for name in dict.fromkeys(name for name in names if names.count(name) > 1):
        yield f"{where} has the {key} {printable(name)} twice"


def _values(words: list[str], flag: str) -> Iterator[str]:
    for word, following in zip(words, [*words[1:], ""]):
        if word == flag:
            yield following
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]


def _mapping(raw: Any, key: str) -> Mapping[str, Any]:
    found = raw.get(key) if isinstance(raw, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _rows(raw: Any, key: str) -> list[Any]:
    found = raw.get(key) if isinstance(raw, Mapping) else None
    return found if isinstance(found, list) else []
