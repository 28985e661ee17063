"""What is checked of a bundle alone, and of the manifest that it was made from.

`BUNDLE` and `MANIFEST` are this module's face: what each check is called, and the check.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy import manifest as manifests
from deploy.bundle import Bundle
from deploy.errors import BundleError
from deploy.kernels.elf import read as read_elf
from deploy.manifest import Manifest
from deploy.measure.score import FULL
from deploy.service import rules

_NAME = re.compile(r"(.+)-([0-9a-f]{12})\.pyz")
_SCHEDULER = re.compile(r"^vllm/v1/core/sched/")


def manifest_of(made: Bundle) -> Manifest:
    """Return the manifest that a bundle was made from; where its repository lay is not known.

    Raises:
        BadValues: it is none of this version's.
    """
    meaning = json.loads(json.dumps(made.inputs["manifest"]))
    if "wheel" not in meaning["source"]:
        meaning["source"]["git"] = "."
    # A meaning holds what was read; these are written in other words.
    if "ready" in (meaning.get("launch") or {}):
        meaning["launch"]["ready"] = f"{meaning['launch']['ready']}s"
    if "reproducible" in (meaning.get("kernels") or {}):
        meaning["kernels"]["reproducible"] = "required"
    return manifests.parse(json.dumps(_texts(meaning)), str(meaning["name"]))


def _texts(value: Any) -> Any:
    """A manifest's values are texts; JSON's numbers and truths would not be read as such."""
    if isinstance(value, Mapping):
        return {str(key): _texts(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_texts(child) for child in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if value is None else str(value)


# --- of the bundle --------------------------------------------------------------------------------


def _named(made: Bundle) -> Iterator[str]:
    match = _NAME.fullmatch(made.path.name)
    if match is None:
        yield f"{made.path.name} is not NAME-<12 hex>.pyz"
    elif match[2] != made.sha256[:12]:
        yield f"it is named {match[2]}, its sha256 begins with {made.sha256[:12]}"
    elif match[1] != made.plan.name:
        yield f"it is named {match[1]}, its plan {made.plan.name}"
    else:
        yield f"={made.path.name}"


def _classed(made: Bundle) -> Iterator[str]:
    """Every path of the difference has a class, and every installed one is in the plan."""
    planned = {entry.path for entry in made.plan.files}
    rows = made.inputs.get("files") or ()
    for row in rows:
        if row["class"] not in ("overlay", "kernel", "ignored"):
            yield f"{row['path']}: class {row['class']!r}"
        elif row["class"] == "ignored" and not row["reason"]:
            yield f"{row['path']}: ignored without a reason"
        elif row["class"] == "overlay" and row["path"] not in planned:
            yield f"{row['path']}: to be installed, and not in the plan"
    known = {row["path"] for row in rows}
    for entry in made.plan.files:
        if entry.role != "extension" and entry.path not in known:
            yield f"{entry.path}: in the plan, and no path of the difference"
    yield f"={len(rows)} changed paths, {len(planned)} files to install"


def _compiles(made: Bundle) -> Iterator[str]:
    count = 0
    with zipfile.ZipFile(made.path) as archive:
        for entry in made.plan.files:
            if entry.want.type != "file" or not entry.path.endswith(".py"):
                continue
            count += 1
            try:
                ast.parse(archive.read(f"blobs/{entry.want.sha256}"), entry.path)
            except (SyntaxError, ValueError) as err:
                yield f"{entry.path}: {err}"
            except (RecursionError, MemoryError):
                yield f"{entry.path}: it is nested too deeply to be parsed"
    yield f"={count} modules parse"


def _scheduler(made: Bundle) -> Iterator[str]:
    for entry in made.plan.files:
        if _SCHEDULER.match(entry.path):
            yield f"{entry.path}: the rules lock the scheduler's code"
    yield "=no file of the scheduler is touched"


BUNDLE: tuple[tuple[str, Callable[[Bundle], Iterator[str]]], ...] = (
    ("its name is its digest", _named),
    ("every changed path is classed and planned", _classed),
    ("every module parses", _compiles),
    ("the scheduler is left alone", _scheduler),
)


# --- of its manifest ------------------------------------------------------------------------------


def _variables(_: Bundle, manifest: Manifest) -> Iterator[str]:
    launch = manifest.launch
    if launch is None:
        yield "=no service is started"
        return
    for name, variable in launch.env.items():
        if not variable.why.strip():
            yield f"{name} has no reason"
    for name in rules.assigned(launch.command):
        yield f"{name} is set by launch.command, and has no reason"
    yield f"={len(launch.env)} custom variables, each with value and reason"


def _words(_: Bundle, manifest: Manifest) -> Iterator[str]:
    launch = manifest.launch
    if launch is None:
        yield "=no service is started"
        return
    yield from rules.forbidden(launch.command, launch.serve)
    if unseen := rules.unseen(launch.command, launch.serve):
        yield f"?not checked: {unseen}"
    else:
        yield f"={len(launch.command) + len(launch.serve)} words for the server, none forbidden"


def _arch(made: Bundle, manifest: Manifest) -> Iterator[str]:
    """Each compiled extension holds device code of exactly the arch that was asked for."""
    entries = [e for e in made.plan.files if e.role == "extension" and not e.want.absent]
    wanted = manifest.kernels.arch if manifest.kernels else ""
    if not entries:
        yield _none_compiled(made, manifest)
        return
    if not wanted:
        yield "it installs compiled files, and its manifest says nothing of kernels"
    with zipfile.ZipFile(made.path) as archive, tempfile.TemporaryDirectory() as folder:
        for entry in entries if wanted else ():
            path = Path(folder, "extension.so")
            path.write_bytes(archive.read(f"blobs/{entry.want.sha256}"))
            yield from (f"{entry.path}: {text}" for text in _arch_faults(path, wanted))
    yield f"={len(entries)} extensions, all {wanted}"


def _none_compiled(made: Bundle, manifest: Manifest) -> str:
    """What it means that no extension is carried: nothing, where no kernel source changed."""
    changed = [row["path"] for row in made.inputs.get("files") or () if row["class"] == "kernel"]
    if not changed:
        return "=no kernel source changed, no extension is carried"
    more = f" (and {len(changed) - 1} more)" if changed[1:] else ""
    said = f"{changed[0]}{more} changed, and no extension is carried"
    if reason := manifest.gates.not_applicable.get("2"):
        return f"?{said}: {reason}"
    return f"{said}: what was edited there runs nowhere"


def _arch_faults(path: Path, wanted: str) -> Iterator[str]:
    try:
        found = sorted(set(read_elf(path).archs))
    except BundleError as err:
        yield err.why
        return
    if found != [wanted]:
        yield f"device code of {', '.join(found) or 'no arch'}, asked is {wanted}"


def _measurable(_: Bundle, manifest: Manifest) -> Iterator[str]:
    bench = manifest.bench
    if bench is None:
        yield "=no bench section: throughput is not part of it"
        return
    for name in sorted(set(FULL) - set(bench.buckets)):
        yield f"the official bucket {name} is missing"
    yield f"={len(bench.buckets)} buckets, their data sets pinned by sha256"


MANIFEST: tuple[tuple[str, Callable[[Bundle, Manifest], Iterator[str]]], ...] = (
    ("custom variables are listed with reasons", _variables),
    ("the server's words obey the rules", _words),
    ("compiled for the asked arch only", _arch),
    ("what is measured is pinned", _measurable),
)
