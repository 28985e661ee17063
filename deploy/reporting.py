"""Gather the evidence of a submission and write it as JSON, Markdown and one HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy import flow, gates, measuring, page, report, serving, submission
from deploy.agent.words import Verb
from deploy.console import say
from deploy.errors import BadValues, Differs
from deploy.gates import Gate, Verdict
from deploy.layout import HERE, Layout
from deploy.lock import read_lock
from deploy.manifest import Manifest
from deploy.measure import record
from deploy.measure.compare import Comparison, compare
from deploy.measure.record import Run

_MEASURED = 5  # the first gate that a measured run is judged by


def write(
    name: str,
    *,
    to: str = "",
    run: str = "",
    base: str = "",
    profile: str = "",
    before: str = "",
    accuracy_base: str = "",
    accuracy_candidate: str = "",
    out: str = "",
    layout: Layout = HERE,
) -> tuple[dict[str, Any], list[Path]]:
    """Write ``report.json``, ``.md`` and ``.html`` below `out` (``out/NAME/``); return all of it.

    Those of a target that was named are ``report-TARGET.*``, as its evidence is.
    `run` and `base` are comma lists of records; without `run` the newest collected one is taken
    that is of the locked plan and of the target that the evidence is of; what is left out is said.
    Nothing is asked of a target: what verify and bench.collect left is shown.

    Raises:
        BadValues: a file that was named is not what it should be.
        Differs: the evidence or a run that was named speaks of a work tree, of another plan than
            the locked one, or the two of different targets.
    """
    manifest = submission.load(name, layout)
    named = [record.read(path) for path in measuring.paths(run)]
    identities = _identities(manifest, layout)
    evidence = _evidence(manifest, to or _target_of(named, manifest, layout), layout)
    if evidence is not None:
        _require_locked(manifest, identities, evidence)
    for one in named:
        _require_of(one, manifest, identities, evidence)
    found_run, left_out = (None, []) if named else _newest(manifest, identities, evidence, layout)
    runs = named or ([found_run] if found_run else [])
    bases = [record.read(path) for path in measuring.paths(base)]
    if bases and not runs:
        raise BadValues(
            "there is no run to hold the baseline against",
            why=f"--run names none, and {layout.out_of(manifest.name) / 'bench'} holds none"
            + "".join(f"\n    left out: {text}" for text in left_out),
            fix="measure and fetch one (`./inv bench.run --follow`), or leave --base out",
        )
    after, older = measuring.profiles(name, profile, before, layout) if profile else (None, None)
    comparison = _comparison(runs, bases, accuracy_base, accuracy_candidate)
    for text in left_out:
        say(f"left out: {text}")
    found = page.document(
        name=manifest.name,
        identities=identities,
        evidence=evidence,
        environment=environment(manifest),
        gates=[gate.to_json() for gate in judged(evidence, runs[-1] if runs else None, comparison)],
        run=runs[-1] if runs else None,
        left_out=left_out,
        comparison=comparison,
        profile=after,
        before=older,
    )
    folder = Path(out) if out else layout.out_of(manifest.name)
    own = flow.suffix(layout.out_of(manifest.name), to) if to else ""
    return found, _files(folder, f"report{own}", found)


def environment(manifest: Manifest) -> list[dict[str, str]]:
    """Return the list that a submission must carry: name, value and reason of each variable."""
    launch = manifest.launch
    if launch is None:
        return []
    return [{"name": k, "value": v.value, "why": v.why} for k, v in sorted(launch.env.items())]


def _comparison(
    runs: list[Run], bases: list[Run], accuracy_base: str, accuracy_candidate: str
) -> Comparison | None:
    factor = measuring.factor(accuracy_base, accuracy_candidate)
    if not runs or not bases:
        if factor is not None:
            raise BadValues(
                "there is no score that the accuracy could count in",
                why="--base is not given: nothing is compared",
                fix="give --base and, where it is not the newest, --run",
            )
        return None
    return compare(bases, runs, factor)


def judged(
    evidence: Mapping[str, Any] | None, run: Run | None, comparison: Comparison | None = None
) -> tuple[Gate, ...]:
    """Return the gates of a verify, 5 to 7 as a run was judged by them where there is one.

    A run's own gates 1 to 4 are of the moment when it was collected: the last verify decides. It
    also stops what a run has passed, as it must: nothing is proven behind a gate that failed, nor
    where nothing was verified, or was restored since. Gate 7 is that of the baseline named here.
    """
    rows = (evidence or {}).get("gates") or ()
    known = {gate.number: gate for gate in map(gates.of_json, rows)}
    if not known:
        return ()
    own = [gates.of_json(row) for row in (run.raw.get("gates") if run else None) or ()]
    for gate in own:  # what is not applicable, the manifest says to the verify
        if gate.number >= _MEASURED and gate.verdict is not Verdict.NOT_APPLICABLE:
            known[gate.number] = gate
    if comparison is not None:
        known[7] = measuring.equal(comparison)
    waived = {n: g.reason for n, g in known.items() if g.verdict is Verdict.NOT_APPLICABLE}
    found = [g for g in known.values() if g.verdict in (Verdict.PASSED, Verdict.FAILED)]
    first = min(gates.NAMES.keys() - waived.keys() - {gate.number for gate in found}, default=0)
    return gates.in_order(found, waived, known[first].reason if first in known else "")


def _newest(
    manifest: Manifest,
    identities: Mapping[str, str],
    evidence: Mapping[str, Any] | None,
    layout: Layout,
) -> tuple[Run | None, list[str]]:
    """The newest collected run that belongs here, and why those newer than it do not."""
    left_out: list[str] = []
    found = (layout.out_of(manifest.name) / "bench").glob("*.json")
    for path in sorted(found, key=lambda one: (one.stat().st_mtime_ns, one.name), reverse=True):
        try:
            run = record.read(path)
        except BadValues as err:
            if not left_out:
                raise  # the newest is what is meant
            left_out.append(f"{path.name}: {err.why}")
            continue
        why = _of_other(run, identities, evidence)
        if not why:
            return run, left_out
        left_out.append(f"{run.source}: {why}")
    return None, left_out


def _of_other(run: Run, identities: Mapping[str, str], evidence: Mapping[str, Any] | None) -> str:
    """Say why a run does not belong to this lock and evidence; nothing when it does."""
    told = evidence or {}
    plan = identities.get("plan") or told.get("plan")
    if plan and run.raw.get("plan") != plan:
        of = run.raw.get("plan") or "a plan that it does not tell"
        return (
            f"the run is of {of}, {'the lock pins' if identities else 'the evidence is of'} {plan}"
        )
    # Flags of the service and of the client are inputs, and no part of the plan.
    inputs, locked = run.raw.get("inputs"), identities.get("inputs")
    if inputs and locked and inputs != locked:
        return f"the run is of the inputs {inputs}, the lock pins {locked}"
    target = run.raw.get("target")
    # Before it is collected a record knows no target, and has no gates.
    if told and (target or run.raw.get("gates")) and target != told.get("target"):
        of = target or "a target that it does not tell"
        return f"the run is of {of}, the evidence of {told.get('target')}"
    return ""


def _require_of(
    run: Run,
    manifest: Manifest,
    identities: Mapping[str, str],
    evidence: Mapping[str, Any] | None,
) -> None:
    """Raise Differs for a run that was named and is of another plan or target."""
    if not run.raw:
        return  # a bare result of the client: it has no gates, and equals nothing
    if why := _of_other(run, identities, evidence):
        raise Differs(
            f"{run.source} is no run of this submission",
            why=why,
            fix=f"name a run of what is locked and verified (`./inv bench.run -n {manifest.name}"
            " --follow`), with -t where it has several targets",
        )


def _target_of(runs: list[Run], manifest: Manifest, layout: Layout) -> str:
    """The target of the runs that were named, where it was verified: evidence of it is meant."""
    target = str(runs[-1].raw.get("target") or "") if runs else ""
    kept = _evidence_files(manifest, layout) if target else ()
    return target if any(raw.get("target") == target for _, raw in kept) else ""


def _identities(manifest: Manifest, layout: Layout) -> dict[str, str]:
    path = layout.lock(manifest.name)
    if not path.exists():
        return {}
    pinned = read_lock(path)
    links = {key: str(value) for key, value in sorted(pinned.expect.items())}
    inputs = pinned.inputs
    return {
        "base": str(inputs.get("base", "")),
        "head": str(inputs.get("head", "")),
        "inputs": pinned.digest,
        **links,
    }


def _evidence(manifest: Manifest, to: str, layout: Layout) -> dict[str, Any] | None:
    """What the last verify of a target left, and its service since; without `to` the newest."""
    out = layout.out_of(manifest.name)
    for path, raw in _evidence_files(manifest, layout):
        if to in ("", raw.get("target")):
            if _undone(raw):
                return {**raw, "gates": []}
            later = serving.kept(path, raw)
            if later:
                raw["gates"] = [g.to_json() for g in gates.continued(raw.get("gates") or (), later)]
            return raw
    if to:
        raise BadValues(
            f"there is no evidence of {to}",
            why=f"{out} holds none",
            fix=f"run `./inv verify -n {manifest.name} -t {to}`",
        )
    return None


def _evidence_files(manifest: Manifest, layout: Layout) -> Iterator[tuple[Path, dict[str, Any]]]:
    """What was kept of each target, the newest first."""
    found = layout.out_of(manifest.name).glob("evidence*.json")
    for path in sorted(found, key=lambda one: one.stat().st_mtime_ns, reverse=True):
        try:
            raw = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as err:
            raise BadValues(
                f"cannot read {path}", why=str(err), fix="verify again, which writes it anew"
            ) from err
        if isinstance(raw, dict):
            yield path, raw


def _undone(evidence: Mapping[str, Any]) -> bool:
    return evidence.get("verb") == Verb.RESTORE.value


def _require_locked(
    manifest: Manifest, identities: Mapping[str, str], evidence: Mapping[str, Any]
) -> None:
    """Raise Differs when a report would show a proof beside a lock that it is not of."""
    if _undone(evidence):
        return  # it proves nothing, of whatever plan
    target, locked = evidence.get("target", ""), identities.get("plan", "")
    here = f"-n {manifest.name} -t {target}"
    if evidence.get("worktree"):
        raise Differs(
            f"the evidence of {target} is of the work tree",
            why="`--worktree` deployed files that are not committed and not locked",
            fix=f"commit, lock, and deploy what was locked: `./inv deploy {here}`",
        )
    if locked and evidence.get("plan") != locked:
        raise Differs(
            f"the evidence of {target} is of another plan than the locked one",
            why=f"it speaks of {evidence.get('plan')}, the lock pins {locked}",
            fix=f"deploy what was locked, which verifies it: `./inv deploy {here}`",
        )


def _files(folder: Path, stem: str, found: dict[str, Any]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        f"{stem}.json": report.as_json(found) + "\n",
        f"{stem}.md": page.markdown(found),
        f"{stem}.html": page.html(found),
    }
    paths = []
    for name, text in texts.items():
        beside = folder / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(folder / name)
        paths.append(folder / name)
    return paths


__all__ = ["environment", "write"]
