"""Measured things -> text for a terminal: runs, comparisons, profiles, accuracy. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deploy.agent.words import printable
from deploy.measure import profile as profiles
from deploy.measure.accuracy import Accuracy
from deploy.measure.compare import Comparison, Row
from deploy.measure.profile import Profile
from deploy.measure.score import FULL
from deploy.measure.stats import Interval
from deploy.report import folded, table, terminal

_BAR = 40  # characters of the longest bar
_BESIDE_BAR, _BESIDE_NAME = 72, 32  # columns that the others of their tables need at most, or so


def job_text(target: str, found: Mapping[str, Any]) -> str:
    """One run on a target: where it is kept, how far it is, its last lines."""
    lines = [f"{printable(target)}: {found['kind']} {found['stamp']} is {found['state']}"]
    lines.append(f"  folder  {printable(found['folder'])}")
    if found["step"]:
        lines.append(f"  step    {printable(found['step'])}")
    lines += [f"  {printable(text)}" for text in found.get("files") or ()]
    if error := found["error"]:
        lines.append(f"  failed  {printable(error['what'])}: {printable(error['why'])}")
    return "\n".join(lines)


def comparison_text(found: Comparison) -> str:
    """A block a bucket, then the score, then what decides the exit code."""
    blocks = [_row_text(row) for row in found.rows]
    if found.score is not None:
        blocks.append("\n".join(_score_lines(found)))
    if not found.comparable:
        blocks.append("not comparable: no gain and no loss follows from these runs")
    elif found.regressions:
        blocks.append(f"regression in {', '.join(found.regressions)}, whatever the total says")
    return folded("\n\n".join(blocks))


def accuracy_text(found: Accuracy) -> str:
    rows = [("task", "baseline", "candidate", "lost", "factor")]
    rows += [
        (t.name, f"{t.base:.2f}", f"{t.candidate:.2f}", f"{t.lost:+.2f} %", f"{t.factor:.2f}")
        for t in found.tasks
    ]
    last = (
        f"missing: {', '.join(found.missing)}: no factor"
        if found.factor is None
        else f"mean factor {found.factor:.4f}"
    )
    return f"{table(rows)}\n  {last}"


def profile_text(found: Profile, *, top: int = 10) -> str:
    """Classes with bars, what a further 10 % of each would gain in all, and the longest kernels."""
    rows = [("class", "kernels", "calls", "total ms", "share", "10 % less", "")]
    longest = max((part.total for part in found.classes), default=1) or 1
    rows += [
        (part.name, str(part.kernels), str(part.calls), f"{part.total / 1e6:.3f}",
         f"{found.share(part):.1%}", f"{profiles.worth(found, part):.2%}",
         "█" * max(1, round(_room(_BESIDE_BAR, _BAR) * part.total / longest)))
        for part in found.classes
    ]  # fmt: skip
    names = [("calls", "total ms", "share", "longest kernels")]
    names += [
        (str(part.calls), f"{part.total / 1e6:.3f}", f"{found.share(part):.1%}", _short(part.name))
        for part in found.top[:top]
    ]
    counts = f"{found.kernels} kernels, {found.calls} calls, {found.total / 1e6:.3f} ms"
    lines = [
        f"{printable(found.source)}: {counts}",
        table(rows),
        "",
        table(names),
        "",
        stop_here(found),
    ]
    text = "\n".join([*lines, *(f"  note: {printable(note)}" for note in found.notes)])
    return folded(text)


def stop_here(found: Profile) -> str:
    """What is left to gain: the most that a further 10 % of the largest class can give."""
    part = found.classes[0]
    return (
        f"  10 % less of {part.name}, the largest class, is {profiles.worth(found, part):.2%} less"
        " kernel time in all; a run gains no more than that"
    )


def changes_text(before: Profile, after: Profile) -> str:
    rows = [("class", "before ms", "after ms", "change ms", "share before", "after")]
    rows += [
        (row["class"], f"{row['before_ns'] / 1e6:.3f}", f"{row['after_ns'] / 1e6:.3f}",
         f"{row['change_ns'] / 1e6:+.3f}", f"{row['before_share']:.1%}",
         f"{row['after_share']:.1%}")
        for row in profiles.changes(before, after)
    ]  # fmt: skip
    return f"{table(rows)}\n  {profiles.hot_spot(before, after)}"


def _row_text(row: Row) -> str:
    rates = f"{row.base:.3f} -> {row.candidate:.3f} tok/s"
    if row.claim is None:
        lines = [f"{row.bucket}: NOT COMPARABLE ({rates} seen)"]
        return "\n".join([*lines, *(f"  ! {printable(text)}" for text in row.faults)])
    claim = row.claim
    interval = f", {_interval(claim.change)}" if claim.change else ""
    spread = "" if claim.spread is None else f", runs of one side differ by {claim.spread:.2%}"
    pairs = f"{claim.pairs} pair" + "s" * (claim.pairs != 1)
    rests = f"{claim.point:+.2%}{interval}; {pairs}{spread}"
    lines = [
        f"{row.bucket}: {claim.verdict.value}: {rates} ({rests})",
        f"  {claim.why}",
        table(_metric_rows(row)),
        *(f"  note: {printable(note)}" for note in row.notes),
    ]
    return "\n".join(lines)


def _metric_rows(row: Row) -> Sequence[Sequence[str]]:
    rows = [("", "baseline ms", "candidate ms", "change", "95 % interval")]
    for metric in row.metrics:
        change = metric.candidate / metric.base - 1 if metric.base else 0.0
        interval = _interval(metric.change) if metric.change else ""
        rows.append(
            (
                metric.name,
                f"{metric.base:.2f}",
                f"{metric.candidate:.2f}",
                f"{change:+.2%}",
                interval,
            )
        )
    return rows


def _interval(found: Interval) -> str:
    return f"{found.low:+.2%} to {found.high:+.2%}"


def _score_lines(found: Comparison) -> Iterator[str]:
    assert found.score is not None
    rows = [("score", "gain", "points", "of", "")]
    rows += [
        (row.bucket, f"{row.gain:+.4f}", f"{row.points:.4f}", f"{FULL[row.bucket]:g}", row.zeroed)
        for row in found.score.rows
    ]
    yield table(rows)
    if found.score.missing:
        yield f"  not measured: {', '.join(found.score.missing)}; the total is of the rest"
    if seen := [row.bucket for row in found.score.rows if row.bucket in found.unproven]:
        yield f"  of what was seen: the change of {', '.join(seen)} is not shown"
    yield f"  total {found.score.total:.4f}"
    if found.coefficient is not None:
        yield f"  x {found.coefficient:.4f} accuracy = {found.score.final(found.coefficient):.4f}"


def _short(name: str) -> str:
    """A kernel's name; a terminal can spare the middle of a long one, a file cannot."""
    most = _room(_BESIDE_NAME, 72)
    if len(name) <= most or not terminal():
        return name
    return f"{name[: most * 2 // 3]} ... {name[5 - most // 3 :]}"


def _room(beside: int, most: int) -> int:
    """The characters that a terminal has left beside so many; `most` where it is wide, or none."""
    return min(most, max(8, terminal() - beside)) if terminal() else most
