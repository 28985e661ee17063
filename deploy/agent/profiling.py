"""Run profile.sh on the target, say how far it is, and believe only a table that holds calls.

The profiler's exit status and its last word prove nothing: it says "finish" after it lost its data.
It is never ended here: it writes its tables while it ends, which may take minutes.
"""

from __future__ import annotations

import csv
import glob
import os
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from . import faults, service
from .jobs import Job
from .launch import CURRENT, LOG, last_error
from .words import BundleError, Exit, Refused, Unfit, printable

SCHEMA = "profile-run/1"
SCRIPT = "profile.sh"
# What the profiler prints when it has lost its data, whatever it ends with.
_MARKERS = (
    ("has not valid trace data", "the profiler recorded nothing"),
    ("database is locked", "the database was read while the profiler still wrote it"),
    ("Child killed by signal", "the profiled server was killed"),
    ("already exists, please delete it first", "the database's name was used before"),
    ("error while loading shared libraries", "the profiler lacks a library path"),
)
_TICK = 10.0


class NoProfile(BundleError):
    exit = Exit.DIFFERS


def require_clean(wanted: service.Wanted) -> None:
    """Raise Refused where a service runs: a profile starts one of its own, below the profiler."""
    seen = service.observe(wanted, ask=False)
    found = [fault.text for fault in faults.before_start(seen) if not fault.warning]
    if found:
        raise Refused(
            "nothing is profiled",
            why="the process state is not clean:" + "".join(f"\n    {text}" for text in found),
            fix="stop the service (`./inv serve.stop`); profile.run starts it below the profiler",
        )


def require_script(path: str) -> None:
    if not os.path.isfile(path):
        raise Unfit(
            f"there is no {SCRIPT}",
            why=f"{printable(path)} is not there",
            fix="`./inv serve.start` brings it; the manifest needs `profile:` and `bench:`",
        )


def work(job: Job, script: str, words: tuple[str, ...], environ: Mapping[str, str]) -> None:
    """Run the script to its end and keep what it left.

    Raises:
        NoProfile: no table with kernel calls came of it.
    """
    said = os.path.join(job.folder, "profile.log")
    before = set(_folders(script))
    job.step("profile.sh: verify, start below the profiler, warm round, recorded round, tables")
    with open(said, "wb") as output:
        child = subprocess.Popen(
            ("/bin/sh", script, *words),
            cwd=os.path.dirname(script),
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    shown = 0
    while child.poll() is None:
        shown = _progress(job, said, shown, before, script)
        time.sleep(min(_TICK, 1.0))
    _progress(job, said, shown, before, script)
    # The profiler is what the start script started: its words are in that start's log.
    log = os.path.join(os.path.dirname(script), CURRENT, LOG)
    record = _record(child.returncode, [said, log], sorted(set(_folders(script)) - before))
    job.keep(record)
    if not record["calls"]:
        raise NoProfile(
            "the profile holds no kernel call",
            why="; ".join([*record["faults"], *_last_words(child.returncode, said)]),
            fix=f"read {printable(said)} and the logs beside it; nothing may end the profiler",
        )
    job.say(f"{record['calls']} kernel calls in {record['table']}")


def _last_words(code: int, said: str) -> list[str]:
    """Return why profile.sh gave up: what and why of its last error of three lines."""
    error = last_error(_text(said).splitlines())
    told = f": {error[1].strip()}, {error[2]}" if error else ""
    return [f"profile.sh ended with {code}{told}"] if code else []


def kernel_calls(path: str) -> int:
    """Return the calls of a table's Total row; 0 where there is none or it cannot be read."""
    last: list[str] = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for row in csv.reader(file):
                last = row
    except (OSError, ValueError, csv.Error):
        return 0
    return int(last[1]) if len(last) > 2 and last[0] == "Total" and last[1].isdigit() else 0


def markers_in(text: str) -> list[str]:
    """Return what a profiler's output says went wrong."""
    return [meaning for marker, meaning in _MARKERS if marker in text]


def _folders(script: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(os.path.dirname(script)), "profile", "*", ""))


def _progress(job: Job, said: str, shown: int, before: set[str], script: str) -> int:
    """Pass on the script's own lines, and how large the files have grown."""
    with open(said, "rb") as file:
        file.seek(shown)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode("utf-8", "replace").splitlines():
        job.say(line)
    sizes = [
        f"{os.path.basename(path)} {os.path.getsize(path):,} bytes"
        for folder in sorted(set(_folders(script)) - before)
        for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.db")))
    ]
    if sizes and sizes != job.state.get("files"):
        job.write(files=sizes)
    return shown + len(whole)


def _record(code: int, said: list[str], folders: list[str]) -> dict[str, Any]:
    """What there is in the end; the script's exit status is noted and decides nothing."""
    tables = [path for f in folders for path in glob.glob(glob.escape(f) + "*.hipkernel.csv")]
    databases = [path for f in folders for path in glob.glob(glob.escape(f) + "*.db")]
    calls = {path: kernel_calls(path) for path in sorted(tables)}
    best = max(calls, key=lambda path: calls[path], default="")
    found = [text for path in _outputs(said, folders) for text in markers_in(_text(path))]
    if not tables:
        found.append("there is no *.hipkernel.csv")
        found += [
            f"{path} may still hold the calls (profile.summary reads it)" for path in databases
        ]
    elif not calls[best]:
        found.append(f"{best} has no calls in its Total row")
    return {
        "schema": SCHEMA,
        "exit": code,
        "table": best,
        "databases": sorted(databases),
        "calls": calls.get(best, 0),
        "faults": sorted(set(found)),
    }


def _outputs(said: list[str], folders: list[str]) -> list[str]:
    return [*said, *(path for f in folders for path in glob.glob(glob.escape(f) + "*.log"))]


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(1 << 24).decode("utf-8", "replace")
    except OSError:
        return ""
