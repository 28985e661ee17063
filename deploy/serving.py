"""Start, look at, prove and stop the locked service of each target; judge gates 5 and 6.

The work is the agent's and the rendered scripts'; here stands what a call of theirs has to carry,
and what its evidence proves.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import flow, gates, report, scripts, submission
from deploy.agent.launch import Launch
from deploy.agent.words import Verb
from deploy.bundle import Bundle
from deploy.carriers import Request
from deploy.errors import BadValues
from deploy.gates import Gate, Verdict, Visit
from deploy.layout import HERE, Layout
from deploy.manifest import Manifest, Variable
from deploy.service import markers
from deploy.service.chunks import Chunk, chunks, settings
from deploy.submission import Submission

_DIAG = "VLLM_DCU_KERNEL_DIAG"
_SCHEMA = "serve/1"
_TWIN = "on a twin of the measured process, started from the same lock with markers on"


def ask(
    name: str,
    to: str,
    verb: Verb,
    options: Mapping[str, Any],
    *,
    off: bool = False,
    twin: bool = False,
    worktree: bool = False,
    layout: Layout = HERE,
) -> list[Visit]:
    """Run one verb about the service on each target, and judge gate 5 where it runs.

    `off` speaks of the service with the candidate's switch turned off, `twin` of one that differs
    from the measured one by its markers alone. `worktree` goes past the lock, for the edit loop.
    What was judged is kept for `./inv report`.
    """
    variant = {"off": off, "twin": twin, "worktree": worktree}
    found, visits = _ask(name, to, verb, options, **variant, layout=layout)
    if found is not None:
        for visit in visits:
            _keep(found, visit, _kind(off=off, twin=twin))
    return visits


def _ask(
    name: str,
    to: str,
    verb: Verb,
    options: Mapping[str, Any],
    *,
    off: bool,
    twin: bool,
    layout: Layout,
    worktree: bool = False,
) -> tuple[Submission | None, list[Visit]]:
    """Run one verb on each target; return of what it spoke too, None where there was no target."""
    of: list[Submission] = []

    def request(found: Submission, made: Bundle) -> Request:
        of.append(found)
        carried = _carried(_variant(found.manifest, off=off, twin=twin), made, verb)
        return Request(verb=verb, operator=flow.operator(), options={**carried, **options})

    asked = flow.run(name, to, request, layout, worktree=worktree)
    visits = [_judged(visit) for visit in asked]
    return (of[0] if of else None), visits


def prove(
    name: str,
    to: str,
    *,
    prompt: int,
    off: bool = False,
    twin: bool = False,
    salt: int = 0,
    layout: Layout = HERE,
) -> list[Visit]:
    """Send one prompt of so many tokens to each target; judge gate 6 by the markers it left.

    Raises:
        BadValues: the manifest does not say which markers are wanted, or has no such variant.
    """
    manifest = submission.load(name, layout)
    if manifest.dispatch is None or manifest.launch is None:
        raise BadValues(
            f"there is nothing to prove for {manifest.name}",
            why="its manifest has no `dispatch:` or no `launch:`",
            fix=f"say in manifests/{manifest.name}.yaml which markers must appear",
        )
    if manifest.dispatch.diag == "twin" and not twin:
        raise BadValues(
            f"{manifest.name} is proven on a twin",
            why="its dispatch.diag is `twin`: the measured process prints no markers",
            fix="stop it, then `./inv serve.start --twin` and `./inv serve.prove --twin`",
        )
    wanted = needed(manifest, prompt)
    send = {"tokens": prompt, "salt": salt}
    found, asked = _ask(name, to, Verb.MARKERS, {"send": send}, off=off, twin=twin, layout=layout)
    visits = [_dispatched(visit, manifest, wanted, off=off) for visit in asked]
    if found is not None:
        for visit in visits:
            _keep(found, visit, _kind(off=off, twin=twin))
    return visits


def kept(path: Path, evidence: Mapping[str, Any]) -> list[Gate]:
    """Return gates 5 and 6 as they were last judged of what a verify's evidence speaks of.

    `path` is the evidence's. Gate 6 is the twin's where a twin was proven; what was seen with the
    candidate switched off, or on another plan, target or deploy, is none of them.

    Raises:
        BadValues: what was kept cannot be read.
    """
    beside = _beside(path)
    if not beside.exists():
        return []
    told = _read(beside)
    if (told["plan"], told["target"]) != (evidence.get("plan"), evidence.get("target")):
        return []
    deploy = (evidence.get("incidental") or {}).get("receipt", "")
    of = {k: row["gates"] for k, row in told["kinds"].items() if _receipt(row["run"]) == deploy}
    rows, twin = {**of.get("measured", {})}, of.get("twin", {})
    rows.update({"6": twin["6"]} if "6" in twin else {})
    return [gates.of_json(row) for _, row in sorted(rows.items())]


def needed(manifest: Manifest, prompt: int) -> tuple[markers.Wanted, ...]:
    """Return every marker that the manifest wants of one prompt of so many tokens."""
    assert manifest.dispatch is not None
    plan = chunk_plan(manifest, prompt)
    return tuple(
        want
        for marker in manifest.dispatch.markers
        for want in markers.wanted(marker.shape, marker.dtype, marker.phase, plan)
    )


def chunk_plan(
    manifest: Manifest | None, prompt: int, *, budget: int = 0, align: int = 0, cached: int = 0
) -> tuple[Chunk, ...]:
    """Return the chunks of a prompt; the budget is the launch's unless it is given."""
    argv = manifest.launch.serve if manifest is not None and manifest.launch is not None else ()
    return chunks(prompt, budget or settings(argv)[0], align=align, cached=cached)


