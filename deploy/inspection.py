"""What an organiser can check of a submission without a card: its bundle, or the whole folder.

`inspect` is this module's face: one row a check, in the order in which a person would ask. It runs
no code of the submission and changes nothing.
"""

from __future__ import annotations

import ast
import json
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deploy import bundle as bundles
from deploy import evidence, gates, measuring
from deploy import manifest as manifests
from deploy.agent.words import Verb, digest, printable
from deploy.bundle import Bundle
from deploy.errors import BadValues, BundleError
from deploy.evidence import Evidence
from deploy.kernels.elf import read as read_elf
from deploy.layout import HERE, Layout
from deploy.manifest import Manifest
from deploy.measure import profile, record
from deploy.measure import result as results
from deploy.regular import open_regular, read_regular
from deploy.service import rules

OK, FAILED, NOTE = "ok", "FAILED", "note"
_NAME = re.compile(r"(.+)-([0-9a-f]{12})\.pyz")
_FILE = 256 * 2**20  # bytes of one JSON file, as for a record
_EVIDENCE = "evidence*.json"
_HEAD = 40  # lines of a README
# Whatever stands in what is handed in, the table is printed: the check that stumbles has failed.
_STUMBLES = (BundleError, *bundles.DAMAGE, TypeError, AttributeError, ArithmeticError, MemoryError)
_SCHEDULER = re.compile(r"^vllm/v1/core/sched/")


class Row(NamedTuple):
    """One check: ok, FAILED or note; what was checked, and what was found."""

    state: str
    what: str
    found: str


def inspect(path: Path) -> list[Row]:
    """Check a bundle, or a folder that holds exactly one.

    Raises:
        BadValues: there is nothing to check.
    """
    if path.is_dir():
        found = sorted(path.glob("*.pyz"))
        if len(found) != 1:
            raise BadValues(
                f"{path} is no submission",
                why=f"it holds {len(found)} bundles (*.pyz), one is needed",
                fix="name the folder that is handed in, or the bundle itself",
            )
        return _rows(found[0], path)
    if not path.is_file():
        raise BadValues(
            "there is no submission to check",
            why=f"{path} is no file and no folder",
            fix="give --file with a bundle (NAME-<12 hex>.pyz), or the folder that is handed in",
        )
    return _rows(path)


