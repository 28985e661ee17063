"""Verb `measure`: start a benchmark, a profile or an accuracy run, ask how far it is, collect it.

Options: act (start, status, stop), kind (bench, profile, accuracy), and for a start buckets,
requests, warm, words, manifest (its meaning, where no bundle holds it); for the others stamp (the
newest is meant without), since (an offset in the log, for who follows), record (send what came of
it).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

# Nothing may be imported late by the worker: the bundle it was forked from may be gone by then.
from . import accuracy, bring, jobs, profiling, rounds, serve
from .launch import Launch
from .words import BundleError, Exit, Refused, Unfit, printable

if TYPE_CHECKING:
    from .main import Call


class NothingToMeasure(BundleError):
    exit = Exit.VALUES


def measure(call: Call) -> None:
    """Do one act. What it found is the evidence's "measure".

    Raises:
        Refused: the process state is not as locked, or another run is being made.
        NothingToMeasure: the bundle's manifest does not say what to measure.
    """
    options = call.request.options
    act, kind = str(options.get("act") or "status"), str(options.get("kind") or "bench")
    if kind not in jobs.KINDS or act not in _ACTS:
        raise Unfit(
            f"cannot {printable(act)} {printable(kind)}",
            why="there is no such act or kind",
            fix="the tasks are bench.run, bench.status, bench.stop and profile.run",
        )
    _ACTS[act](call, kind, options)


def _start(call: Call, kind: str, options: Mapping[str, Any]) -> None:
    if kind == "profile":
        serve.require_whole_machine(call)
    jobs.require_idle(_top(call))
    if kind == "bench":
        job = _bench(call, options)
    elif kind == "profile":
        job = _profile(call, options)
    else:
        job = _accuracy(call, options)
    call.say(f"{kind} {job.state['stamp']} runs as pid {job.state['pid']}")
    _answer(call, job, options, "started")


def _status(call: Call, kind: str, options: Mapping[str, Any]) -> None:
    job = jobs.find(_top(call), kind, str(options.get("stamp") or ""))
    _answer(call, job, options, "")
    if call.evidence["measure"]["state"] in jobs.WITHOUT_RESULT:
        call.exit = Exit.DIFFERS


def _stop(call: Call, kind: str, options: Mapping[str, Any]) -> None:
    top, stamp = _top(call), str(options.get("stamp") or "")
    if not stamp and not jobs.made(top, kind):
        call.evidence["outcome"] = "nothing to do"
        return
    job = jobs.find(top, kind, stamp)
    ended = jobs.end(job)
    _answer(call, job, options, "asked to end" if ended else "nothing to do")


_ACTS = {"start": _start, "status": _status, "stop": _stop}


def _bench(call: Call, options: Mapping[str, Any]) -> jobs.Job:
    setting = setting_of(call, options)
    rounds.require_clean(rounds.looked(setting))
    environ = dict(os.environ)
    asked = {"buckets": [b["name"] for b in setting.buckets], "requests": options.get("requests")}

    def work(job: jobs.Job) -> None:
        rounds.work(setting, job, environ)

    return jobs.start(_top(call), "bench", asked, work)


def _profile(call: Call, options: Mapping[str, Any]) -> jobs.Job:
    top, wanted = _top(call), serve.wanted_of(call)
    profiling.require_clean(wanted)
    words = tuple(str(word) for word in options.get("words") or ())
    script = os.path.join(top, profiling.SCRIPT)
    profiling.require_script(script)

    environ = {**os.environ, serve.BUNDLE: bring.bundle_in(call, top)}

    def work(job: jobs.Job) -> None:
        profiling.work(job, script, words, environ)

    return jobs.start(top, "profile", {"words": list(words)}, work)


def _accuracy(call: Call, options: Mapping[str, Any]) -> jobs.Job:
    setting = setting_of(call, options)
    rounds.require_clean(rounds.looked(setting))
    script = call.tree.from_root(str(options.get("script") or ""))
    words = tuple(str(word) for word in options.get("words") or ())
    accuracy.require_script(script)
    environ = dict(os.environ)

    def work(job: jobs.Job) -> None:
        accuracy.work(job, script, words, setting.env_script, environ)

    return jobs.start(_top(call), "accuracy", {"script": script, "words": list(words)}, work)


def setting_of(call: Call, options: Mapping[str, Any]) -> rounds.Setting:
    """Hold the lock's bench section and the call's wishes together.

    Raises:
        NothingToMeasure: there is no such section.
        Refused: a bucket that is not in it.
    """
    request, tree = call.request, call.tree
    # A bundle holds its manifest; over a line without one the call carries it.
    manifest: Mapping[str, Any] = request.manifest or dict(options.get("manifest") or {})
    bench, model = dict(manifest.get("bench") or {}), dict(manifest.get("model") or {})
    if not bench or not model or not manifest.get("launch"):
        raise NothingToMeasure(
            "nothing says what to measure",
            why="the manifest needs bench:, model: and launch:",
            fix="add what is missing, lock it and bundle it anew",
        )
    known = dict(bench["buckets"])
    names = [str(name) for name in options.get("buckets") or sorted(known)]
    if unknown := [name for name in names if name not in known]:
        raise Refused(
            f"there is no bucket {printable(', '.join(unknown))}",
            why=f"the manifest has {', '.join(sorted(known))}",
            fix="name one of these",
        )
    requests = int(options.get("requests") or 0)
    script = str(bench.get("script") or "")
    return rounds.Setting(
        manifest=manifest,
        wanted=serve.wanted_of(call),
        env_script=tree.from_root(request.env_script) if request.env_script else "",
        model=tree.from_root(str(model["path"])),
        script=tree.from_root(script) if script else "",
        buckets=tuple(
            {
                "name": name,
                "dataset": tree.from_root(str(known[name]["dataset"])),
                "requests": requests or int(known[name]["requests"]),
            }
            for name in names
        ),
        identity={
            "plan": call.plan.digest,
            "payload": call.plan.payload,
            "inputs": request.inputs,
        },
        warm=bool(options.get("warm", True)),
        patience=float(options.get("patience") or 6 * 3600),
    )


def _top(call: Call) -> str:
    folder = call.request.launch_dir or Launch.of_manifest(call.request.manifest).dir
    if not folder:
        raise NothingToMeasure(
            "there is no launch folder",
            why="the manifest has no launch.dir",
            fix="add it, lock and bundle anew",
        )
    return call.tree.from_root(folder)


def _answer(call: Call, job: jobs.Job, options: Mapping[str, Any], outcome: str) -> None:
    lines, at = jobs.tail(job, int(options.get("since") or 0))
    found: dict[str, Any] = {**job.to_json(), "lines": lines, "at": at}
    if options.get("record"):
        found["record"] = jobs.record_of(job)
    call.evidence["measure"] = found
    call.evidence["outcome"] = outcome or found["state"]
