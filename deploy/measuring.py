"""Measure the locked service of each target: start, follow, collect; judge gates 5, 6 and 7.

The work is the agent's (verb `measure`), detached from whoever asked; here stands in which order
the gates go before it, what its record proves, and where the record is kept.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import flow, gates, serving, submission
from deploy.agent.jobs import WITHOUT_RESULT
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.console import say
from deploy.errors import BadValues, Differs, Refused
from deploy.gates import Gate, Verdict, Visit
from deploy.layout import HERE, Layout
from deploy.manifest import Manifest
from deploy.measure import accuracy, profile, record
from deploy.measure.accuracy import Accuracy
from deploy.measure.compare import Comparison, compare
from deploy.measure.profile import Profile
from deploy.measure.record import Bucket, Run
from deploy.regular import read_regular
from deploy.service import markers
from deploy.service.markers import Dispatch

_ENDED = ("done", *WITHOUT_RESULT)
_TABLE = 64 * 2**20  # bytes; a suite has tens of tasks, a log of it some thousand lines
_BEAT = 2.0  # seconds between two looks at a run that is followed


def start(
    name: str, to: str, kind: str, options: Mapping[str, Any], layout: Layout = HERE
) -> list[Visit]:
    """Verify each target, and start a run where gates 1 to 4 have passed; return at once.

    The visits carry the gates so far. What a run needs beyond them (the process state) the agent
    looks at before and after each round.
    """
    visits = flow.run(name, to, Request(verb=Verb.VERIFY, operator=flow.operator()), layout)
    meaning = submission.load(name, layout).meaning()
    ready = [visit for visit in visits if _fit(visit)]
    done = [v if _fit(v) or v.error else _refused(v) for v in visits if not _fit(v)]
    for visit in ready:
        asked = {"act": "start", "kind": kind, "manifest": meaning, **options}
        [begun] = serving.ask(name, visit.target, Verb.MEASURE, asked, layout=layout)
        done.append(dataclasses.replace(begun, gates=visit.gates))
    order = {visit.target: number for number, visit in enumerate(visits)}
    return sorted(done, key=lambda visit: order[visit.target])


def status(
    name: str, to: str, kind: str, *, stamp: str = "", follow: bool = False,
    record: bool = False, act: str = "status", layout: Layout = HERE,
) -> list[Visit]:  # fmt: skip
    """Ask how far each target's run is; with `follow` pass on its lines until it has ended."""
    options: dict[str, Any] = {"act": act, "kind": kind, "stamp": stamp, "record": record}
    seen: dict[str, int] = {}
    while True:
        asked = {**options, "since": min(seen.values(), default=0)}
        visits = serving.ask(name, to, Verb.MEASURE, asked, layout=layout)
        for visit in visits:
            found = _measured(visit)
            if follow and found:
                _pass_on(visit.target, found, seen)
        if not follow or all(_ended(visit) for visit in visits):
            return visits
        time.sleep(_BEAT)


def collect(
    name: str, to: str, *, stamp: str = "", baseline: str = "", layout: Layout = HERE
) -> list[tuple[Visit, Path]]:
    """Fetch each target's record, judge it, and keep it below ``out/NAME/bench/``.

    A target whose run has not ended, or has left no record, has an error and stops no other.
    """
    visits = status(name, to, "bench", stamp=stamp, record=True, layout=layout)
    found = []
    for visit in visits:
        if visit.error is not None:
            found.append((visit, Path()))
            continue
        told = _measured(visit)
        if told["state"] not in _ENDED or not told.get("record"):
            found.append((dataclasses.replace(visit, error=_nothing_yet(told)), Path()))
            continue
        found.append(_kept(name, visit, told, baseline, layout))
    return found


def collect_accuracy(name: str, to: str, layout: Layout = HERE) -> list[Visit]:
    """Fetch the record of each target's newest accuracy run to ``out/NAME/accuracy-*.json``."""
    visits = status(name, to, "accuracy", record=True, layout=layout)
    for visit in visits:
        told = _measured(visit)
        if told.get("record"):
            path = layout.out_of(submission.load(name, layout).name)
            path.mkdir(parents=True, exist_ok=True)
            text = json.dumps(told["record"], sort_keys=True) + "\n"
            (path / f"accuracy-{_slug(visit.target)}.json").write_text(text, encoding="utf-8")
    return visits


