"""The record of one measured run (bench/1), and what speaks against it on its own.

`parse` reads what the target wrote; `faults` says why a bucket of it is no result. Whether two of
them may be compared is decided in `compare`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import BadValues
from deploy.measure import damaged
from deploy.measure import result as results
from deploy.measure.result import Result
from deploy.regular import read_regular

SCHEMA = damaged.SCHEMA
_SIZE_LIMIT = 256 * 2**20  # bytes; the client's lists of ten thousand long answers stay below
CACHED = 0.01  # of the prompt tokens may come from the prefix cache
_COUNTED = "counted"
_SHOWN = 10  # faults of a damaged record


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One call of the client and what was seen around it. `raw` is the record's own row."""

    name: str
    result: Result | None
    raw: Mapping[str, Any]

    @property
    def begun(self) -> float:
        return float(self.raw.get("begun") or 0.0)

    @property
    def servers(self) -> list[tuple[Any, ...]]:
        """Who served, before and after: pid, start and boot."""
        states = [self.raw[key] for key in ("before", "after") if self.raw.get(key)]
        return [(s["pid"], s["start_ticks"], s["boot_id"]) for s in states]

    def gained(self, counter: str) -> float | None:
        """By how much a counter of the server grew; None where it was not read on both sides."""
        counters = self.raw.get("counters") or {}
        sides = [dict(counters.get(key) or {}).get(counter) for key in ("before", "after")]
        return None if None in sides else float(sides[1]) - float(sides[0])  # type: ignore[arg-type]

    @property
    def cached(self) -> float | None:
        """The share of prompt tokens that the prefix cache gave; None when it is not known."""
        hits, asked = (
            self.gained("vllm:prefix_cache_hits"), self.gained("vllm:prefix_cache_queries"),
        )  # fmt: skip
        if hits is None or asked is None:
            return None
        return hits / asked if asked else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One bucket of a run."""

    name: str
    sha256: str
    requests: int
    argv: tuple[str, ...]
    rounds: tuple[Round, ...]

    @property
    def counted(self) -> Round | None:
        found = [one for one in self.rounds if one.name == _COUNTED]
        return found[-1] if found else None

    @property
    def warm(self) -> Round | None:
        return next((one for one in self.rounds if one.name == "warm"), None)

    @property
    def result(self) -> Result | None:
        return self.counted.result if self.counted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: its buckets by name, and the record as it was written."""

    source: str
    buckets: Mapping[str, Bucket]
    raw: Mapping[str, Any]

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(self.raw.get("flags") or ())

    @property
    def started(self) -> float:
        return float(self.raw.get("started") or 0.0)

    @property
    def versions(self) -> dict[str, str]:
        return dict(self.raw.get("versions") or {})


def read(path: Path) -> Run:
    """Return the run of a record, or of a bare result of the client.

    A bare result has no warm round, no process and no flags: it can be shown, never compared.

    Raises:
        BadValues: it is neither.
    """
    try:
        text = read_regular(path, _SIZE_LIMIT)
        raw = json.loads(text)
    except OSError as err:
        raise _no_record(str(path), err.strerror or str(err)) from err
    except (ValueError, RecursionError) as err:
        raise _no_record(str(path), str(err)) from err
    if isinstance(raw, dict) and "schema" in raw:
        return dataclasses.replace(parse(raw, str(path)), source=path.name)
    return _bare(results.parse(text, path.name), path.name)


def parse(raw: Mapping[str, Any], source: str = "the record") -> Run:
    """Build a run from a record's JSON.

    Raises:
        BadValues: it is no whole bench/1 record.
    """
    if wrong := list(damaged.faults(raw)):
        more = f"; and {len(wrong) - _SHOWN} more" if wrong[_SHOWN:] else ""
        raise _no_record(source, "; ".join(wrong[:_SHOWN]) + more)
    buckets = map(_bucket, raw["buckets"])
    return Run(source=source, buckets={row.name: row for row in buckets}, raw=dict(raw))


def faults(run: Run, bucket: Bucket) -> tuple[str, ...]:
    """Say why the counted round of a bucket is no result that others may be held against."""
    return (
        *_rounds(bucket),
        *_as_locked(run, bucket),
        *_process(bucket),
        *_window(bucket),
    )


def _rounds(bucket: Bucket) -> Iterator[str]:
    counted, warm = bucket.counted, bucket.warm
    if counted is None:
        yield "there is no counted round"
        return
    if warm is None:
        yield "the warm round was skipped: this one paid for it, and is an observation only"
    elif warm.begun > counted.begun:
        yield "the warm round came after the counted one"
    elif warm.result is None or results.faults(warm.result):
        yield "the warm round failed: what it should have warmed is cold"
    yield from counted.raw.get("stale") or ()
    if counted.raw.get("exit"):
        yield f"the client ended with {counted.raw['exit']}"
    if counted.result is None:
        if not counted.raw.get("stale"):
            yield "it has no result, and does not say why"
        return
    if not counted.result.detailed:
        yield "it has no lists of requests (--save-detailed)"
    yield from results.faults(counted.result)


