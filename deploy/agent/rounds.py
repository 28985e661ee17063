"""One measured run on the target: for each bucket a warm round, then the counted one.

Both send the same requests to the same process. Before, between and after them the process state
is looked at, the server's counters are read and the log's end is noted, so that the record can tell
what each number rests on. The operator's side judges; here only what must stop a run stops it.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from . import client, counters, faults, log, machine, ports, service
from .client import Work
from .jobs import Job
from .launch import Run, read_run
from .words import Refused, Unfit, printable

SCHEMA = "bench/1"
_PATIENCE = 6 * 3600.0  # seconds that a round may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a run is made with; paths are this machine's."""

    manifest: Mapping[str, Any]
    wanted: service.Wanted
    env_script: str
    model: str
    script: str
    buckets: tuple[Mapping[str, Any], ...]  # name, dataset (here), requests; sha256 as locked
    identity: Mapping[str, str]  # plan, payload, inputs, agent
    warm: bool = True
    patience: float = _PATIENCE


def work(setting: Setting, job: Job, environ: Mapping[str, str]) -> None:
    """Make the run and keep its record, which grows with every round.

    Raises:
        Refused: the process state is not what the lock says, before or after a round.
    """
    env, cleared = client.environment(environ)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "stamp": job.state["stamp"],
        "name": setting.manifest.get("name", ""),
        **setting.identity,
        "locked": setting.manifest.get("bench") or {},
        "flags": list(client.flags(setting.manifest)),
        "cleared": cleared,
        "versions": versions(setting.wanted.site),
        "started": job.state["started"],
        "buckets": [],
        "incidental": {"host": os.uname().nodename},
    }
    job.keep(record)
    for bucket in setting.buckets:
        row = _opened(setting, bucket)
        record["buckets"].append(row)
        for name in ("warm", "counted") if setting.warm else ("counted",):
            job.step(f"{bucket['name']}: {name} round, {bucket['requests']} requests")
            row["rounds"].append(_round(setting, job, bucket, name, env))
            record["ended"] = time.time()
            job.keep(record)
            _told(job, row["rounds"][-1])


def looked(setting: Setting) -> dict[str, Any]:
    """Look at the process state without a request; the part of it that a record keeps."""
    seen = service.observe(setting.wanted, ask=False)
    wanted = setting.wanted
    found = faults.after_start(
        seen, wanted.launch, plan=wanted.plan, receipt=wanted.receipt, asked=False
    )
    server = seen["server"] or {}
    return {
        "pid": server.get("pid", 0),
        "start_ticks": server.get("start_ticks", 0),
        "boot_id": machine.boot_id(),
        "members": server.get("members", []),
        "listeners": seen["listeners"],
        "environment": [row for row in server.get("environment", ()) if row["state"] != "ok"],
        "mapped": server.get("mapped", []),
        "faults": [fault.to_json() for fault in found],
    }


def require_clean(state: Mapping[str, Any]) -> None:
    """Raise Refused where the process state speaks against measuring."""
    bad = [fault["text"] for fault in state["faults"] if not fault["warning"]]
    if bad:
        raise Refused(
            "nothing is measured",
            why="the process state is not as locked:" + "".join(f"\n    {text}" for text in bad),
            fix="mend it (`./inv serve.status` shows all of it) and start again",
        )


def versions(site: str) -> dict[str, str]:
    """Return the versions of what decides lengths and speed, from the names of their metadata."""
    found: dict[str, str] = {}
    try:
        names = sorted(os.listdir(site))
    except OSError:
        return found
    for name in names:
        package, _, rest = name.partition("-")
        if rest.endswith(".dist-info") and package in (
            "vllm",
            "torch",
            "transformers",
            "tokenizers",
        ):
            found[package] = rest.removesuffix(".dist-info")
    return found


def _opened(setting: Setting, bucket: Mapping[str, Any]) -> dict[str, Any]:
    """Begin a bucket's part of the record: what the lock wants of it, and what lies there."""
    sha256, rows = _dataset(str(bucket["dataset"]))
    return {
        "bucket": bucket["name"],
        "dataset": bucket["dataset"],
        "sha256": sha256,
        "rows": rows,
        "requests": bucket["requests"],
        "argv": list(_work(setting, bucket, "RESULTS").argv),
        "rounds": [],
    }


