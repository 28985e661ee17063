"""Two sets of files -> one unified diff, by git, without a repository.

A diff is for people: control characters are shown as escapes, a binary file is one line, and so is
a file of more bytes than anyone reads.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deploy.agent.plan import State
from deploy.agent.words import printable
from deploy.git import Git

__all__ = ["LARGEST", "Side", "side_of", "told_side", "unified"]

SNIFFED = 8000  # bytes in which a NUL tells a binary file, as for git
LARGEST = 1 << 20  # bytes of one file; beyond that only sizes and digests are told


class Side(NamedTuple):
    """One file on one side; `data` is None where it is binary, or too large to be shown.

    The mode is four octal digits, or "link"; the data of a link is its text.
    """

    sha256: str
    size: int
    mode: str = "0644"
    data: bytes | None = None


def side_of(state: State, data: bytes | None) -> Side:
    """Return what a plan wants at a path; `data` is its content, None where it is too large."""
    if state.type == "link":
        return Side(sha256="", size=len(state.link), mode="link", data=os.fsencode(state.link))
    readable = data is not None and b"\0" not in data[:SNIFFED]
    return Side(state.sha256, state.size, state.mode, data if readable else None)


def told_side(row: Mapping[str, Any]) -> Side:
    """Return what a target told of a path (see the agent's `contents`)."""
    data = row["data"]
    raw = None if data is None else base64.b64decode(data)
    return Side(str(row["sha256"]), int(row["size"]), str(row["mode"]), raw)


def unified(old: Mapping[str, Side], new: Mapping[str, Side], names: tuple[str, str]) -> str:
    """Return the diff from `old` to `new`, sorted by path; `names` are how the sides are called."""
    paths = sorted(old.keys() | new.keys())
    hidden = [p for p in paths if any(s and s.data is None for s in (old.get(p), new.get(p)))]
    shown = [p for p in paths if p not in hidden]
    lines = [_told(path, old.get(path), new.get(path)) for path in hidden]
    return "".join(f"{line}\n" for line in [*_by_git(shown, old, new, names), *lines])


def _told(path: str, old: Side | None, new: Side | None) -> str:
    def side(found: Side | None) -> str:
        return f"{found.sha256[:12]}, {found.size} bytes" if found else "absent"

    return f"Files differ, and are binary or large: {printable(path)} ({side(old)} -> {side(new)})"


def _by_git(
    paths: list[str], old: Mapping[str, Side], new: Mapping[str, Side], names: tuple[str, str]
) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="diff.") as folder:
        # The folders' names are what stands before a path in the diff.
        for name, side in zip(names, (old, new), strict=True):
            Path(folder, name).mkdir()
            for path in paths:
                _lay(Path(folder, name), path, side.get(path))
        done = Git(Path(folder)).run(
            *("-c", "core.quotePath=false", "diff", "--no-index", "--no-ext-diff", "--no-textconv"),
            *("--no-color", "--no-prefix", "--no-renames", "--", *names),
            ok=(0, 1),
        )
    text = done.stdout.decode("utf-8", "replace")
    return [_safe(line) for line in text.split("\n")[:-1]]


def _lay(top: Path, path: str, side: Side | None) -> None:
    if side is None or side.data is None:
        return
    place = top / path
    place.parent.mkdir(parents=True, exist_ok=True)
    if side.mode == "link":
        # Never followed: git compares the texts of links.
        place.symlink_to(os.fsdecode(side.data))
        return
    place.write_bytes(side.data)
    place.chmod(int(side.mode, 8))


def _safe(line: str) -> str:
    return "\t".join(printable(part) for part in line.split("\t"))
