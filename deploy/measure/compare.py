"""May two sides be compared, and what do their numbers prove? Gate 7 rests on this.

A side is one run or several. First everything that makes a number mean something else is held
against the first baseline run; only where nothing differs are throughput and latencies judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.agent.texts import parts_at
from deploy.errors import BadValues
from deploy.measure import record, score, stats
from deploy.measure.record import CACHED, Bucket, Run
from deploy.measure.result import Result
from deploy.measure.score import Score, Side
from deploy.measure.stats import Claim, Interval

# Words behind which a value stands that may differ: where files are, and where the server listens.
_PLACES = ("--result-dir", "--dataset-path", "--tokenizer", "--port", "--host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One latency of both sides in milliseconds, and by how much it changed (0.1: 10 % longer)."""

    name: str
    base: float
    candidate: float
    change: Interval | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "base_ms": self.base,
            "candidate_ms": self.candidate,
            "change": self.change.to_json() if self.change else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One bucket: why it is not comparable, or what it shows."""

    bucket: str
    faults: tuple[str, ...]
    notes: tuple[str, ...] = ()
    base: float = 0.0  # tokens a second, the mean of the side's runs
    candidate: float = 0.0
    requests: int = 0
    claim: Claim | None = None
    metrics: tuple[Metric, ...] = ()

    @property
    def comparable(self) -> bool:
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        return {
            "bucket": self.bucket,
            "comparable": self.comparable,
            "faults": list(self.faults),
            "notes": list(self.notes),
            "base_tok_s": self.base,
            "candidate_tok_s": self.candidate,
            "requests": self.requests,
            "claim": self.claim.to_json() if self.claim else None,
            "metrics": [metric.to_json() for metric in self.metrics],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All buckets of either side. `score` is None unless an official bucket is comparable."""

    rows: tuple[Row, ...]
    base: tuple[str, ...]
    candidate: tuple[str, ...]
    score: Score | None = None
    coefficient: float | None = None

    @property
    def comparable(self) -> bool:
        return bool(self.rows) and all(row.comparable for row in self.rows)

    @property
    def unproven(self) -> tuple[str, ...]:
        """Buckets whose gain or loss is not shown: a score of them is of what was seen."""
        proven = ("gain", "loss")
        return tuple(
            r.bucket for r in self.rows if not (r.claim and r.claim.verdict.value in proven)
        )

    @property
    def regressions(self) -> tuple[str, ...]:
        """Buckets that are slower, or may be: whatever the others gained."""
        return tuple(r.bucket for r in self.rows if r.claim and r.claim.verdict.regression)

    def to_json(self) -> dict[str, Any]:
        scored = self.score.to_json() if self.score else None
        if scored is not None and self.score is not None and self.coefficient is not None:
            scored["coefficient"] = self.coefficient
            scored["final"] = self.score.final(self.coefficient)
        return {
            "schema": "comparison/1",
            "comparable": self.comparable,
            "regressions": list(self.regressions),
            "unproven": list(self.unproven),
            "base": list(self.base),
            "candidate": list(self.candidate),
            "buckets": [row.to_json() for row in self.rows],
            "score": scored,
        }


def compare(
    base: Sequence[Run], candidate: Sequence[Run], coefficient: float | None = None
) -> Comparison:
    """Hold a candidate's runs against a baseline's, bucket by bucket.

    Raises:
        BadValues: the sides have no bucket in common, or an unequal number of runs.
    """
    if not base or len(base) != len(candidate):
        raise BadValues(
            "these runs cannot be paired",
            why=f"the baseline has {len(base)} runs, the candidate {len(candidate)}",
            fix="give as many of the one as of the other, made in turns",
        )
    sides = [
        list(dict.fromkeys(name for run in runs for name in run.buckets))
        for runs in (base, candidate)
    ]
    if not set(sides[0]) & set(sides[1]):
        raise BadValues(
            "there is nothing to compare",
            why=f"the baseline measured {', '.join(sides[0]) or 'nothing'}, the candidate"
            f" {', '.join(sides[1]) or 'nothing'}",
            fix="measure the same buckets on both sides",
        )
    # A bucket of one side alone is a row, too: what was not measured again may be what got slower.
    rows = tuple(_row(name, base, candidate) for name in dict.fromkeys([*sides[0], *sides[1]]))
    return Comparison(
        rows=rows,
        base=tuple(run.source for run in base),
        candidate=tuple(run.source for run in candidate),
        score=_score(rows, base, candidate),
        coefficient=coefficient,
    )


