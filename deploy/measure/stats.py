"""What a few noisy numbers can prove: percentiles, intervals, and one verdict on a difference.

A gain has to be shown, a loss has to be ruled out. One pair of runs shows nothing: how far two runs
of the same code lie apart on this machine is known only from repeats, and a slow drift of the
machine looks like a gain unless the runs take turns.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

NOISE = 0.01  # below this a difference is noise, unless repeats agree
PAIRS = 3  # fewer pairs of runs prove no gain
_RESAMPLES = 2000
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
_T = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788,
    2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639,
    2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip


class Verdict(str, Enum):
    """What is said of a difference in throughput."""

    GAIN = "gain"
    LOSS = "loss"
    NOISE = "noise"
    NOT_SHOWN = "not shown"
    POSSIBLE_LOSS = "possible loss"

    @property
    def regression(self) -> bool:
        """True for what must stop a submission until more runs say otherwise."""
        return self in (Verdict.LOSS, Verdict.POSSIBLE_LOSS)


@dataclass(frozen=True, slots=True)
class Interval:
    """95 % of what would be found again; `low` and `high` in the unit of the value."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The verdict on a change (0.04 is 4 % more), with what it rests on.

    `spread` is (max - min) / mean of the runs of one side, the larger of both; None for one run.
    """

    verdict: Verdict
    change: Interval | None
    pairs: int
    spread: float | None
    why: str
    point: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict.value,
            "change": self.point,
            "interval": self.change.to_json() if self.change else None,
            "pairs": self.pairs,
            "spread": self.spread,
            "why": self.why,
        }


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile by linear interpolation, as the client computes it.

    Raises ValueError for no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values have no percentile")
    at = (len(ordered) - 1) * percent / 100
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def p99_name(count: int) -> str:
    """Call a 99th percentile what it is: of few values it is the slowest one."""
    return "p99" if count >= 100 else f"slowest of {count} (p99)"


def claim(base: Sequence[float], candidate: Sequence[float], *, interleaved: bool = True) -> Claim:
    """Judge throughputs of runs, both sides in the order in which they were paired.

    `interleaved` says that the runs took turns, so that a drift of the machine hits both sides.

    Raises ValueError for sides of unequal or no length, and for throughputs that are not positive.
    """
    if len(base) != len(candidate) or not base or min(*base, *candidate) <= 0:
        raise ValueError("both sides need the same number of positive throughputs")
    logs = [math.log(b / a) for a, b in zip(base, candidate)]
    point = math.expm1(statistics.fmean(logs))
    pairs = len(logs)
    if pairs < PAIRS:
        verdict, why = _few(point, pairs)
        return Claim(verdict=verdict, change=None, pairs=pairs, spread=_spread(base, candidate),
                     why=why, point=point)  # fmt: skip
    interval = _paired(logs)
    spread = _spread(base, candidate)
    assert spread is not None
    verdict, why = _judged(interval, spread, interleaved=interleaved)
    return Claim(verdict=verdict, change=interval, pairs=pairs, spread=spread, why=why, point=point)


def needed(base: Sequence[float], candidate: Sequence[float]) -> int | None:
    """Return how many requests would tell the seen change of paired latencies from chance.

    None when there is no change or no scatter to tell it from. It speaks of chance between
    requests only; that between runs is `claim`'s.
    """
    logs = [math.log(b / a) for a, b in zip(base, candidate) if a > 0 and b > 0]
    if len(logs) < 2:
        return None
    change, scatter = statistics.fmean(logs), statistics.stdev(logs)
    if not change or not scatter:
        return None
    # 95 % sure of what is seen, and four in five chances to see it.
    return max(2, math.ceil(((1.96 + 0.84) * scatter / change) ** 2))


def bootstrap(
    pairs: Sequence[tuple[float, float]],
    value: Callable[[Sequence[tuple[float, float]]], float],
    seed: int = 0,
) -> Interval:
    """Return a value of paired numbers with its 95 % interval over resampled pairs.

    The seed is fixed: the same numbers give the same interval on every machine.
    """
    generator = random.Random(seed)  # noqa: S311 - statistics, no secret
    drawn = sorted(value(generator.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return Interval(value(pairs), percentile(drawn, 2.5), percentile(drawn, 97.5))


def median_change(pairs: Sequence[tuple[float, float]]) -> float:
    """Return by how much the median of the second numbers lies above that of the first."""
    base, candidate = zip(*pairs)
    return _middle(candidate) / _middle(base) - 1


def turns(starts: Sequence[tuple[str, str]]) -> bool:
    """True when runs of both sides took turns: (start, side), in order of start, two by two."""
    sides = [side for _, side in sorted(starts)]
    return len(sides) % 2 == 0 and all(sides[i] != sides[i + 1] for i in range(0, len(sides), 2))


def _middle(values: Sequence[float]) -> float:
    """The median. Thousands are drawn, and statistics.median takes several times as long."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _few(point: float, pairs: int) -> tuple[Verdict, str]:
    many = "one pair of runs shows" if pairs == 1 else f"{pairs} pairs of runs show"
    if abs(point) < NOISE:
        return Verdict.NOISE, f"below {NOISE:.0%}, and {many} nothing finer"
    if point > 0:
        return Verdict.NOT_SHOWN, f"{many} no gain: make {PAIRS} pairs that take turns"
    return Verdict.POSSIBLE_LOSS, f"{many} it; make {PAIRS} pairs that take turns to rule it out"


def _judged(change: Interval, spread: float, *, interleaved: bool) -> tuple[Verdict, str]:
    if not interleaved:
        verdict = Verdict.POSSIBLE_LOSS if change.value <= -NOISE else Verdict.NOT_SHOWN
        return verdict, "the runs did not take turns: a drift of the machine looks the same"
    if change.excludes_zero and abs(change.value) > spread:
        verdict = Verdict.GAIN if change.value > 0 else Verdict.LOSS
        return verdict, "the interval excludes 0, and it is more than runs of one side differ"
    if abs(change.value) < NOISE and not change.excludes_zero:
        return Verdict.NOISE, f"below {NOISE:.0%}, and the interval holds 0"
    if not change.excludes_zero:
        return Verdict.NOT_SHOWN, "the interval holds 0"
    return Verdict.NOT_SHOWN, f"runs of one side differ by {spread:.2%}, which is more"


def _paired(logs: Sequence[float]) -> Interval:
    mean = statistics.fmean(logs)
    half = _t(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return Interval(math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))


def _t(freedom: int) -> float:
    return _T[freedom - 1] if freedom <= len(_T) else 1.95996 + 2.45 / freedom


def _spread(*sides: Sequence[float]) -> float | None:
    if len(sides[0]) < 2:
        return None
    return max((max(side) - min(side)) / statistics.fmean(side) for side in sides)
