"""The rows of the table, and how a check becomes one: whatever it is given, it stumbles over none.

`Row` and `run` are this module's face.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from deploy.agent.words import printable
from deploy.bundle import DAMAGE, Bundle
from deploy.errors import BundleError

OK, FAILED, NOTE = "ok", "FAILED", "note"
# Whatever stands in what is handed in, the table is printed: the check that stumbles has failed.
STUMBLES = (BundleError, *DAMAGE, TypeError, AttributeError, ArithmeticError, MemoryError)


class Row(NamedTuple):
    """One check: ok, FAILED or note; what was checked, and what was found."""

    state: str
    what: str
    found: str


def run(what: str, check: Callable[[Bundle], Iterator[str]], made: Bundle) -> list[Row]:
    """A check yields what is wrong; its last word is marked.

    "=" stands before what was found right, "?" before why nothing could be checked.
    """
    said = said_of(check(made))
    faults = [text for text in said if not text.startswith(("=", "?"))]
    if faults:
        return [Row(FAILED, what, text) for text in faults]
    last = said[-1] if said else "="
    return [Row(NOTE if last.startswith("?") else OK, what, last[1:])]


def said_of(texts: Iterable[str]) -> list[str]:
    """All that a check says, and over what it stumbled."""
    found: list[str] = []
    try:
        found.extend(map(printable, texts))  # one by one: what came before a stumble is kept
    except STUMBLES as err:
        found.append(why(err))
    return found


def why(err: BaseException) -> str:
    """One line of any error: what a file made of one of ours has no reason of its own."""
    if isinstance(err, BundleError):
        said = err.why
    elif isinstance(err, OSError):
        said = err.strerror or str(err)
    else:
        said = f"it cannot be checked: {type(err).__name__}: {err}"
    return printable(said.partition("\n")[0])
