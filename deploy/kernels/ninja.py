"""Ask ninja what it would still do, leaving out the step that always runs.

A custom target has an output that never exists, so it runs at every build, and what is behind it
looks unfinished to a dry run. For the length of one question a file of that name is put there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import log

ALWAYS = "hipify"
_NEVER_THERE = re.compile(
    r"ninja explain: (?:output )?(\S+) (?:of phony edge with no inputs )?doesn't exist"
)
_NAMES = ".stand-ins"  # which files were put there, for the case that we are killed meanwhile


def pending(ask: Callable[..., str], binary: Path, targets: Iterable[str]) -> list[str]:
    """Return the steps that a build of `targets` would run now, the converter's own left out."""
    wanted = tuple(targets)
    said = ask("-n", "-v", "-d", "explain", *wanted)
    steps = _steps(said)
    names = [name for name in _NEVER_THERE.findall(said) if ALWAYS in name]
    if not steps or not names:
        return steps
    with _stand_ins(binary, names):
        return _steps(ask("-n", "-v", *wanted))


def clear(binary: Path) -> None:
    """Remove stand-ins that a killed call left: with them the converter would never run again."""
    try:
        names = (binary / _NAMES).read_text("utf-8").splitlines()
    except OSError:
        return
    for name in names:
        (binary / name).unlink(missing_ok=True)
    (binary / _NAMES).unlink()


@contextmanager
def _stand_ins(binary: Path, names: Iterable[str]) -> Iterator[None]:
    every = sorted(set(names))
    (binary / _NAMES).write_text("\n".join(every), "utf-8")
    try:
        for name in every:
            (binary / name).touch(exist_ok=False)
        yield
    finally:
        clear(binary)


def _steps(said: str) -> list[str]:
    return [step[3] for line in said.splitlines() if (step := log.STEP.fullmatch(line))]
