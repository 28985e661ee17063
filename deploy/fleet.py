"""Many targets at once: a bounded pool in which no target waits for, or stops, another.

Each piece of work has a deadline, what it says is drawn in one live table, and what it throws
becomes its result. Knows nothing of what the work is.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Generic, TypeVar

from deploy.agent.words import BundleError, Exit, printable
from deploy.errors import Unreachable

Tell = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 16
# Long enough for a first deploy over a slow line; a line that is dead is noticed by itself.
DEADLINE = 3600.0  # seconds a target


@dataclass(slots=True)
class Row:
    """One target's line in the table."""

    name: str
    step: str = "waiting"
    began: float | None = None
    took: float | None = None

    def seconds(self) -> str:
        if self.began is None:
            return ""
        return f"{self.took if self.took is not None else time.monotonic() - self.began:.1f} s"


def each(
    targets: Sequence[T],
    work: Callable[[T, Tell], R],
    *,
    name: Callable[[T], str],
    outcome: Callable[[R], str] = lambda _: "done",
    at_once: int = AT_ONCE,
    deadline: float = DEADLINE,
) -> list[R | BundleError]:
    """Do `work` on every target and return the results in the order of the targets.

    A BundleError, a crash and a missed deadline are results, too. One target alone is worked on in
    the calling thread.
    """
    if len(targets) == 1:
        return [_done(work, targets[0], _plain(name(targets[0])))]
    pool = _Pool(targets, work, [Row(name(target)) for target in targets], outcome)
    return pool.run(min(at_once, len(targets)), deadline)


class _Pool(Generic[T, R]):
    def __init__(
        self,
        targets: Sequence[T],
        work: Callable[[T, Tell], R],
        rows: Sequence[Row],
        outcome: Callable[[R], str],
    ) -> None:
        self._targets, self._work, self._rows, self._outcome = targets, work, rows, outcome
        self._results: dict[int, R | BundleError] = {}
        self._ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._next = iter(range(len(targets)))

    def run(self, at_once: int, deadline: float) -> list[R | BundleError]:
        self._board = _board(self._rows)
        with self._board:
            for _ in range(at_once):
                self._start()
            while len(self._results) < len(self._targets):
                try:
                    self._ended.get(timeout=0.2)
                    self._start()
                except queue.Empty:
                    self._expire(deadline)
                self._board.draw()
        return [self._results[index] for index in range(len(self._targets))]

    def _start(self) -> None:
        index = next(self._next, None)
        if index is not None:
            # A daemon: one that hangs beyond its deadline must not keep the process alive.
            threading.Thread(target=self._one, args=(index,), daemon=True).start()

    def _one(self, index: int) -> None:
        row = self._rows[index]
        row.began, row.step = time.monotonic(), "connecting"

        def tell(line: str) -> None:
            if index not in self._results:  # else its deadline has passed, and so may the board
                row.step = line
                self._board.say(row)

        self._end(index, _done(self._work, self._targets[index], tell))

    def _end(self, index: int, result: R | BundleError) -> None:
        if index in self._results:
            return  # too late: its deadline has passed
        row = self._rows[index]
        row.took = time.monotonic() - (row.began or time.monotonic())
        row.step = result.what if isinstance(result, BundleError) else self._outcome(result)
        # Said first: with the last result there, the caller goes on, and may close the stream.
        self._board.say(row)
        self._results[index] = result
        self._ended.put(index)

    def _expire(self, deadline: float) -> None:
        now = time.monotonic()
        for index, row in enumerate(self._rows):
            if index not in self._results and row.began and now - row.began > deadline:
                self._end(index, _late(row, deadline))


def _done(work: Callable[[T, Tell], R], target: T, tell: Tell) -> R | BundleError:
    try:
        return work(target, tell)
    except BundleError as err:
        return err
    except Exception as err:  # noqa: BLE001  one target's crash is told whole, and stops no other
        return BundleError(
            f"our code crashed: {type(err).__name__}: {err}",
            why=traceback.format_exc(),
            fix="this is our bug; the other targets were still worked on",
            exit=Exit.BUG,
        )


def _late(row: Row, deadline: float) -> Unreachable:
    return Unreachable(
        f"{row.name} did not end within {deadline:g} s",
        why=f"its last step: {row.step}",
        fix="what became of the call is not known; run it again: it asks first",
    )


def _plain(name: str) -> Tell:
    return lambda line: print(f"{name}: {printable(line)}", file=sys.stderr, flush=True)


def _board(rows: Sequence[Row]) -> Any:
    return _Table(rows) if sys.stderr.isatty() else _Lines(sys.stderr)


class _Lines:
    """A line a step, for logs."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._lock = out, threading.Lock()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, row: Row) -> None:
        took = f" ({row.seconds()})" if row.took is not None else ""
        with self._lock:
            print(f"{row.name}: {printable(row.step)}{took}", file=self._out, flush=True)

    def draw(self) -> None:
        return None


class _Table:
    """A live table, for people."""

    def __init__(self, rows: Sequence[Row]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._rows = rows
        self._live = Live(console=Console(stderr=True), auto_refresh=False)

    def __enter__(self) -> None:
        self._live.__enter__()

    def __exit__(self, *_: object) -> None:
        self.draw()
        self._live.__exit__(None, None, None)

    def say(self, row: Row) -> None:
        """The next drawing shows it."""

    def draw(self) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table("target", "step", "time", box=None)
        for row in self._rows:
            # Text, not markup: a path may hold brackets.
            table.add_row(Text(row.name), Text(printable(row.step)), row.seconds())
        self._live.update(table, refresh=True)
