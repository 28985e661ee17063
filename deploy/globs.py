"""The globs of a manifest: few signs, one meaning, the same on every machine.

`**` as a whole name stands for any number of folders, at the end for everything below; `*` and `?`
never cross a `/`; every other character stands for itself, `[` included. A pattern matches the
whole path, capitals count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of one glob."""
    parts = pattern.split("/")
    text = ""
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            text += ".+" if last else "(?:[^/]+/)*"
        else:
            text += _name(part) + ("" if last else "/")
    return re.compile(text, re.DOTALL)


def _name(part: str) -> str:
    signs = {"*": "[^/]*", "?": "[^/]"}
    return "".join(signs.get(c) or re.escape(c) for c in re.sub(r"\*+", "*", part))


def first_match(patterns: Iterable[str], path: str) -> str | None:
    """Return the first pattern that matches the whole path, or None."""
    return next((p for p in patterns if compiled(p).fullmatch(path)), None)


def roots(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the folders or files that can hold a match, sorted; "" is the top."""
    found = set()
    for pattern in patterns:
        literal = []
        for part in pattern.split("/"):
            if "*" in part or "?" in part:
                break
            literal.append(part)
        found.add("/".join(literal))
    return tuple(sorted(r for r in found if not any(_below(r, o) for o in found)))


def _below(path: str, folder: str) -> bool:
    return path != folder and (folder == "" or path.startswith(folder + "/"))
