"""The target's own bytes of what a deploy would change, for people to read the difference."""

from __future__ import annotations

import binascii
import os
from typing import Any

from .judge import Judgement
from .tree import TreeReader

_LARGEST = 1 << 20  # bytes of one file, and 16 times that of all: a diff is for people
_SNIFFED = 8000  # where git, too, looks for a NUL to tell a binary file


def contents(tree: TreeReader, judged: Judgement) -> dict[str, dict[str, Any]]:
    """Return path -> {sha256, size, mode, data}; data is base64, or None for what nobody reads.

    A path where nothing is has no entry. The mode of a link is "link", its data the link's text.
    """
    paths = {e.path for e in judged.put} | set(judged.drop) | {c.path for c in judged.conflicts}
    left = 16 * _LARGEST
    rows: dict[str, dict[str, Any]] = {}
    for path in sorted(paths):
        state = judged.found[path]
        row: dict[str, Any] = {"sha256": state.sha256, "size": state.size, "mode": state.mode}
        data: bytes | None = None
        if state.type == "link":
            row["mode"], data = "link", os.fsencode(state.link)
        elif state.type != "file":
            continue
        elif state.size <= min(_LARGEST, left):
            data = tree.read(path)
        if data is not None and b"\0" in data[:_SNIFFED]:
            data = None
        left -= len(data or b"")
        row["data"] = None if data is None else binascii.b2a_base64(data, newline=False).decode()
        rows[path] = row
    return rows