def differences(base: tuple[Run, Bucket], other: tuple[Run, Bucket]) -> tuple[str, ...]:
    """Say what of two counted rounds is not the same although it must be."""
    (run, bucket), (run_b, bucket_b) = base, other
    found, found_b = bucket.result, bucket_b.result
    said = [
        *_unequal("the data set", bucket.sha256, bucket_b.sha256),
        *_unequal("the number of requests", bucket.requests, bucket_b.requests),
        *_unequal("flags", " ".join(run.flags), " ".join(run_b.flags)),
        *_unequal("the client's words", _words(bucket.argv), _words(bucket_b.argv)),
    ]
    if found is not None and found_b is not None:
        said += _unequal("the model", found.model, found_b.model)
        said += result_differences(found, found_b)
        if any(text.startswith("input") for text in said):
            said.append(f"versions: {_versions(run)} and {_versions(run_b)}")
    return (*said, *_cache(bucket, bucket_b))


def result_differences(base: Result, other: Result) -> list[str]:
    """Lengths of two results; the lists decide where both have them, else the totals."""
    return [
        *_lengths("input", base.input_lens, other.input_lens, base.total_input, other.total_input),
        *_lengths(
            "output", base.output_lens, other.output_lens, base.total_output, other.total_output
        ),
    ]


def text_notes(base: Result, other: Result) -> list[str]:
    """Say how many texts differ and from where; at temperature 0 none should."""
    if base.texts is None or other.texts is None:
        return ["the texts of one side are not known: nothing says that they are the same"]
    pairs = list(zip(base.texts, other.texts))
    parted = [(n, parts_at(one, two)) for n, (one, two) in enumerate(pairs, 1)]
    found = [(n, at) for n, at in parted if at is not None]
    if not found:
        return []
    number, word = min(found, key=lambda row: row[1])
    words = max(1, int(pairs[number - 1][0]["words"]))
    tokens = (base.output_lens or ())[number - 1 : number]
    about = f", about token {round(word / words * tokens[0]) + 1} of {tokens[0]}" if tokens else ""
    text = f"{len(found)} of {len(pairs)} texts differ; the earliest is request {number}"
    text += f" from word {word + 1} on{about}: whether they are as good, the accuracy suite says"
    return [text]


def _row(name: str, base: Sequence[Run], candidate: Sequence[Run]) -> Row:
    said: list[str] = []
    found: list[list[tuple[Run, Bucket]]] = []
    for side, runs in (("baseline", base), ("candidate", candidate)):
        rows = [(run, run.buckets[name]) for run in runs if name in run.buckets]
        if len(rows) < len(runs):
            many = f"{len(runs) - len(rows)} of {len(runs)} runs lack" if rows else "it lacks"
            said.append(f"{side}: {many} this bucket")
        for number, (run, bucket) in enumerate(rows, 1):
            which = side if len(runs) == 1 else f"{side} {number}"
            said += [f"{which}: {text}" for text in record.faults(run, bucket)]
        found.append(rows)
    for number, other in enumerate(row for rows in found for row in rows):
        if number and found[0]:
            said += [text for text in differences(found[0][0], other) if text not in said]
    if said:
        return Row(bucket=name, faults=tuple(said), **_rates(found))
    return _judged(name, found[0], found[1])


def _judged(
    name: str, base: Sequence[tuple[Run, Bucket]], candidate: Sequence[tuple[Run, Bucket]]
) -> Row:
    ours = [bucket.result for _, bucket in base if bucket.result]
    theirs = [bucket.result for _, bucket in candidate if bucket.result]
    rates = [one.throughput for one in ours], [one.throughput for one in theirs]
    starts = [
        (f"{bucket.counted.begun:020.6f}", side)
        for side, rows in (("a", base), ("b", candidate))
        for _, bucket in rows
        if bucket.counted
    ]
    claim = stats.claim(*rates, interleaved=stats.turns(starts))
    notes = text_notes(ours[0], theirs[0])
    latencies = _paired([one.latencies for one in ours], [one.latencies for one in theirs])
    wanted = stats.needed([a for a, _ in latencies], [b for _, b in latencies])
    if claim.pairs == 1 and wanted is not None and wanted > len(latencies):
        notes.append(f"{len(latencies)} requests are too few for this claim ({wanted} would do)")
    return Row(
        bucket=name, faults=(), notes=tuple(notes), claim=claim, requests=len(latencies),
        metrics=tuple(_metrics(ours, theirs, latencies)), **_rates([base, candidate]),
    )  # fmt: skip


