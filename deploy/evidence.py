"""What an agent said, as values; and whether it answers the plan that was asked about.

The document is `evidence/1`: fields are added, never changed. Everything in which two equal targets
may differ (host, time, durations) lies below ``incidental``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy import shape
from deploy.agent.plan import Plan, is_sha256
from deploy.agent.words import BundleError, Exit, FileState, Verb
from deploy.errors import BadValues, Differs

SCHEMA = "evidence/1"


@dataclass(frozen=True, slots=True)
class Evidence:
    """One answer of an agent. `raw` is the whole document, for the record."""

    raw: Mapping[str, Any]

    @property
    def verb(self) -> Verb:
        return Verb(self.raw["verb"])

    @property
    def exit(self) -> Exit:
        return Exit(self.raw["exit"])

    @property
    def outcome(self) -> str:
        return str(self.raw.get("outcome", ""))

    @property
    def tree(self) -> str:
        return str(self.raw.get("tree", ""))

    @property
    def files(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(self.raw.get("files") or ())

    @property
    def faults(self) -> tuple[Mapping[str, Any], ...]:
        """The files that are not as the plan wants them."""
        return tuple(row for row in self.files if row.get("state") != FileState.OK.value)

    @property
    def origin(self) -> Mapping[str, Mapping[str, Any]]:
        """Where the package is imported from, by the folder asked from: state, file, why."""
        return dict(self.raw.get("origin") or {})

    @property
    def error(self) -> BundleError | None:
        """The agent's own three lines, when it failed."""
        found = self.raw.get("error")
        if not found:
            return None
        return BundleError(found["what"], why=found["why"], fix=found["fix"], exit=self.exit)

    def answers(self, plan: Plan) -> bool:
        """True when the agent spoke of exactly this plan."""
        return self.raw.get("plan") == plan.digest


def parse(text: bytes | str) -> Evidence:
    """Read one evidence document, for instance pasted back from a web terminal.

    Raises:
        BadValues: it is not a whole evidence/1 document.
    """
    return _understood(lambda: json.loads(text), "this is")


def pasted(text: str, where: str) -> Evidence:
    """Read the evidence in a file that a person filled, a terminal's prompt and echo around it.

    Where that is no JSON, line breaks are taken out first: a terminal may have broken it anywhere,
    and the agent prints none. What is read so is held to everything else as ever.

    Raises:
        BadValues: it is not a whole evidence/1 document.
    """
    return _understood(lambda: _unwrapped(text), f"{where} is")


def _understood(read: Callable[[], Any], what_is: str) -> Evidence:
    try:
        raw = read()
        _check(raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        why = str(err) if type(err) is ValueError else f"{type(err).__name__}: {err}"
        raise BadValues(
            f"{what_is} no evidence of an agent",
            why=why,
            fix="bring the whole JSON that the bundle printed on stdout, from { to }, with nothing"
            " in it changed by a terminal that breaks lines: `verify > evidence.json` there, and"
            " fetch that file",
        ) from err
    return Evidence(raw)


def _unwrapped(text: str) -> Any:
    start, end = text.find("{"), text.rfind("}")
    if start < 0:
        raise ValueError("it holds no JSON: there is no { in it")
    if end < start:
        raise ValueError(f"{_place(text, start)} begins with {{, and no }} ends it: it is cut off")
    body = text[start : end + 1]
    try:
        return json.loads(body)
    except json.JSONDecodeError:
        pieces = list(re.finditer(r"[^\r\n]+", body))
    try:
        return json.loads("".join(piece[0] for piece in pieces))
    except json.JSONDecodeError as err:
        at = _place(text, start + _before_joined(pieces, err.pos))
        raise ValueError(f"it is no JSON at {at}: {err.msg}") from err


def _before_joined(pieces: Sequence[re.Match[str]], at: int) -> int:
    """Return where a character of the joined pieces stood before they were joined."""
    for piece in pieces:
        if at < len(piece[0]):
            return piece.start() + at
        at -= len(piece[0])
    return pieces[-1].end()


def _place(text: str, at: int) -> str:
    line = text.count("\n", 0, at) + 1
    return f"line {line} column {at - text.rfind(chr(10), 0, at)}"


def require_answer(evidence: Evidence, plan: Plan, where: str) -> None:
    """Raise Differs when evidence speaks of another plan than this one."""
    if not evidence.answers(plan):
        other = str(evidence.raw.get("name") or plan.name)
        again = "run the bundle whose name `./inv bundle` printed, and take the evidence again"
        raise Differs(
            f"the evidence of {where} answers another plan",
            why=f"it speaks of {evidence.raw.get('plan')}, the lock pins {plan.digest}",
            fix=again if other == plan.name else f"it is of {other}: ask with -n {other}",
        )


def _check(raw: Any) -> None:
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"schema is not {SCHEMA}")
    Verb(raw["verb"])
    Exit(raw["exit"])
    for key in ("plan", "tree"):
        if raw.get(key) and not is_sha256(raw[key]):
            raise ValueError(f"{key} is no sha256")
    for row in raw.get("files") or ():
        FileState(row["state"])
        if not isinstance(row["path"], str):
            raise ValueError("a file without a path")
    if fault := next(shape.faults(raw, shape.EVIDENCE), None):
        raise ValueError(fault)
