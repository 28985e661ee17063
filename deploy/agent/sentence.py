"""Say in one sentence how a call ended, to a person who typed it and has no report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .words import FileState, Verb


def sentence(evidence: Mapping[str, Any]) -> str:
    """Return for instance "verify: verified, 9 files; exit 0"."""
    parts = [str(evidence["outcome"]), *_details(evidence)]
    return f"{evidence['verb']}: {', '.join(parts)}; exit {evidence['exit']}"


def _details(evidence: Mapping[str, Any]) -> Iterator[str]:
    files, changes = evidence["files"], evidence.get("changes") or {}
    bad = sum(row["state"] != FileState.OK.value for row in files)
    if files:
        yield f"{bad} of {_files(len(files))} not as planned" if bad else _files(len(files))
    elif evidence["verb"] == Verb.CHECK.value:
        yield from (f"{len(paths)} to {act}" for act, paths in sorted(changes.items()))
    elif evidence["verb"] == Verb.RESTORE.value and changes:
        yield _files(sum(len(changes.get(act, ())) for act in ("drop", "give back")))
    elif evidence["verb"] == Verb.STATUS.value:
        yield f"met: {evidence['met']}"


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"
