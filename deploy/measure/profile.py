"""Read a profile of kernels: classes, shares, the largest; and hold two against each other.

Sources are the profiler's table (``*.hipkernel.csv``) and its database (``*.db``), which says the
same and may be all that is left. Tables of API calls look alike and count the host's time: they
are refused. A table may have millions of rows; memory does not grow with them.
"""

from __future__ import annotations

import codecs
import csv
import heapq
import itertools
import operator
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from deploy.agent.words import printable
from deploy.errors import BadValues, Refused
from deploy.regular import open_regular

REST = "other"  # kernels that no pattern fits
TOP = 20
_BATCH = 256  # rows at a time: they stay in the cache
_KNOWN = 1 << 12  # names whose class is remembered
_TAIL = 1 << 16
_NEEDED = ("Name", "Calls", "TotalDurationNs")
_WHOLE = (*_NEEDED, "AverageNs", "Percentage")  # the profiler's own table, which ends with Total
_NUMBERS: Mapping[str, tuple[type[int | float], str]] = {
    "Calls": (int, "whole number"),
    "TotalDurationNs": (int, "whole number of nanoseconds"),
    "AverageNs": (int, "whole number of nanoseconds"),
    "Percentage": (float, "number of percent"),
}
# Names as the runtime's own calls have them. A kernel of such a name is not known.
_API = re.compile(r"_*hip[A-Z]\w*|hsa_\w+|hiptx\w*")
_LIMIT = 1 << 20  # characters of one field
# A printed share has at most three decimals in some tables; the last rows add up such roundings.
_SHARE = 0.0051
_SUM = 0.5

Batch = tuple[Sequence[str], Sequence[int], Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One class or one kernel: how often it ran, how long in all (ns)."""

    name: str
    calls: int
    total: int
    kernels: int = 1

    @property
    def average(self) -> int:
        return self.total // self.calls if self.calls else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All of one profile. `classes` and `top` are sorted by time, longest first."""

    source: str
    calls: int
    total: int
    kernels: int
    classes: tuple[Part, ...]
    top: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    def share(self, part: Part) -> float:
        return part.total / self.total if self.total else 0.0

    def of(self, name: str) -> Part:
        found = (part for part in self.classes if part.name == name)
        return next(found, Part(name=name, calls=0, total=0, kernels=0))

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": "profile/1",
            "calls": self.calls,
            "total_ns": self.total,
            "kernels": self.kernels,
            "classes": [self._row(part) for part in self.classes],
            "top": [self._row(part) for part in self.top],
            "notes": list(self.notes),
        }

    def _row(self, part: Part) -> dict[str, Any]:
        return {
            "name": part.name,
            "kernels": part.kernels,
            "calls": part.calls,
            "total_ns": part.total,
            "average_ns": part.average,
            "share": self.share(part),
        }


class Classes:
    """Which class a kernel's name belongs to: of all patterns that fit, the longest decides."""

    def __init__(self, patterns: Mapping[str, Sequence[str]]) -> None:
        self.names = (*sorted(patterns), REST)
        rows = [
            (pattern, self.names.index(name)) for name in patterns for pattern in patterns[name]
        ]
        # Alternatives are tried in order, so the longest stands first; equal ones by their class.
        rows.sort(key=lambda row: (-len(row[0]), row[1], row[0]))
        self._of = (len(self.names) - 1, *(index for _, index in rows))
        text = "|".join(f"({_regex(pattern)})" for pattern, _ in rows) or "(?!)"
        self._match = re.compile(text, re.DOTALL).match

        # Where every pattern is a beginning, no more of a name decides than the longest is long.
        plain = all(re.fullmatch(r"[^*?]*\*", pattern) for pattern, _ in rows)
        self._decides = max((len(pattern) - 1 for pattern, _ in rows), default=0) if plain else None
        self._known: dict[str, int] = {}

    def index(self, name: str) -> int:
        found = self._match(name)
        return self._of[found.lastindex or 0] if found else self._of[0]

    def indexes(self, names: Sequence[str]) -> list[int]:
        """Return the class of each name; what was asked before is remembered, within limits."""
        if len(self._known) > _KNOWN:
            self._known.clear()
        known = self._known
        starts = names if self._decides is None else [name[: self._decides] for name in names]
        found = list(map(known.get, starts))
        if None in found:
            for start in {start for start, index in zip(starts, found) if index is None}:
                known[start] = self.index(start)
            found = list(map(known.get, starts))
        return found  # type: ignore[return-value]  # none is left


