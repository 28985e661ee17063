"""The official score of throughput and accuracy, with its limits on latency and completion."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deploy.errors import BadValues
from deploy.measure.stats import percentile

# Full marks of each bucket of prompt lengths.
FULL = {"4-8K": 20.0, "8-16K": 50.0, "16-32K": 30.0}
SLOWER = 1.5  # times the baseline's p99, of TTFT a bucket and of TPOT over all requests
LESS_DONE = 0.01  # by how much the share of completed requests may fall
# Relative loss of accuracy in percent, up to and including -> coefficient.
_STEPS = ((1.0, 1.00), (2.0, 0.97), (3.0, 0.94), (5.0, 0.90), (10.0, 0.85))


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One bucket of one side. `throughput` in tokens a second, times in any one unit."""

    throughput: float
    ttfts: tuple[float, ...] = ()
    tpots: tuple[float, ...] = ()
    asked: int = 0
    completed: int = 0

    @property
    def done(self) -> float:
        return self.completed / self.asked if self.asked else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one bucket earned; `zeroed` says which limit was broken."""

    bucket: str
    gain: float
    points: float
    zeroed: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "bucket": self.bucket,
            "gain": self.gain,
            "points": self.points,
            "zeroed": self.zeroed,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """All buckets. `total` is that of throughput alone; `missing` were not measured."""

    rows: tuple[Row, ...]
    missing: tuple[str, ...]

    @property
    def total(self) -> float:
        return math.fsum(row.points for row in self.rows)

    def final(self, coefficient: float) -> float:
        return self.total * coefficient

    def to_json(self) -> dict[str, Any]:
        return {
            "rows": [row.to_json() for row in self.rows],
            "missing": list(self.missing),
            "total": self.total,
        }


def points(full: float, gain: float) -> float:
    """Return the marks of one bucket; a gain of 0.25 is 25 % more tokens a second."""
    return full * (0.6 + 0.4 * (1 - math.exp(-1.3 * gain)))


def score(base: Mapping[str, Side], candidate: Mapping[str, Side]) -> Score:
    """Score the official buckets that both sides have measured.

    Raises:
        BadValues: a baseline without throughput.
    """
    both = [name for name in FULL if name in base and name in candidate]
    stopped = _pooled(base, candidate, both)
    rows = tuple(_row(name, base[name], candidate[name], stopped) for name in both)
    return Score(rows=rows, missing=tuple(name for name in FULL if name not in both))


def coefficient(base: float, candidate: float) -> float:
    """Return the factor of one task from both sides' accuracy.

    Raises:
        BadValues: a baseline that is not positive.
    """
    lost = drop(base, candidate)
    # The limits are meant in decimal numbers: 2 % of 50 must not become 2.0000000000000018 %.
    return next((k for limit, k in _STEPS if round(lost, 9) <= limit), 0.0)


def drop(base: float, candidate: float) -> float:
    """Return how much of a task's accuracy was lost, in percent of the baseline's."""
    if not base > 0:
        raise BadValues(
            "there is no accuracy to compare with",
            why=f"the baseline's is {base:g}",
            fix="run the accuracy suite on the baseline, and see that every task has a score",
        )
    return (base - candidate) / base * 100


def _row(name: str, base: Side, candidate: Side, stopped: str) -> Row:
    if not base.throughput > 0:
        raise BadValues(
            f"{name} cannot be scored",
            why=f"the baseline made {base.throughput:g} tokens a second",
            fix="give the result of a baseline in which requests succeeded",
        )
    gain = candidate.throughput / base.throughput - 1
    zeroed = stopped or _slow(base, candidate) or _undone(base, candidate)
    return Row(
        bucket=name, gain=gain, points=0.0 if zeroed else points(FULL[name], gain), zeroed=zeroed
    )


def _slow(base: Side, candidate: Side) -> str:
    if not base.ttfts or not candidate.ttfts:
        return ""
    return _beyond("TTFT p99", percentile(base.ttfts, 99), percentile(candidate.ttfts, 99))


def _undone(base: Side, candidate: Side) -> str:
    if candidate.done >= base.done - LESS_DONE - 1e-12:
        return ""
    return f"{candidate.done:.1%} of the requests completed, the baseline's {base.done:.1%}"


def _pooled(base: Mapping[str, Side], candidate: Mapping[str, Side], buckets: list[str]) -> str:
    """The limit on time a token holds over the requests of all buckets together."""
    ours = [t for name in buckets for t in candidate[name].tpots]
    theirs = [t for name in buckets for t in base[name].tpots]
    if not ours or not theirs:
        return ""
    return _beyond("TPOT p99 of all buckets", percentile(theirs, 99), percentile(ours, 99))


def _beyond(what: str, base: float, found: float) -> str:
    if found <= SLOWER * base * (1 + 1e-12):
        return ""
    return f"{what} is {found / base:.2f} times the baseline's, allowed is {SLOWER:g}"
