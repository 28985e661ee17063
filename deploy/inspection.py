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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deploy import bundle as bundles
from deploy import evidence
from deploy import manifest as manifests
from deploy.agent.words import Verb
from deploy.bundle import Bundle
from deploy.errors import BadValues, BundleError
from deploy.kernels.elf import read as read_elf
from deploy.layout import HERE, Layout
from deploy.manifest import Manifest
from deploy.measure import record
from deploy.measure import result as results

OK, FAILED, NOTE = "ok", "FAILED", "note"
_NAME = re.compile(r"(.+)-([0-9a-f]{12})\.pyz")
# What the rules lock or forbid for the service, as its own flags say it.
_FORBIDDEN = (
    (re.compile(r"--(speculative|spec-decod|num-speculative|draft-model)"), "speculative decoding"),
    (re.compile(r"--(quantization|load-format=(gguf|bitsandbytes))"), "quantised weights"),
    (re.compile(r"--scheduler-cls|--scheduling-policy"), "another scheduler"),
)
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
        return [*_bundle_rows(found[0]), *_folder_rows(path, found[0])]
    if not path.is_file():
        raise BadValues(
            "there is no submission to check",
            why=f"{path} is no file and no folder",
            fix="give --file with a bundle (NAME-<12 hex>.pyz), or the folder that is handed in",
        )
    return _bundle_rows(path)


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


def _bundle_rows(path: Path) -> list[Row]:
    try:
        made = bundles.read(path)
    except BundleError as err:
        return [Row(FAILED, "the bundle is whole", err.why)]
    rows = [Row(OK, "the bundle is whole", f"every member is as its digest says; {made.sha256}")]
    for what, check in _BUNDLE:
        rows += _run(what, check, made)
    try:
        manifest = manifest_of(made)
    except (BundleError, KeyError, TypeError) as err:
        return [*rows, Row(FAILED, "its manifest can be read", str(err).splitlines()[0])]
    for what, checked in _MANIFEST:
        rows += _run(what, lambda m, c=checked: c(m, manifest), made)  # type: ignore[misc]
    return rows


def _run(what: str, check: Callable[[Bundle], Iterator[str]], made: Bundle) -> list[Row]:
    """A check yields what is wrong; its last word is marked.

    "=" stands before what was found right, "?" before why nothing could be checked.
    """
    said = list(check(made))
    faults = [text for text in said if not text.startswith(("=", "?"))]
    if faults:
        return [Row(FAILED, what, text) for text in faults]
    last = said[-1] if said else "="
    return [Row(NOTE if last.startswith("?") else OK, what, last[1:])]


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
    env = manifest.launch.env if manifest.launch else {}
    for name, variable in env.items():
        if not variable.why.strip():
            yield f"{name} has no reason"
    yield f"={len(env)} custom variables, each with value and reason"


def _rules(_: Bundle, manifest: Manifest) -> Iterator[str]:
    words = manifest.launch.serve if manifest.launch else ()
    for word in words:
        for pattern, what in _FORBIDDEN:
            if pattern.match(word):
                yield f"{word}: {what} is not allowed"
    yield f"={len(words)} words for the server, none forbidden"


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
    ("the server's words obey the rules", _rules),
    ("compiled for the asked arch only", _arch),
    ("what is measured is pinned", _measurable),
)


# --- of the folder --------------------------------------------------------------------------------


def _folder_rows(folder: Path, bundle: Path) -> list[Row]:
    try:
        made = bundles.read(bundle)
    except BundleError:
        return []  # said already
    return [
        *_scripts(folder, made),
        *_readme(folder),
        *_evidence(folder, made),
        *_records(folder),
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


def _readme(folder: Path) -> Iterator[Row]:
    what = "a README names third-party code at its head"
    found = sorted(folder.glob("README*"))
    if not found:
        yield Row(FAILED, what, "there is no README")
        return
    head = "\n".join(found[0].read_text("utf-8", "replace").splitlines()[:40]).lower()
    if re.search(r"third[- ]party|第三方", head):
        yield Row(OK, what, found[0].name)
    else:
        yield Row(FAILED, what, f"{found[0].name} says nothing of third-party code in 40 lines")


def _evidence(folder: Path, made: Bundle) -> Iterator[Row]:
    what = "evidence answers this bundle's plan"
    found = sorted(folder.glob("evidence*.json"))
    if not found:
        yield Row(NOTE, what, "none is handed in: deploy and verify it yourself")
    for path in found:
        try:
            told = evidence.parse(path.read_bytes())
        except (BundleError, OSError) as err:
            yield Row(FAILED, what, f"{path.name}: {err}".splitlines()[0])
            continue
        if not told.answers(made.plan):
            yield Row(FAILED, what, f"{path.name}: it speaks of another plan")
        elif told.verb is not Verb.VERIFY:
            yield Row(FAILED, what, f"{path.name}: it is of a {told.verb.value}, not of a verify")
        elif told.raw.get("worktree"):
            yield Row(FAILED, what, f"{path.name}: it is of a work tree, not of what was locked")
        elif told.tree and told.tree != made.plan.tree:
            yield Row(FAILED, what, f"{path.name}: the tree that was read is not the plan's")
        elif told.faults or int(told.exit):
            yield Row(
                FAILED, what, f"{path.name}: exit {int(told.exit)}, {len(told.faults)} faults"
            )
        else:
            yield Row(OK, what, f"{path.name}: {len(told.files)} files as planned")


def _records(folder: Path) -> Iterator[Row]:
    """Measured runs, and bare results of the client: each by what it says itself."""
    for path in sorted((*folder.glob("**/*.json"), *folder.glob("**/*.hipkernel.csv"))):
        what = f"{path.relative_to(folder)} is a result"
        if path.suffix == ".json" and (raw := _json(path)):
            yield from _record(path, what, raw)


def _record(path: Path, what: str, raw: Mapping[str, Any]) -> Iterator[Row]:
    try:
        if raw.get("schema") == record.SCHEMA:
            run = record.parse(raw, path.name)
            said = [f"{b.name}: {t}" for b in run.buckets.values() for t in record.faults(run, b)]
        elif "output_throughput" in raw and "completed" in raw:
            said = list(results.faults(results.of_json(raw)))
        else:
            return
    except (BundleError, ValueError, TypeError) as err:
        said = [str(err).splitlines()[0]]
    yield from ([Row(FAILED, what, text) for text in said] or [Row(OK, what, "every request")])


def _json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _texts(value: Any) -> Any:
    """A manifest's values are texts; JSON's numbers and truths would not be read as such."""
    if isinstance(value, Mapping):
        return {str(key): _texts(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_texts(child) for child in value]
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if value is None else str(value)
