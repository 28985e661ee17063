"""Digest a generated text so that two runs can be compared without keeping or publishing it.

A digest of every beginning that ends with a word tells where two texts part, not only that they do.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

_WORD = re.compile(r"\s*\S+\s*|\s+")
_STEP = 8  # hex digits kept of each beginning's digest


def digested(text: str) -> dict[str, Any]:
    """Return sha256, length and number of words of a text, and a short digest a beginning."""
    total = hashlib.sha256()
    steps = []
    for word in _WORD.findall(text):
        total.update(word.encode("utf-8", "surrogatepass"))
        steps.append(total.hexdigest()[:_STEP])
    return {
        "sha256": total.hexdigest(),
        "chars": len(text),
        "words": len(steps),
        "steps": "".join(steps),
    }


def parts_at(one: Mapping[str, Any], other: Mapping[str, Any]) -> int | None:
    """Return the number of the first word (from 0) in which two digested texts differ, or None."""
    if one["sha256"] == other["sha256"]:
        return None
    ours, theirs = str(one["steps"]), str(other["steps"])
    shorter = min(len(ours), len(theirs)) // _STEP
    for index in range(shorter):
        at = slice(index * _STEP, (index + 1) * _STEP)
        if ours[at] != theirs[at]:
            return index
    return shorter