@dataclass(slots=True)
class _Sums:
    """What is kept while rows pass: three numbers a class, and the largest kernels."""

    classes: Classes
    calls: list[int] = field(default_factory=list)
    totals: list[int] = field(default_factory=list)
    kernels: list[int] = field(default_factory=list)
    top: list[tuple[int, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for column in (self.calls, self.totals, self.kernels):
            column.extend([0] * len(self.classes.names))

    def add(self, batch: Batch) -> None:
        indexes = self.classes.indexes(batch[0])
        all_calls, all_totals = self.calls, self.totals
        for index, calls, total in zip(indexes, batch[1], batch[2]):
            all_calls[index] += calls
            all_totals[index] += total
        for index, count in Counter(indexes).items():
            self.kernels[index] += count
        self._rank(batch)

    def _rank(self, batch: Batch) -> None:
        names, calls, totals = batch
        least = self.top[-1][0] if len(self.top) == TOP else -1
        if max(totals, default=0) <= least:
            return
        rows = ((t, n, c) for n, c, t in zip(names, calls, totals) if t > least)
        # Ties by name: the same profile gives the same list, whatever order it came in.
        self.top = heapq.nsmallest(TOP, itertools.chain(self.top, rows), key=_by_time)

    def profile(self, source: str, notes: Iterable[str] = ()) -> Profile:
        rows = zip(self.classes.names, self.calls, self.totals, self.kernels)
        parts = [Part(name=n, calls=c, total=t, kernels=k) for n, c, t, k in rows if k]
        return Profile(
            source=source,
            calls=sum(self.calls),
            total=sum(self.totals),
            kernels=sum(self.kernels),
            classes=tuple(sorted(parts, key=lambda part: (-part.total, part.name))),
            top=tuple(Part(name=n, calls=c, total=t) for t, n, c in self.top),
            notes=tuple(notes),
        )


def summary(path: Path, patterns: Mapping[str, Sequence[str]]) -> Profile:
    """Read a profile from the profiler's table or database.

    Raises:
        BadValues: it is neither, is damaged (with its line), or holds no kernel call.
        Refused: it is a table of API calls, or the profiler still writes the database.
    """
    classes = Classes(patterns)
    try:
        with open_regular(path) as file:
            start = file.read(16)
        found = (
            _of_db(path, classes)
            if start.startswith(b"SQLite format 3")
            else (_of_csv(path, classes))
        )
    except OSError as err:
        raise _damaged(path, str(err.strerror or err)) from err
    if not found.calls:
        raise _damaged(path, "it holds no kernel call", _EMPTY)
    return found


def changes(before: Profile, after: Profile) -> list[dict[str, Any]]:
    """Return a row a class: time and share on both sides; the largest change of time first."""
    names = {part.name for part in (*before.classes, *after.classes)}
    rows = []
    for name in names:
        old, new = before.of(name), after.of(name)
        rows.append({
            "class": name,
            "before_ns": old.total,
            "after_ns": new.total,
            "change_ns": new.total - old.total,
            "before_share": before.share(old),
            "after_share": after.share(new),
            "before_calls": old.calls,
            "after_calls": new.calls,
        })  # fmt: skip
    return sorted(rows, key=lambda row: (-abs(row["change_ns"]), row["class"]))


def hot_spot(before: Profile, after: Profile) -> str:
    """Say where most of the time goes now, and where it went before."""
    old, new = before.classes[0], after.classes[0]
    now = f"{new.name} ({after.share(new):.1%} of the kernel time)"
    if old.name == new.name:
        return f"the hot spot stayed: {now}, before {before.share(old):.1%}"
    return f"the hot spot moved from {old.name} ({before.share(old):.1%}) to {now}"


def worth(profile: Profile, part: Part, less: float = 0.10) -> float:
    """Return how much shorter all kernels together become when one class takes `less` time.

    It is the most that a measured run can gain by it: kernels are not all of its time.
    """
    return profile.share(part) * less


def _by_time(row: tuple[int, str, int]) -> tuple[int, str, int]:
    return -row[0], row[1], row[2]


def _regex(pattern: str) -> str:
    """Only `*` and `?` are special: square brackets stand in kernel names and mean themselves."""
    beginning = pattern.rstrip("*")
    text = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in beginning)
    return text if beginning != pattern else text + r"\Z"  # behind a last * nothing matters


# --- the table ------------------------------------------------------------------------------------


def _of_csv(path: Path, classes: Classes) -> Profile:
    if re.search(r"\.(hip|hsa)trace\.csv$", path.name):
        raise _api(path, "its name says so")
    csv.field_size_limit(_LIMIT)
    total = _last_row(path)
    sums = _Sums(classes)
    with _text(path) as file:
        reader = csv.reader(file, strict=True)
        header = _header(path, reader)
        whole = set(_WHOLE) <= set(header)
        if whole and total is None:
            raise _damaged(path, "the last row is not Total: the table was cut", _CUT)
        check = _Check(header, total[1] if whole and total else 0)
        first = True
        for names, calls, totals in _batches(path, reader, header, check):
            if first and all(_API.fullmatch(name) for name in names if name != "Total"):
                raise _api(path, "all its names are calls of the runtime")
            first = False
            sums.add((names, calls, totals))
    found = sums.profile(path.name, check.notes(sums))
    if total is not None and whole and (found.calls, found.total) != total:
        raise _damaged(
            path,
            f"its Total row says {total[0]} calls and {total[1]} ns, its rows add up to"
            f" {found.calls} and {found.total}",
            _CUT,
        )
    return found


def _text(path: Path, errors: str = "strict") -> TextIO:
    """Open it behind its byte order mark; the codec that skips one by itself is slower."""
    with path.open("rb") as file:
        begin = len(codecs.BOM_UTF8) if file.read(3) == codecs.BOM_UTF8 else 0
    text = path.open(encoding="utf-8", newline="", errors=errors)
    text.seek(begin)
    return text


class _Check:
    """Averages and printed shares of the table against its own numbers."""

    def __init__(self, header: Sequence[str], total: int) -> None:
        self._average = header.index("AverageNs") if "AverageNs" in header else -1
        self._share = header.index("Percentage") if "Percentage" in header else -1
        self._total, self._shares = total, 0.0

    def wrong(
        self, columns: Sequence[Sequence[str]], calls: Sequence[int], totals: Sequence[int]
    ) -> bool:
        """Look at a whole batch. Raises ValueError for what is no number."""
        if self._average >= 0:
            averages = list(map(int, columns[self._average]))
            if averages != list(map(operator.floordiv, totals, calls)):
                return True
        if self._share >= 0 and self._total:
            return self._shares_off(columns[self._share], totals)
        return False

    def _shares_off(self, printed: Sequence[str], totals: Sequence[int]) -> bool:
        # The more rows a table has, the fewer different shares it can print.
        known = {text: float(text) for text in set(printed)}
        if len(known) == 1:  # all rows print the same: the ends decide
            [share] = known.values()
            self._shares += share * len(totals)
            shares, totals = [share, share], (min(totals), max(totals))
        else:
            shares = list(map(known.__getitem__, printed))
            self._shares += sum(shares)
        scale = 100 / self._total
        off = list(map(operator.sub, shares, [total * scale for total in totals]))
        return not (max(off) < _SHARE and min(off) > -_SHARE)

    def notes(self, sums: _Sums) -> list[str]:
        found = []
        if self._share >= 0 and self._total and abs(self._shares - 100) > _SUM:
            # Of a million kernels each share rounds to nothing: their sum proves nothing then.
            count = sum(sums.kernels)
            found.append(f"the {count} printed shares add up to {self._shares:.3f} %, not to 100")
        if not self._total:
            found.append("the table has no Total row: nothing proves that it is whole")
        return found


def _header(path: Path, reader: Any) -> list[str]:
    try:
        header: list[str] = next(reader)
    except StopIteration:
        raise _damaged(path, "line 1: it is empty", _EMPTY) from None
    except (csv.Error, UnicodeDecodeError) as err:
        raise _damaged(path, f"line 1: {err}") from err
    missing = [name for name in _NEEDED if name not in header]
    if missing:
        raise _damaged(path, f"line 1: it has no column {', '.join(missing)}", _OTHER)
    return header


def _batches(path: Path, reader: Any, header: Sequence[str], check: _Check) -> Iterator[Batch]:
    """Yield names, calls and times of many rows at once; the Total row is not among them."""
    at = [header.index(name) for name in _NEEDED]
    width = len(header)
    while True:
        before = reader.line_num
        try:
            rows = list(itertools.islice(reader, _BATCH))
            if not rows:
                return
            if rows[-1] and rows[-1][at[0]] == "Total" and len(rows[-1]) == width:
                rows.pop()
            if not rows:
                continue
            columns = list(zip(*rows, strict=True))
            if len(columns) != width:
                raise ValueError
            names = columns[at[0]]
            calls, totals = list(map(int, columns[at[1]])), list(map(int, columns[at[2]]))
            bad = min(calls) < 1 or min(totals) < 0 or check.wrong(columns, calls, totals)
        except (ValueError, IndexError, csv.Error, ZeroDivisionError) as err:
            raise _first_fault(path, before, header, check) from err
        if bad:
            raise _first_fault(path, before, header, check)
        yield names, calls, totals


def _first_fault(path: Path, after: int, header: Sequence[str], check: _Check) -> BadValues:
    """Go through the rows behind line `after` one by one, and name the first that is wrong."""
    with _text(path, "replace") as file:
        reader = csv.reader(file, strict=True)
        line = 0
        try:
            for row in reader:
                line = reader.line_num
                if line <= max(after, 1):
                    continue
                if why := _no_number(row, header):
                    return _damaged(path, f"line {line}, {why}", _TYPED)
                if why := _row_fault(row, header, check):
                    return _damaged(path, f"line {line}: {why}", _CUT)
        except csv.Error as err:
            return _damaged(path, f"line {reader.line_num}: {err}", _CUT)
    return _damaged(path, f"after line {after}: it is no UTF-8 text or changed while it was read")


def _row_fault(row: Sequence[str], header: Sequence[str], check: _Check) -> str:
    if len(row) != len(header):
        hint = "; a name with commas needs quotes" if len(row) > len(header) else ""
        return f"{len(row)} fields where the header has {len(header)}{hint}"
    values = dict(zip(header, row))
    if values["Name"] == "Total":
        return ""
    calls, total = int(values["Calls"]), int(values["TotalDurationNs"])
    if calls < 1 or total < 0:
        return f"{calls} calls of {total} ns in all cannot be"
    if check.wrong([[value] for value in row], [calls], [total]):
        return (
            f"average or share do not follow from {calls} calls of {total} ns:"
            f" {', '.join(row[len(_NEEDED) :])}"
        )
    return ""


def _no_number(row: Sequence[str], header: Sequence[str]) -> str:
    """Name the column that holds no number of its kind, and what is there."""
    if len(row) != len(header):
        return ""
    for name, found in zip(header, row):
        expected = _NUMBERS.get(name)
        if expected is None:
            continue
        kind, what = expected
        try:
            kind(found)
        except ValueError:
            return f"column {name}: {found!r} is no {what}"
    return ""


def _last_row(path: Path) -> tuple[int, int] | None:
    """Return calls and time of the Total row, or None where the last row is another.

    Raises:
        BadValues: the last line has no end, so nobody knows what it would have said.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        tail = file.read()
    if size and not tail.endswith(b"\n"):
        with path.open("rb") as file:
            lines = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        raise _damaged(path, f"line {lines + 1}: the last line is cut", _CUT)
    if b"\0" in tail:  # some versions of csv refuse it, others let it pass
        raise _damaged(path, "it holds NUL bytes: a part of it was never written", _CUT)
    last = tail.rstrip(b"\r\n").rpartition(b"\n")[2].decode("utf-8", "replace")
    row = next(csv.reader([last]), [])
    if not row or row[0] != "Total" or len(row) < len(_NEEDED):
        return None
    if not (row[1].isascii() and row[1].isdigit() and row[2].isascii() and row[2].isdigit()):
        return None
    return int(row[1]), int(row[2])


# --- the database ---------------------------------------------------------------------------------


def _of_db(path: Path, classes: Classes) -> Profile:
    """Add up the kernels of every process; names are numbers that another table spells out."""
    sums = _Sums(classes)
    tables: list[str] = []
    left = _Left()
    try:
        with _opened(path) as db:
            tables = [
                row[0]
                for row in db.execute(
                    "SELECT name FROM sqlite_master WHERE type='table' AND name LIKE 'HIPOPS\\_%'"
                    " ESCAPE '\\' ORDER BY name"
                )
            ]
            if tables:
                _require_one_name(path, db)
                query = _query(tables)
                rows = db.execute(query, [table.removeprefix("HIPOPS_") for table in tables])
                while batch := rows.fetchmany(_BATCH):
                    if whole := list(left.checked(path, batch)):
                        names, calls, totals = zip(*whole)
                        sums.add((names, calls, totals))
    except sqlite3.OperationalError as err:
        if "locked" in str(err) or "busy" in str(err):
            raise Refused(
                f"{path.name} cannot be read yet",
                why=f"{err}: the profiler still writes it",
                fix="wait until the profiler has ended; do not end it by force",
            ) from err
        raise _damaged(path, str(err)) from err
    except sqlite3.Error as err:
        raise _damaged(path, str(err)) from err
    if not tables:
        raise _damaged(path, "it has no table of kernels (not valid trace data)", _EMPTY)
    if left.running and not sum(sums.calls):
        raise _damaged(path, f"none of its {left.running} calls had ended", _EMPTY)
    processes = f"{len(tables)} process" + "es" * (len(tables) > 1)
    return sums.profile(path.name, [f"read from the database: {processes}", *left.notes()])


@dataclass(slots=True)
class _Left:
    """What a database holds and cannot be added up: said, where it may be, else refused."""

    running: int = 0  # calls without a duration
    nameless: int = 0  # calls of a number that STR_TABLE does not spell out

    def checked(self, path: Path, batch: Iterable[Sequence[Any]]) -> Iterator[tuple[str, int, int]]:
        """Pass on name, calls and time of the calls that ended.

        Raises:
            BadValues: a duration is no whole number, or is below 0.
        """
        for name, calls, total, running, damaged, least, nameless in batch:
            if damaged:
                raise _damaged(path, f"{damaged} calls of {name} have a DurationNs that is no whole"
                               " number of nanoseconds", _WRITTEN)  # fmt: skip
            if calls and least < 0:
                raise _damaged(path, f"a call of {name} took {least} ns", _WRITTEN)
            self.running += running
            self.nameless += nameless
            if calls:
                yield name, calls, total

    def notes(self) -> Iterator[str]:
        if self.running:
            yield f"{self.running} calls had not ended and are left out (they have no DurationNs)"
        if self.nameless:
            yield f"{self.nameless} calls are of kernels that STR_TABLE does not name"


def _require_one_name(path: Path, db: sqlite3.Connection) -> None:
    """Raise BadValues where one number has two names: nobody knows whose the calls are."""
    for number, one, other in db.execute(_TWO_NAMES):
        raise _damaged(path, f"STR_TABLE has two names for {number}: {one} and {other}", _WRITTEN)


def _query(tables: Sequence[str]) -> str:
    """One name may have another number in each process, so names are added up, not numbers."""
    parts = [_PART.format(_quoted(table)) for table in tables]
    union = " UNION ALL ".join(parts)
    return f"SELECT {_SUMMED} FROM ({union}) GROUP BY name ORDER BY name"  # noqa: S608


_SUMMED = "name, SUM(n), SUM(ns), SUM(running), SUM(damaged), MIN(least), SUM(nameless)"

# A value equals its own cast where it is a whole number, however the column was declared. Numbers
# that are none would be cast to 0, and so would names: those of another kind are of no name.
# The grouping comes first: there are many more calls than names. And each number of STR_TABLE is
# taken once: a second row of it would count its calls twice.
_PART = """
SELECT
  COALESCE(s.name, 'unknown name ' ||
    CASE WHEN typeof(o.Name) IN ('text', 'integer') THEN o.Name ELSE quote(o.Name) END) AS name,
  o.known AS n, o.ns AS ns, o.n - o.known AS running, o.known - o.whole AS damaged,
  o.least AS least, CASE WHEN s.name IS NULL THEN o.n ELSE 0 END AS nameless
FROM (
  SELECT Name, COUNT(*) AS n, COUNT(DurationNs) AS known, MIN(DurationNs) AS least,
    COALESCE(SUM(CAST(DurationNs AS INT) = DurationNs), 0) AS whole,
    COALESCE(SUM(CAST(DurationNs AS INT)), 0) AS ns
  FROM {} GROUP BY Name
) o
LEFT JOIN (
  SELECT CAST(STR_ID AS INT) AS number, MIN(STR_NAME) AS name FROM STR_TABLE
  WHERE TYPE = 6 AND CONFIG_KEY = ? AND typeof(STR_NAME) = 'text' GROUP BY number
) s
ON s.number = CAST(o.Name AS INT) AND CAST(o.Name AS INT) = o.Name"""
_TWO_NAMES = """
SELECT CAST(STR_ID AS INT) AS number, MIN(STR_NAME), MAX(STR_NAME) FROM STR_TABLE
WHERE TYPE = 6 AND typeof(STR_NAME) = 'text' GROUP BY CONFIG_KEY, number
HAVING MIN(STR_NAME) <> MAX(STR_NAME) LIMIT 1"""


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


class _opened:  # noqa: N801 - reads as a word in `with _opened(path)`
    """A database that is only read, and closed at the end."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=1.0)

    def __enter__(self) -> sqlite3.Connection:
        return self._db

    def __exit__(self, *_: object) -> None:
        self._db.close()


# --- errors ---------------------------------------------------------------------------------------

_CUT = "fetch the whole file; the profiler writes it while it ends, which may take minutes"
_TYPED = "give the table as the profiler wrote it; docs/measure.md shows its columns"
_WRITTEN = "give the database as the profiler wrote it, or its *.hipkernel.csv"
_EMPTY = "record again: start, load, stop, flush, exit, and let the profiler end by itself"
_OTHER = "give the profiler's *.hipkernel.csv, or its *.db"


def _damaged(path: Path, why: str, fix: str = _OTHER) -> BadValues:
    return BadValues(f"{path.name} is no usable profile", why=printable(why), fix=fix)


def _api(path: Path, why: str) -> Refused:
    return Refused(
        f"{path.name} is a table of API calls",
        why=f"{why}; they count the host's time, not the kernels'",
        fix="give the *.hipkernel.csv beside it",
    )