def _as_locked(run: Run, bucket: Bucket) -> Iterator[str]:
    """Fewer or other requests than the lock's are an observation, whatever they measure."""
    locked = dict(dict(run.raw.get("locked") or {}).get("buckets") or {}).get(bucket.name)
    if locked is None:
        yield "nothing locks this bucket: it is an observation"
        return
    if bucket.requests != locked["requests"]:
        yield f"{bucket.requests} requests, the lock has {locked['requests']}: an observation"
    if bucket.sha256 != locked["sha256"]:
        yield f"the data set's sha256 is {bucket.sha256}, the lock has {locked['sha256']}"
    found = bucket.result
    if found is not None and found.asked is not None and found.asked != bucket.requests:
        yield f"the result is of {found.asked} requests, {bucket.requests} were to be sent"
    if tuple(dict(run.raw.get("locked") or {}).get("flags") or ()) != run.flags:
        yield "the client's flags are not the locked ones"


def _process(bucket: Bucket) -> Iterator[str]:
    servers = [one for r in bucket.rounds for one in r.servers]
    if bucket.counted is not None and not bucket.counted.servers:
        yield "nothing says which process served it"
    if len(set(servers)) > 1:
        pids = ", ".join(str(pid) for pid, _, _ in dict.fromkeys(servers))
        yield f"the server was started anew between the rounds (pids {pids})"
    seen: dict[str, None] = {}
    for one in bucket.rounds:
        for key in ("before", "after"):
            for fault in dict(one.raw.get(key) or {}).get("faults") or ():
                if not fault["warning"]:
                    seen.setdefault(f"{key} the {one.name} round: {fault['text']}")
    yield from seen


def _window(bucket: Bucket) -> Iterator[str]:
    """What happened while the counted requests were served."""
    counted = bucket.counted
    if counted is None or not counted.servers:
        return
    if counted.raw.get("compiled"):
        first = (counted.raw.get("compiling") or [""])[0]
        yield f"something was compiled inside the counted round: {first}"
    if (
        counted.gained("vllm:prefix_cache_queries") is None
        and counted.gained("vllm:prompt_tokens") is None
    ):
        yield "the server's counters could not be read: nobody knows whose requests it served"
    yield from _served(bucket, counted)
    if preempted := counted.gained("vllm:num_preemptions"):
        yield f"{preempted:.0f} requests were preempted"


def _served(bucket: Bucket, counted: Round) -> Iterator[str]:
    """The server counts each request that it finished, the client's warm-up and probe included."""
    served, ours = counted.gained("vllm:request_success"), sent(bucket)
    if served is None:
        return
    least = bucket.requests if ours is None else ours  # a script may send more, never fewer
    if ours is not None and served > ours:
        yield f"the server finished {served:.0f} requests, {ours} were ours: others measured, too"
    elif served < least:
        yield f"the server finished {served:.0f} requests, {least} were ours: another served them"


def sent(bucket: Bucket) -> int | None:
    """How many requests the client sends in one round, its own warm-up included."""
    if "--num-prompts" not in bucket.argv:
        return None  # the site's script decides
    warmups = _value(bucket.argv, "--num-warmups")
    ready = 1 if int(float(_value(bucket.argv, "--ready-check-timeout-sec") or 0)) else 0
    return bucket.requests + int(warmups or 0) + ready


def _value(argv: Sequence[str], flag: str) -> str:
    for word, following in zip(argv, [*argv[1:], ""]):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return ""


def _bucket(raw: Mapping[str, Any]) -> Bucket:
    return Bucket(
        name=raw["bucket"],
        sha256=raw["sha256"],
        requests=raw["requests"],
        argv=tuple(raw["argv"]),
        rounds=tuple(map(_round, raw["rounds"])),
    )


def _round(raw: Mapping[str, Any]) -> Round:
    found = raw.get("result")
    return Round(name=raw["round"], result=results.of_json(found) if found else None, raw=dict(raw))


def _bare(found: Result, source: str) -> Run:
    counted = Round(name=_COUNTED, result=found, raw={})
    bucket = Bucket(name="all", sha256="", requests=found.asked or 0, argv=(), rounds=(counted,))
    return Run(source=source, buckets={"all": bucket}, raw={})


def _no_record(source: str, why: str) -> BadValues:
    return BadValues(
        f"{source} is no record of a measured run",
        why=why,
        fix="give what `./inv bench.run --follow` or `./inv bench.collect` wrote (bench/1)",
    )
