"""What is checked of the folder that is handed in around a bundle.

`folder_rows` is this module's face. Nothing is believed that a file says of itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from deploy import bundle as bundles
from deploy import evidence, gates, measuring
from deploy.agent.words import Verb, digest, printable
from deploy.bundle import Bundle
from deploy.evidence import Evidence
from deploy.inspection.rows import FAILED, NOTE, OK, STUMBLES, Row, said_of, why
from deploy.manifest import Manifest
from deploy.measure import profile, record
from deploy.measure import result as results
from deploy.regular import open_regular, read_regular

_FILE = 256 * 2**20  # bytes of one JSON file, as for a record
_EVIDENCE = "evidence*.json"
_HEAD = 40  # lines of a README


def folder_rows(folder: Path, made: Bundle, manifest: Manifest | None) -> list[Row]:
    return [
        *_scripts(folder, made),
        _readme(folder),
        *_evidence(folder, made),
        *_measured(folder, made, manifest),
    ]


def _scripts(folder: Path, made: Bundle) -> Iterator[Row]:
    what = "its scripts are those of the bundle"
    promised = made.inputs.get("scripts") or {}
    if not promised:
        yield Row(NOTE, what, "the manifest starts no service")
    for name, row in sorted(promised.items()):
        path = folder / name
        try:
            sha256 = bundles.file_sha256(path) if path.is_file() else ""
        except OSError as err:
            yield Row(FAILED, what, f"{name}: {why(err)}")
            continue
        if not sha256:
            yield Row(FAILED, what, f"{name} is missing")
        elif sha256 != row["sha256"]:
            yield Row(FAILED, what, f"{name} was edited by hand, or is another bundle's")
        else:
            yield Row(OK, what, name)


def _readme(folder: Path) -> Row:
    what = "a README names third-party code at its head"
    found = "there is no README"
    for path in sorted(folder.glob("README*")):
        name = printable(path.name)
        try:
            with open_regular(path) as file:
                head = b"".join(file.readline(_FILE) for _ in range(_HEAD)).decode(
                    "utf-8", "replace"
                )
        except OSError as err:
            found = f"{name}: {why(err)}"
            continue
        if re.search(r"third[- ]party|第三方", head.lower()):
            return Row(OK, what, name)
        return Row(FAILED, what, f"{name} says nothing of third-party code in {_HEAD} lines")
    return Row(FAILED, what, found)


def _evidence(folder: Path, made: Bundle) -> Iterator[Row]:
    what = "evidence answers this bundle's plan"
    found = sorted(folder.glob(_EVIDENCE))
    if not found:
        yield Row(NOTE, what, "none is handed in: deploy and verify it yourself")
    for path in found:
        name, said = printable(path.name), said_of(_evidence_faults(path, made))
        if said:
            more = f" (and {len(said) - 3} more)" if said[3:] else ""
            yield Row(FAILED, what, f"{name}: {'; '.join(said[:3])}{more}")
        else:
            yield Row(OK, what, f"{name}: {len(made.plan.files)} files as planned")


def _evidence_faults(path: Path, made: Bundle) -> Iterator[str]:
    """Judge it as a verify does; what that was told by its own machine is held to the plan, too."""
    plan, told = made.plan, evidence.parse(read_regular(path, _FILE))
    if not told.answers(plan) or told.raw.get("name", plan.name) != plan.name:
        yield "it speaks of another plan"
    elif told.verb is not Verb.VERIFY:
        yield f"it is of a {told.verb.value}, not of a verify"
    elif told.raw.get("worktree"):
        yield "it is of a work tree, not of what was locked"
    else:
        yield from gates.source_complete(plan, told, None).faults
        if plan.extensions:
            yield from gates.op_registered(plan, told).faults
        yield from _contradictions(made, told)
        yield from _stated(told.raw)
        if int(told.exit) or told.outcome not in ("", "verified"):
            yield f"exit {int(told.exit)} {told.outcome}, {len(told.faults)} faults"


def _contradictions(made: Bundle, told: Evidence) -> Iterator[str]:
    """What is called as planned beside a finding that is not the planned one."""
    wanted = {entry.path: entry.want.to_json() for entry in made.plan.files}
    for row in told.files:
        if row["path"] not in wanted:
            yield f"{row['path']}: it is no file of the plan"
        elif row["state"] == "ok" and row.get("found") != wanted[row["path"]]:
            yield f"{row['path']}: called as planned, found was {row.get('found')}"
    for where, place in sorted(told.origin.items()):
        file = str(place.get("file"))
        if place["state"] == "ok" and not file.endswith(f"/{made.plan.package}/__init__.py"):
            yield f"import from {where}: called the site's, found was {file}"


def _stated(raw: Mapping[str, Any]) -> Iterator[str]:
    """The gates that were judged where it was made, and failed."""
    for row in raw.get("gates") or ():
        if gates.Verdict(row["verdict"]) is gates.Verdict.FAILED:
            yield f"gate {row['gate']} failed: {', '.join(map(str, row.get('faults', ())[:2]))}"


def _measured(folder: Path, made: Bundle, manifest: Manifest | None) -> Iterator[Row]:
    """Measured runs, bare results of the client, profiles."""
    classes = manifest.profile.classes if manifest is not None and manifest.profile else {}
    answers = set(folder.glob(_EVIDENCE))
    for path in sorted((*folder.glob("**/*.json"), *folder.glob("**/*.hipkernel.csv"))):
        if path in answers or path.is_dir():
            continue
        name = printable(str(path.relative_to(folder)))
        if path.suffix == ".json":
            yield from _result(path, f"{name} is a result", made, manifest)
            continue
        try:
            found = profile.summary(path, classes)
            told = f"{found.calls} calls of {found.kernels} kernels"
            yield Row(OK, f"{name} is a profile", "; ".join([told, *found.notes]))
        except STUMBLES as err:
            yield Row(FAILED, f"{name} is a profile", why(err))


def _result(path: Path, what: str, made: Bundle, manifest: Manifest | None) -> Iterator[Row]:
    try:
        text = read_regular(path, _FILE)
    except OSError as err:
        yield Row(FAILED, what, why(err))
        return
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError, MemoryError) as err:
        cut = b'"output_throughput"' in text or b'"bench/' in text
        yield Row(FAILED if cut else NOTE, what, printable(f"it is no JSON: {err}"))
        return
    if not isinstance(raw, dict):
        return
    if str(raw.get("schema")).startswith("bench/") or {"locked", "buckets"} <= raw.keys():
        said = said_of(_record_faults(path, raw, made, manifest))
    elif "output_throughput" in raw or {"completed", "num_prompts"} <= raw.keys():
        said = said_of(_bare_faults(raw))
    else:
        return  # some other document
    yield from ([Row(FAILED, what, text) for text in said] or [Row(OK, what, "every request")])


def _bare_faults(raw: Mapping[str, Any]) -> Iterator[str]:
    yield from results.faults(results.of_json(raw))


def _record_faults(
    path: Path, raw: Mapping[str, Any], made: Bundle, manifest: Manifest | None
) -> Iterator[str]:
    """A record is of this bundle, and a result by itself; a baseline's is a result by itself."""
    run = record.parse(raw, path.name)
    if not run.buckets:
        yield "it measured no bucket"
    if raw.get("state", "done") != "done" or raw.get("error"):
        yield f"its run is {raw.get('state')}, not done"
    yield from _stated(raw)
    for bucket in run.buckets.values():
        if bucket.counted is not None and bucket.result is None:
            yield f"{bucket.name}: its counted round has no result"
        looks = [one.raw.get(key) or {} for one in bucket.rounds for key in ("before", "after")]
        if not all(isinstance(look.get("faults"), list) for look in looks):
            yield f"{bucket.name}: the process was not looked at before and after each round"
    judged = [measuring.clean(run), *measuring.comparable(run, None)]
    if not path.name.startswith("base"):
        yield from _foreign(raw, made)
        judged += measuring.dispatched(manifest, run) if manifest is not None else ()
    yield from dict.fromkeys(text for gate in judged for text in gate.faults)


def _foreign(raw: Mapping[str, Any], made: Bundle) -> Iterator[str]:
    """A run of other files, other words or other requests, whatever it measured."""
    hint = "; a baseline's record is named base*.json"
    meaning = made.inputs["manifest"]
    for what, found, wanted in (
        ("name", raw.get("name"), made.plan.name),
        ("plan", raw.get("plan"), made.plan.digest),
        ("inputs", raw.get("inputs"), digest(made.inputs)),
    ):
        if found != wanted:
            yield f"its {what} is {found or 'not said'}, the bundle's is {wanted}{hint}"
            return
    if raw.get("locked") != meaning.get("bench"):
        yield "what was to be measured is not what the bundle's manifest has"
