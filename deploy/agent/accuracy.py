"""Run the site's accuracy script on the target, and keep only output that this run has made.

The script scores the newest folder that exists: when its own run died early it prints an older
run's scores. So the folders that are there before the start do not count.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from . import client
from .client import Work
from .jobs import Job
from .words import BundleError, Exit, Unfit, printable

SCHEMA = "accuracy-run/1"
_TABLES = re.compile(r"(summary|result|score).*\.(csv|md|txt|json)$", re.IGNORECASE)
_MOST = 1 << 20
_PATIENCE = 24 * 3600.0


class NoOutput(BundleError):
    exit = Exit.DIFFERS


def require_script(path: str) -> None:
    if not os.path.isfile(path):
        raise Unfit(
            "there is no accuracy script",
            why=f"{printable(path)} is not there",
            fix="name the site's run_accuracy.sh with --script",
        )


def work(
    job: Job, script: str, words: tuple[str, ...], env_script: str, environ: Mapping[str, str]
) -> None:
    """Run it and keep every table that is newer than the start, with what was printed.

    Raises:
        NoOutput: it wrote none.
    """
    top = os.path.dirname(script)
    before = outputs(top)
    env, cleared = client.environment(environ)
    said = os.path.join(job.folder, "accuracy.log")
    job.step(f"{os.path.basename(script)} {' '.join(words)}".strip())
    task = Work(argv=("sh", script, *words), folder=top, result="", env_script=env_script)
    code, begun, took = client.run(task, said, env, _PATIENCE, lambda: None)
    made = [path for path, written in sorted(outputs(top).items()) if before.get(path) != written]
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "exit": code,
        "begun": begun,
        "seconds": took,
        "cleared": cleared,
        "tables": [{"path": path, "text": _text(path)} for path in made],
        "said": _text(said)[-(1 << 16) :],
    }
    job.keep(record)
    if not made:
        raise NoOutput(
            "the accuracy script wrote nothing new",
            why=f"it ended with {code}; whatever it printed is of an earlier run",
            fix=f"read {printable(said)}",
        )


def outputs(top: str) -> dict[str, float]:
    """Return the tables below a folder with the time each was written."""
    found: dict[str, float] = {}
    for folder, _, names in os.walk(top):
        for name in names:
            if _TABLES.search(name):
                path = os.path.join(folder, name)
                try:
                    found[path] = os.stat(path).st_mtime
                except OSError:
                    continue
    return found


def _text(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MOST).decode("utf-8", "replace")