def chosen(name: str = "", here: Path = Path(), layout: Layout = HERE) -> Path:
    """What is checked where no file is named: this folder, or the newest bundle of a manifest.

    Raises:
        BadValues: neither holds a bundle.
    """
    if not name and any(here.glob("*.pyz")):
        return here
    name = manifests.choose(name, layout)
    made = layout.out.glob(f"{name}-{'[0-9a-f]' * 12}.pyz")
    newest = max(made, key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        raise BadValues(
            "there is no submission to check",
            why=f"there is no bundle of {name} below {layout.out}, and no --file was given",
            fix=f"run `./inv bundle -n {name}`, or give --file with a bundle or a folder",
        )
    return newest


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


def _rows(path: Path, folder: Path | None = None) -> list[Row]:
    what = "the bundle is whole"
    if not path.is_file():  # a pipe of that name would be waited for
        return [Row(FAILED, what, f"{printable(path.name)} is not a regular file")]
    try:
        made = bundles.read(path)
    except _STUMBLES as err:
        return [Row(FAILED, what, _why(err))]
    rows = [Row(OK, what, f"every member is as its digest says; {made.sha256}")]
    for what, check in _BUNDLE:
        rows += _run(what, check, made)
    manifest = None
    try:
        manifest = manifest_of(made)
    except _STUMBLES as err:
        rows.append(Row(FAILED, "its manifest can be read", _why(err)))
    for what, checked in _MANIFEST if manifest is not None else ():
        rows += _run(what, lambda m, c=checked: c(m, manifest), made)  # type: ignore[misc]
    return rows if folder is None else [*rows, *_folder_rows(folder, made, manifest)]


def _run(what: str, check: Callable[[Bundle], Iterator[str]], made: Bundle) -> list[Row]:
    """A check yields what is wrong; its last word is marked.

    "=" stands before what was found right, "?" before why nothing could be checked.
    """
    said = _said(check(made))
    faults = [text for text in said if not text.startswith(("=", "?"))]
    if faults:
        return [Row(FAILED, what, text) for text in faults]
    last = said[-1] if said else "="
    return [Row(NOTE if last.startswith("?") else OK, what, last[1:])]


def _said(texts: Iterable[str]) -> list[str]:
    """All that a check says, and over what it stumbled."""
    found: list[str] = []
    try:
        found.extend(map(printable, texts))  # one by one: what came before a stumble is kept
    except _STUMBLES as err:
        found.append(_why(err))
    return found


def _why(err: BaseException) -> str:
    """One line of any error: what a file made of one of ours has no reason of its own."""
    if isinstance(err, BundleError):
        said = err.why
    elif isinstance(err, OSError):
        said = err.strerror or str(err)
    else:
        said = f"it cannot be checked: {type(err).__name__}: {err}"
    return printable(said.partition("\n")[0])


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


_BUNDLE: tuple[tuple[str, Callable[[Bundle], Iterator[str]]], ...] = (
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
    for name in sorted(set(record_names()) - set(bench.buckets)):
        yield f"the official bucket {name} is missing"
    yield f"={len(bench.buckets)} buckets, their data sets pinned by sha256"


def record_names() -> tuple[str, ...]:
    from deploy.measure.score import FULL

    return tuple(FULL)


_MANIFEST: tuple[tuple[str, Callable[[Bundle, Manifest], Iterator[str]]], ...] = (
    ("custom variables are listed with reasons", _variables),
    ("the server's words obey the rules", _words),
    ("compiled for the asked arch only", _arch),
    ("what is measured is pinned", _measurable),
)


# --- of the folder --------------------------------------------------------------------------------


def _folder_rows(folder: Path, made: Bundle, manifest: Manifest | None) -> list[Row]:
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
        if not path.is_file():
            yield Row(FAILED, what, f"{name} is missing")
        elif bundles.file_sha256(path) != row["sha256"]:
            yield Row(FAILED, what, f"{name} was edited by hand, or is another bundle's")
        else:
            yield Row(OK, what, name)


def _readme(folder: Path) -> Row:
    what = "a README names third-party code at its head"
    why = "there is no README"
    for path in sorted(folder.glob("README*")):
        name = printable(path.name)
        try:
            with open_regular(path) as file:
                head = b"".join(file.readline(_FILE) for _ in range(_HEAD)).decode(
                    "utf-8", "replace"
                )
        except OSError as err:
            why = f"{name}: {_why(err)}"
            continue
        if re.search(r"third[- ]party|第三方", head.lower()):
            return Row(OK, what, name)
        return Row(FAILED, what, f"{name} says nothing of third-party code in {_HEAD} lines")
    return Row(FAILED, what, why)


def _evidence(folder: Path, made: Bundle) -> Iterator[Row]:
    what = "evidence answers this bundle's plan"
    found = sorted(folder.glob(_EVIDENCE))
    if not found:
        yield Row(NOTE, what, "none is handed in: deploy and verify it yourself")
    for path in found:
        name, said = printable(path.name), _said(_evidence_faults(path, made))
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
        except _STUMBLES as err:
            yield Row(FAILED, f"{name} is a profile", _why(err))


def _result(path: Path, what: str, made: Bundle, manifest: Manifest | None) -> Iterator[Row]:
    try:
        text = read_regular(path, _FILE)
    except OSError as err:
        yield Row(FAILED, what, _why(err))
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
        said = _said(_record_faults(path, raw, made, manifest))
    elif "output_throughput" in raw or {"completed", "num_prompts"} <= raw.keys():
        said = _said(_bare_faults(raw))
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


def _texts(value: Any) -> Any:
    """A manifest's values are texts; JSON's numbers and truths would not be read as such."""
    if isinstance(value, Mapping):
        return {str(key): _texts(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_texts(child) for child in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if value is None else str(value)
