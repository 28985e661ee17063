"""The words that both sides speak: verbs, states, exit codes, errors and the canonical JSON.

The agent owns them because it is the half that travels; the operator's side imports them from here.
Nothing in this module touches a file.
"""

from __future__ import annotations

import hashlib
import json
from enum import Enum, IntEnum
from typing import Any

# The bundle's member that says what the base holds, file by file.
LISTING = "base.files"
# How the service's interpreter is named, to the operator's tasks and to a bundle by hand.
SET_PYTHON = "set base.python in the manifest (hosts.yaml: python; a bundle by hand: --python)"
# Before the name of each rendered script in a bundle.
SCRIPTS = "scripts/"


class Exit(IntEnum):
    """What a call ended with; the same numbers for a task and for the bundle run by hand."""

    OK = 0
    BUG = 1
    VALUES = 2
    UNFIT = 3
    STALE = 4
    UNREACHABLE = 5
    REFUSED = 6
    ROLLED_BACK = 7
    NEEDS_PERSON = 8
    DIFFERS = 10
    INTERRUPTED = 130


class Verb(str, Enum):
    """What a bundle can be asked to do on a target."""

    FACTS = "facts"
    CHECK = "check"
    DEPLOY = "deploy"
    VERIFY = "verify"
    RESTORE = "restore"
    STATUS = "status"
    FILES = "files"
    SERVICE = "service"
    SCRIPTS = "scripts"
    START = "start"
    RECORD = "record"
    STOP = "stop"
    MARKERS = "markers"
    DOCTOR = "doctor"
    MEASURE = "measure"

    @property
    def writes(self) -> bool:
        """True for the verbs that get a writer; every other verb gets a reader only."""
        return self in (Verb.DEPLOY, Verb.RESTORE)


class FileState(str, Enum):
    """What verify or check says of one file of the plan."""

    OK = "ok"
    MISSING = "missing"
    CHANGED = "changed"
    STILL_BASE = "still base"
    LEFT_OVER = "left over"
    STALE_PYC = "stale pyc"
    WRONG_PYC_BODY = "wrong pyc body"
    NOT_COMPILED = "not compiled"
    WRONG_MODE = "wrong mode"
    SHADOWED = "shadowed"


class BundleError(Exception):
    """A failure that a person can mend: what failed, why, and how to mend it (three lines)."""

    exit: Exit = Exit.BUG

    def __init__(self, what: str, *, why: str, fix: str, exit: Exit | None = None) -> None:
        super().__init__(what)
        self.what, self.why, self.fix = what, why, fix
        if exit is not None:
            self.exit = exit

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "why": self.why, "fix": self.fix, "exit": int(self.exit)}


class Unfit(BundleError):
    """A machine cannot take this, whatever is done to single files."""

    exit = Exit.UNFIT


class Damaged(BundleError):
    """The bundle, or a blob of it, is not what its digests say."""

    exit = Exit.STALE


class Refused(BundleError):
    """Judged, and nothing was changed."""

    exit = Exit.REFUSED


class RolledBack(BundleError):
    """Something failed after the commit point, and every file is again as it was found."""

    exit = Exit.ROLLED_BACK


class NeedsPerson(BundleError):
    """It can neither be finished nor undone from here; what is needed for a later call stays."""

    exit = Exit.NEEDS_PERSON


class Interrupted(BundleError):
    """A signal, or the end of the line, before the commit point."""

    exit = Exit.INTERRUPTED


def canonical(value: Any) -> bytes:
    """Return the one JSON text of `value`: sorted keys, no white space, UTF-8, no final newline."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode("utf-8")


def digest(value: Any) -> str:
    """Return the sha256 (64 hex digits) of the canonical JSON of `value`."""
    return hashlib.sha256(canonical(value)).hexdigest()


def printable(text: str) -> str:
    """Return `text` safe for a terminal: control characters become visible escapes."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode("ascii")
        for c in text
    )
