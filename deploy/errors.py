"""The errors of the operator's side: one class a kind, each with its exit code.

What the agent raises too is the agent's class.

They are raised where the fault is known and turned into text and exit code in one place
(`deploy.console`).
"""

from __future__ import annotations

from collections.abc import Iterable

from deploy.agent.words import BundleError, Exit, NeedsPerson, Refused, RolledBack, Unfit

__all__ = [
    "BadValues",
    "BundleError",
    "Differs",
    "Exit",
    "NeedsPerson",
    "Refused",
    "RolledBack",
    "StaleLock",
    "Unfit",
    "Unreachable",
    "worst",
]

# With several targets the one that needs a person first decides (8, 7, 1, 5, 3, 6, 4, 10).
_BY_URGENCY = (8, 7, 1, 130, 5, 3, 6, 4, 2, 10, 0)


class BadValues(BundleError):
    """A manifest, a value or a repository that cannot be used as it is."""

    exit = Exit.VALUES


class StaleLock(BundleError):
    """The lock, or a thing it pins, is not what was locked."""

    exit = Exit.STALE


class Unreachable(BundleError):
    exit = Exit.UNREACHABLE


class Differs(BundleError):
    exit = Exit.DIFFERS


def worst(codes: Iterable[int]) -> Exit:
    """Return the exit code of many targets: the most urgent one; OK when there is none."""
    found = set(codes)
    return next((Exit(code) for code in _BY_URGENCY if code in found), Exit.OK)