def judge(
    manifest: Manifest,
    run: Run,
    earlier: Sequence[Gate] = (),
    base: Run | None = None,
    plan: str = "",
) -> tuple[Gate, ...]:
    """Return all seven gates: 1 to 4 as they were judged before, 5 to 7 from the record.

    `plan` is the one that 1 to 4 were judged by.
    """
    found = [gate for gate in earlier if gate.number < 5]
    found += [clean(run, plan), *dispatched(manifest, run), *comparable(run, base)]
    waived = {int(n): why for n, why in manifest.gates.not_applicable.items()}
    reached = {gate.number for gate in found}
    until = (
        "no baseline was named: the run itself is valid"
        if 6 in reached
        else "the manifest names no marker (dispatch:)"
    )
    return gates.in_order(found, waived, until)


def clean(run: Run, plan: str = "") -> Gate:
    """Gate 5: one process served every round, of the plan that is there; nothing ran beside it."""
    texts, servers = [], set()
    if plan and run.raw.get("plan") != plan:
        texts.append(f"the run is of plan {run.raw.get('plan')}, the target now holds {plan}")
    for bucket in run.buckets.values():
        texts += [text for text in record.faults(run, bucket) if _of_process(text)]
        servers |= {one for r in bucket.rounds for one in r.servers}
    rounds = sum(len(bucket.rounds) for bucket in run.buckets.values())
    pids = ", ".join(str(pid) for pid, _, _ in sorted(servers, key=str))
    proofs = [f"pid {pids} served all {rounds} rounds, looked at before and after each"]
    if not servers:
        texts.append("nothing says which process served")
    return _gate(5, proofs, texts)


def dispatched(manifest: Manifest, run: Run) -> Iterator[Gate]:
    """Gate 6: the markers of this process, inside each round, as the chunk plan predicts them."""
    if manifest.dispatch is None:
        return
    proofs, texts = [], []
    for bucket in run.buckets.values():
        for one in bucket.rounds:
            found = _dispatch(manifest, bucket, one)
            where = f"{bucket.name}, {one.name} round"
            proofs += [f"{where}: {text}" for text in found.proofs]
            proofs += [f"{where}: not observable: {text}" for text in found.blind]
            texts += [f"{where}: {text}" for text in found.faults]
    yield _gate(6, proofs, texts)


def comparable(run: Run, base: Run | None) -> Iterator[Gate]:
    """Gate 7: the result is one, and equals the baseline in all that must be equal."""
    own = [f"{b.name}: {text}" for b in run.buckets.values() for text in record.faults(run, b)]
    if base is None:
        if own:
            yield _gate(7, [], own)
        return
    yield equal(compare([base], [run]))


def equal(found: Comparison) -> Gate:
    """Gate 7 of a comparison: every bucket of both sides may be compared."""
    proofs = [
        f"{row.bucket}: {row.requests} requests, lengths, data set, model and flags are the"
        f" baseline's; {row.base:.3f} and {row.candidate:.3f} tok/s"
        for row in found.rows
        if row.comparable
    ]
    return _gate(7, proofs, [f"{row.bucket}: {text}" for row in found.rows for text in row.faults])


def compared(
    base: Sequence[Path], candidate: Sequence[Path], coefficient: float | None = None
) -> Comparison:
    """Read the records of both sides and hold them against each other."""
    return compare(
        [record.read(path) for path in base], [record.read(path) for path in candidate], coefficient
    )


def scores(path: Path) -> dict[str, float]:
    """Read accuracy by task: a record of ours (accuracy-run/1), or a table of the suite.

    Raises:
        BadValues: it holds no scores.
    """
    try:
        text = read_regular(path, _TABLE).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as err:
        raise BadValues(f"cannot read {path}", why=str(err), fix="name a text file") from err
    if text.lstrip().startswith("{"):
        try:
            raw = json.loads(text)
        except ValueError:
            raw = {}
        if isinstance(raw, dict) and raw.get("schema") == "accuracy-run/1":
            return accuracy.of_record(raw)
    return accuracy.parse(text, path.name)


