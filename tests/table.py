"""The planted table: states that look like success, each with the check that found it.

A test marked `@plants(NAME)` plants one item of the list below and notes with `found` what spoke
up; `row` adds a line that no list asks for. The table stands at the end of a run. A run of every
test that plants something fails when an item has neither a row nor a reason why it could not be
planted.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ITEMS = (
    # kill -9, at system calls of the unchanged agent
    "kill -9 in a deploy of 5 files",
    "kill -9 in a deploy of 40 files",
    "kill -9 in a restore",
    "kill -9 in the call that mends",
    "kill -9 where files become folders",
    "kill -9 where folders become files",
    # faults
    "disk full before the commit point",
    "disk full while staging",
    "disk full after the commit point",
    "a read-only site",
    "no right to write",
    "a file of another owner",
    "an immutable file",
    "an I/O error on read-back",
    "two deploys at once",
    "a stale lock of a dead process",
    "a clock off by years",
    "a site that is a symlink",
    "hard links into a package cache",
    "a mapped .so",
    "a journal copied from another site",
    # a hostile bundle, manifest or repository
    "a flipped byte in a bundle",
    "a truncated bundle",
    "a name twice in a bundle",
    "a zip bomb as a bundle",
    "a zip bomb as a wheel",
    "a path that escapes, lexically or absolute",
    "a link inside the root that leads out",
    "a link swapped in the middle",
    "control characters in names",
    "control characters in what a target says",
    "an alias flood",
    "100 MB of YAML",
    "a git repository with hooks and odd config",
    "a huge diff",
    "a binary diff",
    # no false alarm
    "nothing, 50 times, in varied environments",
)
SILENT = "silent; clean state passes"
Found = Callable[..., None]
Row = tuple[str, str, str]  # what was planted, what found it, what its neighbours said
_KEY = "planted"


def plants(name: str) -> Any:
    """Mark a test as the one that plants this item."""
    assert name in ITEMS, f"{name!r} is no item of the table"
    return pytest.mark.plants(name)


def item_of(node: pytest.Item) -> str:
    """Return the item that a test plants, or ""."""
    marker = node.get_closest_marker("plants")
    return str(marker.args[0]) if marker else ""


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Add a row to the table: what was planted, and what found it."""

    def add(planted: str, found_by: str, neighbours: str = SILENT) -> None:
        request.node.user_properties.append((_KEY, (planted, found_by, neighbours)))

    return add


@pytest.fixture
def found(row: Callable[..., None], request: pytest.FixtureRequest) -> Callable[..., None]:
    """Note what found the item that this test is marked with."""
    name = item_of(request.node)
    assert name, "a test that asks for `found` must be marked with @plants"

    def note(by: str, neighbours: str = SILENT) -> None:
        row(name, by, neighbours)

    return note


@cache
def planters() -> dict[str, set[str]]:
    """Return item -> the test files that plant it, read from their texts."""
    places: dict[str, set[str]] = {}
    here = Path(__file__).parent
    for path in sorted(here.glob("*/test_*.py")):
        text = path.read_text("utf-8")
        if "plants(" not in text:
            continue
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "plants":
                file = path.relative_to(here.parent).as_posix()
                places.setdefault(ast.literal_eval(call.args[0]), set()).add(file)
    return places


class Table:
    """Gathers rows from reports, which workers send to the process that prints."""

    def __init__(self) -> None:
        self.rows: Counter[Row] = Counter()
        self.not_planted: dict[str, str] = {}
        self.files: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Any:
        report = yield
        if not (name := item_of(item)):
            return report
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            report.user_properties.append((f"not {_KEY}", (name, str(reason))))
        told = {value[0] for key, value in report.user_properties if key == _KEY}
        if report.when == "call" and report.passed and name not in told:
            report.outcome = "failed"
            report.longrepr = f"it plants {name!r} and did not say what found it"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files.add(report.nodeid.partition("::")[0])
        for key, value in report.user_properties:
            if key == f"not {_KEY}":
                self.not_planted[value[0]] = value[1]
            elif key == _KEY and report.when == "call" and report.passed:
                self.rows[tuple(value)] += 1

    def missing(self) -> list[str]:
        """Return the items that a whole run has left out; a run of less is asked nothing."""
        files = set().union(*planters().values())
        if not files or not files <= self.files:
            return []
        known = {planted for planted, _, _ in self.rows} | self.not_planted.keys()
        return [name for name in ITEMS if name not in known]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        option = session.config.option
        chosen = option.keyword or option.markexpr or option.collectonly
        if not (chosen or hasattr(session.config, "workerinput")) and self.missing():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        lines = self.lines()
        if not lines:
            return
        terminalreporter.section("planted states")
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            terminalreporter.write_line("  ".join(cells).rstrip())

    def lines(self) -> list[Row]:
        """Return the listed items in their order, then the other rows in the order they came."""
        rank = {name: number for number, name in enumerate(ITEMS)}
        ordered = sorted(self.rows, key=lambda line: rank.get(line[0], len(ITEMS)))
        told = [(p, by, f"{n} x {rest}" if n > 1 else rest) for p, by, rest in ordered
                for n in [self.rows[p, by, rest]]]  # fmt: skip
        planted = {name for name, _, _ in self.rows}
        told += [(n, f"NOT PLANTED: {why}", "") for n, why in self.not_planted.items()
                 if n not in planted]  # fmt: skip
        return told + [(name, "NO ROW", "") for name in self.missing()]