def chunk_title(manifest: Manifest | None, prompt: int, *, budget: int = 0, cached: int = 0) -> str:
    """Say what a chunk plan is made for, and where its budget is from."""
    argv = manifest.launch.serve if manifest is not None and manifest.launch is not None else ()
    flags = {word.partition("=")[0].replace("_", "-") for word in argv}
    origin = "vLLM's default"
    if budget:
        origin = "--budget"
    elif manifest is not None and "--max-num-batched-tokens" in flags:
        origin = f"launch.serve of {manifest.name}"
    known = f", {cached} of them cached" if cached else ""
    size = budget or settings(argv)[0]
    return f"a prompt of {prompt} tokens{known}, max_num_batched_tokens {size} ({origin}):"


def launch_of(manifest: Manifest, *, off: bool = False, twin: bool = False) -> Launch:
    """Return the locked launch, or that of its variant.

    Raises:
        BadValues: the manifest starts nothing, or has no such variant.
    """
    return Launch.of_manifest(_variant(manifest, off=off, twin=twin).meaning())


def _variant(manifest: Manifest, *, off: bool, twin: bool) -> Manifest:
    """Return the manifest with its candidate switched off, or as a twin with markers on."""
    manifest.serve_argv()  # refuses a manifest that starts nothing
    dispatch, launch = manifest.dispatch, manifest.launch
    assert launch is not None
    env = dict(launch.env)
    if off:
        if dispatch is None or dispatch.switch not in env:
            raise BadValues(
                f"{manifest.name} cannot be started with its candidate off",
                why="dispatch.switch names no variable of launch.env",
                fix="name the variable that turns the candidate on, and set it in launch.env",
            )
        env[dispatch.switch] = dataclasses.replace(env[dispatch.switch], value=dispatch.off)
    if twin:
        if dispatch is None or dispatch.diag != "twin":
            raise BadValues(
                f"{manifest.name} has no twin",
                why="its dispatch.diag is not `twin`: the measured process prints the markers",
                fix="leave --twin out, or write `diag: twin`",
            )
        env[_DIAG] = Variable(value="1", why="the twin differs from the measured process in this")
    return dataclasses.replace(manifest, launch=dataclasses.replace(launch, env=env))