def accuracies(
    base: str, candidate: str, flags: tuple[str, str] = ("--base", "--candidate")
) -> Accuracy:
    """Hold the accuracy of one run against that of another; each is one file.

    Raises:
        BadValues: a side is not given, or names several files, or holds no scores.
    """
    sides = dict(zip(flags, (base, candidate)))
    if not (base.strip() and candidate.strip()):
        told = ", ".join(f"{flag} is {text.strip() or 'not given'}" for flag, text in sides.items())
        raise BadValues("there is nothing to compare", why=told, fix="give both sides")
    for flag, text in sides.items():
        if len(paths(text)) != 1:
            raise BadValues(
                "the accuracy of more than two runs cannot be compared",
                why=f"{flag} names {len(paths(text))} files: {text}",
                fix="give one table, or one record, of each side",
            )
    return accuracy.compare(*(scores(paths(text)[0]) for text in sides.values()))


def factor(base: str, candidate: str) -> float | None:
    """Return what the score is multiplied by; None where no accuracy was named.

    Raises:
        BadValues: a side is not given, or names several files, or holds no scores.
        Differs: an official task is missing.
    """
    if not (base or candidate):
        return None
    found = accuracies(base, candidate, ("--accuracy-base", "--accuracy-candidate"))
    if found.factor is None:
        raise Differs(
            "the accuracy gives no factor",
            why=f"both sides need {', '.join(found.missing)}",
            fix="run the whole suite, and give its tables",
        )
    return found.factor


def profiles(
    name: str, file: str, before: str = "", layout: Layout = HERE
) -> tuple[Profile, Profile | None]:
    """Sum up one profile, and another to hold it against, by the classes of a manifest.

    Raises:
        BadValues: no file was named, or the manifest has no classes.
    """
    if not file:
        raise BadValues(
            "there is no profile to sum up",
            why="--file is not given",
            fix="give the profiler's *.hipkernel.csv, or its *.db",
        )
    manifest = submission.load(name, layout)
    patterns = manifest.profile.classes if manifest.profile is not None else {}
    found = profile.summary(Path(file), patterns)
    return found, profile.summary(Path(before), patterns) if before else None


def profile_words(name: str, buckets: str, layout: Layout = HERE) -> list[str]:
    """Return the command that profile.sh records; none for its own default.

    Raises:
        BadValues: a bucket that the manifest does not have, or no profile section.
    """
    manifest = submission.load(name, layout)
    if manifest.profile is None or manifest.bench is None or manifest.launch is None:
        raise BadValues(
            f"{manifest.name} cannot be profiled",
            why="its manifest needs profile:, bench: and launch:",
            fix=f"add what is missing to manifests/{manifest.name}.yaml, and lock it",
        )
    wanted = [part.strip() for part in buckets.split(",") if part.strip()]
    if unknown := [bucket for bucket in wanted if bucket not in manifest.bench.buckets]:
        raise BadValues(
            f"there is no bucket {', '.join(unknown)}",
            why=f"the manifest has {', '.join(manifest.bench.buckets)}",
            fix="name one of these",
        )
    # From launch.dir, wherever a host has it: profile.sh is run there.
    return ["sh", "./run_throughput.sh", *wanted] if wanted else []


def paths(text: str) -> list[Path]:
    """Split a comma list of files."""
    return [Path(part.strip()) for part in text.split(",") if part.strip()]


def _fit(visit: Visit) -> bool:
    return (
        visit.error is None
        and bool(visit.gates)
        and not any(gate.number < 5 and gate.verdict is Verdict.FAILED for gate in visit.gates)
    )


def _refused(visit: Visit) -> Visit:
    failed = [gate for gate in visit.gates if gate.verdict is Verdict.FAILED]
    why = "; ".join(f"gate {g.number} failed: {', '.join(g.faults[:2])}" for g in failed)
    error = Refused(
        "nothing is measured", why=why or "verify gave no gates", fix="deploy, and verify again"
    )
    return dataclasses.replace(visit, error=error)


def _measured(visit: Visit) -> dict[str, Any]:
    raw = visit.evidence.raw if visit.evidence is not None else {}
    return dict(raw.get("measure") or {})