def _dataset(path: str) -> tuple[str, int]:
    total, rows = hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            for block in iter(lambda: file.read(1 << 20), b""):
                total.update(block)
                rows += block.count(b"\n")
    except OSError as err:
        raise Unfit(
            f"there is no data set {printable(path)}",
            why=err.strerror or str(err),
            fix="bring it to where bench.buckets says it is",
        ) from err
    return total.hexdigest(), rows


def _round(
    setting: Setting, job: Job, bucket: Mapping[str, Any], name: str, env: Mapping[str, str]
) -> dict[str, Any]:
    folder = os.path.join(job.folder, str(bucket["name"]), name)
    os.makedirs(folder, exist_ok=False)
    work = _work(setting, bucket, folder)
    before = looked(setting)
    if name == "counted" or not setting.warm:
        require_clean(before)
    run = read_run(setting.wanted.launch.dir)
    path = run.log_path if run else ""
    port = setting.wanted.launch.port
    counted, window = counters.fetch(port), log.mark(path) if path else log.Place(0, 0, 0)
    code, begun, took = client.run(
        work, os.path.join(folder, "bench.log"), env, setting.patience, lambda: None
    )
    end = log.mark(path) if path else log.Place(0, 0, 0)
    after_counters = counters.fetch(port)
    result, stale = client.read(work.result, begun)
    return {
        "round": name,
        "exit": code,
        "begun": begun,
        "seconds": took,
        "result": result,
        "stale": stale,
        "before": before,
        "after": looked(setting),
        "counters": {"before": counted, "after": after_counters},
        **_said(run, window, end),
    }


def _said(run: Run | None, window: log.Place, end: log.Place) -> dict[str, Any]:
    """What the server's log holds of the window: markers, and whether something was compiled."""
    if run is None:
        return {"markers": None, "compiled": 0, "compiling": []}
    count, lines = counters.compiling(run.log_path, window, end)
    found = log.scan(run.log_path, None, window, end)
    members = [process.pid for process in run.members()]
    markers = {**found.to_json(), "pids": sorted({run.pid, *members})}
    return {"markers": markers, "compiled": count, "compiling": lines}


def _work(setting: Setting, bucket: Mapping[str, Any], folder: str) -> Work:
    launch = setting.wanted.launch
    host = ports.host(launch.port)
    if setting.script:
        return Work(
            argv=("sh", setting.script, str(bucket["name"]), str(bucket["requests"])),
            folder=os.path.dirname(setting.script),
            result=os.path.join(folder, f"{bucket['name']}_throughput", client.RESULT),
            env_script=setting.env_script,
            extra={
                "RESULT_ROOT": folder,
                "MODEL_DIR": setting.model,
                "SERVED_MODEL_NAME": launch.served_name,
                "VLLM_HOST": host,
                "VLLM_PORT": str(launch.port),
            },
        )
    words = client.argv(
        setting.manifest, bucket, model=setting.model, host=host, port=launch.port, folder=folder
    )
    # A folder of its own: with -m, Python would import from where it stands.
    return Work(
        argv=words,
        folder=folder,
        result=os.path.join(folder, client.RESULT),
        env_script=setting.env_script,
    )


def _told(job: Job, row: Mapping[str, Any]) -> None:
    found = row["result"] or {}
    done, asked = found.get("completed"), found.get("num_prompts")
    rate = found.get("output_throughput")
    job.say(
        f"  {done} of {asked} completed, "
        + (f"{rate:.3f} tok/s, " if isinstance(rate, float | int) else "")
        + f"exit {row['exit']}, {row['seconds']:.1f} s"
    )
    for text in _against(row):
        job.say(f"  ! {text}")


def _against(row: Mapping[str, Any]) -> Iterator[str]:
    yield from row["stale"]
    yield from row["compiling"]
    yield from (fault["text"] for fault in row["after"]["faults"] if not fault["warning"])
