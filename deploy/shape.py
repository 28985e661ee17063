"""Does a JSON value have the shape that its reader relies on? What a target says is only data.

A shape is a type, a tuple of shapes (any of them), a list of one shape (a list of such), or a dict:
key -> shape, where a key that ends in "?" may be missing, and the key `...` stands for any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["EVIDENCE", "faults"]

_NOTHING = type(None)
_TEXT = (str, _NOTHING)
_NUMBER = (int, float, _NOTHING)
_PLACE = {"state": str, "why?": str, "mend?": str, "file?": _TEXT}
_PROCESS = {
    "pid": int, "role": str, "orphan": bool, "state": str, "container": _TEXT, "argv": [str],
    "comm": str, "memory": int, "started": str,
}  # fmt: skip
_SERVICE = {
    "processes?": ([_PROCESS], _NOTHING),
    "listeners?": ([{"address": str, "port": int, "pids": [int]}], _NOTHING),
    "cards?": (
        {"cards?": [{"index": (int, str, _NOTHING), "memory": _NUMBER, "busy": _NUMBER}]},
        _NOTHING,
    ),
    "answers?": ([{"probe": str, "error": _TEXT}], _NOTHING),
    "run?": ({"folder?": str, "pid": int, "state?": str}, _NOTHING),
    "faults?": ([{"text": str, "warning": bool}], _NOTHING),
}
# What of evidence/1 is shown or judged without a further look; its other parts may be anything.
EVIDENCE: Any = {
    "outcome?": str,
    "met?": str,
    "origin?": ({...: _PLACE}, _NOTHING),
    "files?": ([{"path": str, "state": str, "why?": str}], _NOTHING),
    "conflicts?": ([{"path": str}], _NOTHING),
    "changes?": ({...: [str]}, _NOTHING),
    "before?": (dict, _NOTHING),
    "contents?": ({...: {"sha256": str, "size": int, "mode": str, "data": _TEXT}}, _NOTHING),
    "traps?": ([{"kind": str, "where": str, "why": str, "mend": str, "harm": bool}], _NOTHING),
    "audit?": (
        {
            "owners": {...: [str]},
            "faults": [str],
            "files": [{"path": str, "owner": str, "why": str}],
            "unproven?": (int, _NOTHING),
        },
        _NOTHING,
    ),
    "doctor?": ([{"level": str, "about": str, "text": str, "mend": _TEXT}], _NOTHING),
    "service?": (_SERVICE, _NOTHING),
    "error?": ({"what": str, "why": str, "fix": str}, _NOTHING),
}


def faults(value: Any, shape: Any, place: str = "") -> Iterator[str]:
    """Yield what does not fit, with its place."""
    if isinstance(shape, tuple):
        if not any(_none(faults(value, one)) for one in shape):
            # The first is what was meant; the others are "or nothing".
            yield from faults(value, shape[0], place)
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{place or 'it'} is no list"
            return
        for number, child in enumerate(value):
            yield from faults(child, shape[0], f"{place}[{number}]")
    elif isinstance(shape, dict):
        yield from _of_mapping(value, shape, place)
    elif not isinstance(value, shape) or (shape is int and isinstance(value, bool)):
        yield f"{place or 'it'} is no {shape.__name__}"


def _of_mapping(value: Any, shape: dict[Any, Any], place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place or 'it'} is no mapping"
        return
    for key, child in shape.items():
        if key is ...:
            for name, one in value.items():
                yield from faults(one, child, f"{place}.{name}")
            continue
        name = key.removesuffix("?")
        if name in value:
            yield from faults(value[name], child, f"{place}.{name}".lstrip("."))
        elif name == key:
            yield f"{place or 'it'} has no {name}"


def _none(found: Iterator[str]) -> bool:
    return next(found, None) is None
