"""Values that many modules pass to each other, parsed once at the edge.

They hold no behaviour beyond saying what they are; the plan's own values live in the agent, which
travels (`deploy.agent.plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Writer(Protocol):
    """Where bytes can be put, in pieces."""

    def write(self, piece: bytes, /) -> int: ...


class PathClass(str, Enum):
    """What becomes of a path of the diff; every path lands in exactly one class."""

    OVERLAY = "overlay"  # installed into the site
    KERNEL = "kernel"  # compiled into an extension, never installed as source
    IGNORED = "ignored"  # not installed, with the manifest's reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """One side of a change, as git holds it. `mode` is git's: 100644, 100755, 120000 or 160000.

    `sha256` and `size` are those of the content; `oid` is git's object id; `link` is the text of a
    symbolic link, else empty.
    """

    oid: str
    mode: str
    sha256: str
    size: int
    link: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One path that differs between base and head. `old` or `new` is None where it is absent."""

    path: str
    old: Blob | None
    new: Blob | None
    cls: PathClass
    reason: str  # which rule of the manifest put it there


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The complete difference base..head, sorted by path, and what was found beside it."""

    base: str  # commit id
    head: str
    head_time: int  # seconds since the epoch, UTC: the only clock a bundle or a layer may use
    changes: tuple[Change, ...]
    dirty: tuple[str, ...] = ()  # differing work tree paths that the manifest allows
    notes: tuple[str, ...] = ()  # for the evidence: exemptions used, files ignored and counted

    def of(self, cls: PathClass) -> tuple[Change, ...]:
        """The changes of one class, in path order."""
        return tuple(change for change in self.changes if change.cls is cls)