def _carried(manifest: Manifest, made: Bundle, verb: Verb) -> dict[str, Any]:
    """What a call carries: the launch it is about, which bundle, and for a start the scripts."""
    options: dict[str, Any] = {
        "launch": Launch.of_manifest(manifest.meaning()).to_json(),
        "bundle": {"name": made.path.name, "sha256": made.sha256},
    }
    if verb is Verb.START:
        options["scripts"] = {
            one.name: {"mode": f"{one.mode:04o}", "text": one.data.decode()}
            for one in scripts.on_target(manifest)
        }
    return options


def _judged(visit: Visit) -> Visit:
    """Add gate 5 where the evidence tells of a service."""
    seen = visit.evidence.raw.get("service") if visit.evidence is not None else None
    if not seen or "faults" not in seen or not seen.get("server"):
        return visit
    return dataclasses.replace(visit, gates=(*visit.gates, gates.process_clean(seen)))


def _kind(*, off: bool, twin: bool) -> str:
    """Name which of the services of one lock is spoken of."""
    return "-".join([*(["twin"] if twin else []), *(["off"] if off else [])]) or "measured"


def _keep(found: Submission, visit: Visit, kind: str) -> None:
    """Write the gates of a visit beside the evidence of its target; those of another run go."""
    raw = visit.evidence.raw if visit.evidence is not None else {}
    run = (raw.get("service") or raw.get("markers") or {}).get("run")
    told = (g for g in visit.gates if g.number in (5, 6) and g.verdict is not Verdict.NOT_REACHED)
    judged = {str(gate.number): gate.to_json() for gate in told}
    if not judged or not run:
        return
    path = _beside(flow.evidence_path(found, visit.target))
    whole = {"schema": _SCHEMA, "target": visit.target, "plan": raw["plan"], "kinds": {}}
    if path.exists() and (old := _read(path))["plan"] == raw["plan"]:
        whole["kinds"] = old["kinds"]
    same = {**{k: run[k] for k in ("pid", "start_ticks", "boot_id")}, "receipt": _receipt(run)}
    before = whole["kinds"].get(kind, {})
    earlier = before["gates"] if before.get("run") == same else {}
    whole["kinds"][kind] = {"run": same, "gates": {**earlier, **judged}}
    _write(path, whole)


def _receipt(run: Mapping[str, Any]) -> str:
    """Return what names the deploy that a run was started on, "" where there was none."""
    return str(run.get("receipt") or "")


def _write(path: Path, whole: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Somebody may follow the service while another one proves it: each writes beside for itself.
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(report.as_json(whole) + "\n", encoding="utf-8")
    new.replace(path)


def _beside(evidence: Path) -> Path:
    """``serve.json`` for ``evidence.json``, ``serve-TARGET.json`` for ``evidence-TARGET.json``."""
    return evidence.with_name("serve" + evidence.name.removeprefix("evidence"))


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text("utf-8"))
        if raw["schema"] == _SCHEMA and raw.keys() >= {"target", "plan", "kinds"}:
            return dict(raw)
        why = f"its schema is {raw['schema']}, not {_SCHEMA}"
    except (OSError, ValueError, KeyError, TypeError) as err:
        why = str(err) or type(err).__name__
    raise BadValues(
        f"cannot read {path}", why=why, fix="remove it; `./inv serve.status` writes it anew"
    )


def _dispatched(
    visit: Visit, manifest: Manifest, wanted: Sequence[markers.Wanted], *, off: bool
) -> Visit:
    if visit.error is not None or visit.evidence is None:
        return visit
    scan = visit.evidence.raw["markers"]
    assert manifest.launch is not None
    eager = "--enforce-eager" in manifest.launch.serve
    judged = (
        markers.judge_off(scan, scan["pids"])
        if off
        else markers.judge(scan, wanted, scan["pids"], eager=eager)
    )
    notes = [
        *(["the candidate's switch is off"] if off else []),
        *([_TWIN] if manifest.dispatch is not None and manifest.dispatch.diag == "twin" else []),
    ]
    gate = gates.dispatched(judged, scan.get("answer") or {}, "; ".join(notes))
    return dataclasses.replace(visit, gates=(*visit.gates, gate))
