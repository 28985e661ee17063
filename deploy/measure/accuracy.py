"""Scores of the accuracy suite, task by task, and the factor on the throughput's points.

Sources are the suite's tables (CSV, or Markdown as it prints it) or a JSON object of task: score.
Two tasks of the suite are scored again after it has printed 0 for them, so a 0 is never believed
unless it stands alone for its task.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.agent.words import printable
from deploy.errors import BadValues
from deploy.measure.score import coefficient, drop

TASKS = (
    "hotpotqa", "gov_report", "retrieval_multi_point", "aggregation_keyword_aggregation",
)  # fmt: skip
# Above this one score is in percent and the other, below 1, in fractions: a hundred is expected.
_OTHER_SCALE = 20
_BOM = "\ufeff"
_COLUMNS = ("dataset", "version", "metric", "mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of both sides. `lost` is in percent of the baseline's score."""

    name: str
    base: float
    candidate: float
    lost: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """All tasks that both sides have. `missing` are official ones that one side lacks."""

    tasks: tuple[Task, ...]
    missing: tuple[str, ...]

    @property
    def factor(self) -> float | None:
        """The mean factor of the official tasks; None while one is missing: it would be a guess.

        What else a table holds (other tasks, an average) is shown, and thins nothing out.
        """
        factors = [task.factor for task in self.tasks if task.name in TASKS]
        if self.missing or not factors:
            return None
        return math.fsum(factors) / len(factors)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "accuracy/1",
            "tasks": [
                {"task": t.name, "base": t.base, "candidate": t.candidate, "lost_percent": t.lost,
                 "factor": t.factor}
                for t in self.tasks
            ],
            "missing": list(self.missing),
            "factor": self.factor,
        }  # fmt: skip


def compare(base: Mapping[str, float], candidate: Mapping[str, float]) -> Accuracy:
    """Hold the scores of two runs against each other.

    Raises:
        BadValues: a baseline's score that is not positive, a score that is no percentage, or one
            side in percent and the other in fractions.
    """
    for name, value in (*base.items(), *candidate.items()):
        if not 0 <= value <= 100:
            raise _bad("a score", f"{name} has {value:g}, which is no percentage")
    both_have = base.keys() & candidate.keys()
    # By the side, not by the task: a single one that fell below 1 is what the suite is there for.
    unlike = len({all(side[name] <= 1 for name in both_have) for side in (base, candidate)}) > 1
    for name in both_have if unlike else ():
        low, high = sorted((base[name], candidate[name]))
        if 0 < low <= 1 < high and high > _OTHER_SCALE * low:
            raise _bad("a score", f"{name} has {base[name]:g} and {candidate[name]:g}: one side is"
                       " in fractions, the other in percent")  # fmt: skip
    both = [name for name in (*TASKS, *sorted(set(base) - set(TASKS))) if name in base]
    tasks = tuple(
        Task(name=name, base=base[name], candidate=candidate[name],
             lost=drop(base[name], candidate[name]),
             factor=coefficient(base[name], candidate[name]))
        for name in both
        if name in candidate
    )  # fmt: skip
    missing = tuple(name for name in TASKS if name not in base or name not in candidate)
    return Accuracy(tasks=tasks, missing=missing)


def of_record(raw: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores of a run on a target: of the tables that the run itself wrote.

    Raises:
        BadValues: there is none, or two of them disagree.
    """
    tables = raw.get("tables") or ()
    if not tables:
        raise _bad("the record", "the run wrote no table; what it printed is of an earlier run")
    found: dict[str, float] = {}
    for table in tables:
        for name, value in parse(str(table["text"]), str(table["path"]), some=True).items():
            if found.setdefault(name, value) != value:
                raise _bad(str(table["path"]), f"{name} has {value:g} here and {found[name]:g} in"
                           " another table")  # fmt: skip
    if not found:
        raise _bad("the record", "no table of it holds a score")
    return found


def parse(text: str, where: str = "the table", *, some: bool = False) -> dict[str, float]:
    """Read scores by task, in percent. With `some`, a text without any gives none.

    Raises:
        BadValues: no score is in it, or one task has two that differ.
    """
    found: dict[str, float] = {}
    for name, value in _rows(text, where):
        known = found.get(name)
        # A task that is scored again stands in the table with 0 first.
        if known is not None and known not in (value, 0):
            raise _bad(where, f"{name} has {known:g} and {value:g}")
        found[name] = value
    if not found and not some:
        raise _bad(where, "no row has a data set and a score")
    for name in TASKS:
        if found.get(name) == 0:
            raise _bad(
                where, f"{name} is 0: the suite scores it again after that, and that is missing"
            )
    return found


def _rows(text: str, where: str) -> Iterator[tuple[str, float]]:
    stripped = text.removeprefix(_BOM).strip()
    if stripped.startswith("{"):
        try:
            raw = json.loads(stripped)
        except ValueError:
            return
        yield from _pairs(((str(k), v) for k, v in raw.items()), where)
        return
    lines = stripped.splitlines()
    marked = [line for line in lines if line.count("|") >= 5]
    rows: Iterable[Sequence[str]] = (
        ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in marked)
        if marked
        else csv.reader(lines)
    )
    header: list[str] = []
    for row in rows:
        cells = [cell.strip() for cell in row]
        if tuple(cell.lower() for cell in cells[:4]) == _COLUMNS:
            header = cells
            if len(cells) > len(_COLUMNS) + 1:
                raise _bad(where, f"it holds several models: {', '.join(cells[len(_COLUMNS) :])}")
        elif header and len(cells) == len(header) and not re.fullmatch(r"[-: ]*", cells[0]):
            yield from _pairs([(cells[0], cells[-1])], where)


def _pairs(rows: Iterable[tuple[str, Any]], where: str) -> Iterator[tuple[str, float]]:
    for name, value in rows:
        if isinstance(value, bool):  # float() takes it for 1 or 0
            raise _bad(where, f"{printable(name)} is {str(value).lower()}, which is no score")
        try:
            score = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        if math.isfinite(score):
            yield _task(name), score


def _task(name: str) -> str:
    """The suite's names carry prefixes and sizes; the official task is what they hold."""
    low = name.lower()
    return next((task for task in TASKS if task in low), low)


def _bad(where: str, why: str) -> BadValues:
    return BadValues(
        f"{where} gives no accuracy",
        why=why,
        fix="give the suite's summary table (CSV or Markdown), or a JSON object of task: score",
    )