def _ended(visit: Visit) -> bool:
    found = _measured(visit)
    return visit.error is not None or not found or found["state"] in _ENDED


def _pass_on(target: str, found: Mapping[str, Any], seen: dict[str, int]) -> None:
    """Show each line once. Targets are asked from the least place that one of them has reached."""
    at, reached = int(found["at"]), seen.get(target, 0)
    if at <= reached:
        return
    size = 0
    for line in reversed(found["lines"]):
        size += len(str(line).encode()) + 1
    begin = at - size
    for line in found["lines"]:
        begin += len(str(line).encode()) + 1
        if begin > reached:
            say(f"{target}: {line}")
    seen[target] = at


def _nothing_yet(told: Mapping[str, Any]) -> Differs:
    why = f"the run {told['stamp']} is {told['state']}"
    if told["error"]:
        why += f": {told['error']['what']}; {told['error']['why']}"
    return Differs(
        "there is no record to collect",
        why=why,
        fix="follow it with `./inv bench.status --follow`, or read its job.log",
    )


def _kept(
    name: str, visit: Visit, told: Mapping[str, Any], baseline: str, layout: Layout
) -> tuple[Visit, Path]:
    manifest = submission.load(name, layout)
    run = record.parse(told["record"], told["stamp"])
    base = record.read(Path(baseline)) if baseline else None
    [verified] = flow.run(
        name, visit.target, Request(verb=Verb.VERIFY, operator=flow.operator()), layout
    )
    plan = str(verified.evidence.raw.get("plan", "")) if verified.evidence else ""
    judged = judge(manifest, run, verified.gates, base, plan)
    path = layout.out_of(manifest.name) / "bench" / f"{_slug(visit.target)}-{told['stamp']}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        **told["record"],
        "target": visit.target,
        "state": told["state"],
        "error": told["error"],
        "gates": [gate.to_json() for gate in judged],
    }
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(document, sort_keys=True) + "\n", encoding="utf-8")
    beside.replace(path)
    return dataclasses.replace(visit, gates=judged), path


def _slug(target: str) -> str:
    return "".join(c if c.isalnum() or c in "-._" else "-" for c in target)


def _of_process(text: str) -> bool:
    return text.startswith(("before the ", "after the ", "the server was started anew"))


def _dispatch(manifest: Manifest, bucket: Bucket, one: record.Round) -> Dispatch:
    scan = one.raw.get("markers")
    if not scan:
        return Dispatch(faults=("no log of the server was read",))
    lengths = prompt_lengths(bucket, one)
    assert manifest.dispatch is not None
    by_chunk = any(marker.shape == "chunks" for marker in manifest.dispatch.markers)
    if by_chunk and not lengths:
        return Dispatch(faults=("the prompts' lengths on the server are not known",))
    wanted = [w for n in sorted(lengths or {1}) for w in serving.needed(manifest, n)]
    eager = manifest.launch is not None and "--enforce-eager" in manifest.launch.serve
    return markers.judge(scan, list(dict.fromkeys(wanted)), scan["pids"], eager=eager)


def prompt_lengths(bucket: Bucket, one: record.Round) -> set[int]:
    """Return the prompts' lengths as the server counted them.

    The client counts the text that it sends; the chat template of the server adds the same number
    of tokens to each. How many follows from the server's own counter; where that leaves no whole
    number, somebody else's requests are in it and nothing is known.
    """
    found = one.result
    total = one.gained("vllm:prompt_tokens")
    if found is None or not found.input_lens or total is None:
        return set()
    sent = record.sent(bucket)
    extra = (sent or len(found.input_lens)) - len(found.input_lens)
    rest = total - sum(found.input_lens) - extra * found.input_lens[0]
    each, left = divmod(rest, len(found.input_lens) + extra)
    if left or each < 0:
        return set()
    return {length + int(each) for length in found.input_lens}


def _gate(number: int, proofs: Sequence[str], faults: Sequence[str]) -> Gate:
    verdict = Verdict.FAILED if faults or not proofs else Verdict.PASSED
    return Gate(number=number, verdict=verdict, proofs=tuple(proofs), faults=tuple(faults))