def _rates(sides: Sequence[Sequence[tuple[Run, Bucket]]]) -> dict[str, Any]:
    rates = []
    for rows in sides:
        found = [bucket.result.throughput for _, bucket in rows if bucket.result]
        rates.append(sum(found) / len(found) if found else 0.0)
    return {"base": rates[0], "candidate": rates[1]}


def _metrics(
    ours: Sequence[Result], theirs: Sequence[Result], latencies: Sequence[tuple[float, float]]
) -> Iterator[Metric]:
    ttfts = _paired([one.ttfts or () for one in ours], [one.ttfts or () for one in theirs])
    tpots = _paired([one.tpots for one in ours], [one.tpots for one in theirs])
    for what, pairs in (("TTFT", ttfts), ("TPOT", tpots), ("latency", latencies)):
        if not pairs:
            continue
        base, candidate = [a for a, _ in pairs], [b for _, b in pairs]
        yield Metric(
            name=f"{what} median",
            base=1000 * stats.percentile(base, 50),
            candidate=1000 * stats.percentile(candidate, 50),
            change=stats.bootstrap(pairs, stats.median_change) if len(pairs) > 1 else None,
        )
        yield Metric(
            name=f"{what} {stats.p99_name(len(pairs))}",
            base=1000 * stats.percentile(base, 99),
            candidate=1000 * stats.percentile(candidate, 99),
        )


def _paired(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]
) -> list[tuple[float, float]]:
    """Pair request by request; of several runs the mean of each request."""
    if len({len(values) for values in (*ours, *theirs)}) != 1:
        return []
    sides = [[sum(v) / len(v) for v in zip(*side)] for side in (ours, theirs)]
    return list(zip(*sides))


def _score(rows: Sequence[Row], base: Sequence[Run], candidate: Sequence[Run]) -> Score | None:
    names = [row.bucket for row in rows if row.comparable and row.bucket in score.FULL]
    if not names:
        return None
    return score.score(_sides(names, base), _sides(names, candidate))


def _sides(names: Sequence[str], runs: Sequence[Run]) -> dict[str, Side]:
    found = {}
    for name in names:
        results = [run.buckets[name].result for run in runs]
        there = [one for one in results if one is not None]
        found[name] = Side(
            throughput=sum(one.throughput for one in there) / len(there),
            ttfts=tuple(t for one in there for t in one.ttfts or ()),
            tpots=tuple(t for one in there for t in one.tpots),
            asked=sum(one.asked or 0 for one in there),
            completed=sum(one.completed or 0 for one in there),
        )
    return found


def _unequal(what: str, one: Any, other: Any) -> list[str]:
    return [] if one == other else [f"{what}: {one!r} and {other!r}"]


def _lengths(
    what: str,
    one: Sequence[int] | None,
    other: Sequence[int] | None,
    total: int | None,
    total_b: int | None,
) -> Iterator[str]:
    if one is not None and other is not None:
        if one == other:
            return
        if sorted(one) == sorted(other):
            yield f"{what} lengths are the same in another order: the requests were shuffled"
            return
        unlike = sum(a != b for a, b in zip(one, other)) + abs(len(one) - len(other))
        yield (
            f"{what} lengths of {unlike} requests differ: {list(one)[:12]} and {list(other)[:12]},"
            f" in all {sum(one)} and {sum(other)}"
        )
    elif total is not None and total_b is not None and total != total_b:
        yield f"{what} tokens in all: {total} and {total_b}"


def _words(argv: Sequence[str]) -> str:
    kept = [w for before, w in zip(["", *argv], argv) if before not in _PLACES]
    return " ".join(word for word in kept if not word.startswith(tuple(f"{p}=" for p in _PLACES)))


def _versions(run: Run) -> str:
    return ", ".join(f"{k} {v}" for k, v in sorted(run.versions.items())) or "not known"


def _cache(one: Bucket, other: Bucket) -> Iterator[str]:
    """The second of two equal runs may measure the prefix cache; one policy for both sides."""
    shares = [bucket.counted.cached if bucket.counted else None for bucket in (one, other)]
    known = [share for share in shares if share is not None]
    if len(known) == 2 and (known[0] > CACHED) != (known[1] > CACHED):
        yield (
            f"the prefix cache gave {known[0]:.0%} of the prompt tokens to one side and"
            f" {known[1]:.0%} to the other"
        )
