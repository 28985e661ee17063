"""What log, objects and binary prove together; each check raises with what was found and wanted.

The first half is called while a build runs and stops it. `compile_target`, `binary_installed` and
`ops_registered` draw gates 2, 3 and 4 from what was recorded, without looking at any file.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.errors import BadValues, BundleError

from . import elf, log, objects, twins
from .disk import no_space
from .request import BuildRequest, Wanted
from .tree import Listing

COMPILED = (".cu", ".cuh", ".hip", ".c", ".cc", ".cpp", ".cxx", ".h", ".hpp", ".inc")
_SUPPORT = re.compile(r"set\s*\(\s*(\w*ARCH\w*)\s+\"?((?:gfx[0-9a-f]+[;\s]*)+)\"?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Findings:
    """What speaks for a gate and what against it; the gate has passed when nothing does."""

    proofs: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def configure_failed(text: str, request: BuildRequest, path: Path) -> BundleError:
    """Turn the log of a configure run that failed into one error."""
    clean = log.ANSI.sub("", text)
    place = supported(request.source)
    if place and request.arch not in place[1]:
        return BadValues(
            f"the source does not support {request.arch}",
            why=f"asked: {request.arch}; supported: {', '.join(place[1])} ({place[0]})",
            fix=f"add {request.arch} to that list in the head commit, or correct kernels.arch",
        )
    if "no space left on device" in clean.lower():
        return no_space(request.build_dir)
    found = re.search(r"CMake Error[^\n]*\n+((?:[^\n]*\n){1,3})", clean)
    why = " ".join((found[1] if found else clean[-300:]).split()) or "it printed nothing"
    return BadValues("the source could not be configured", why=why, fix=f"look into {path}")


def build_failed(facts: log.Facts, path: Path, folder: Path) -> BundleError:
    """Turn a failed compile into one error that names the step and the compiler's first words."""
    if facts.full:
        return no_space(folder)
    what = facts.failed[0] if facts.failed else "a step"
    why = next((line for line in facts.errors if not line.startswith("ninja: ")), "")
    why = why or next(iter(facts.errors), "it printed no error")
    return BadValues(f"building {what} failed", why=why, fix=f"correct the source; see {path}")


def only_arch(request: BuildRequest, commands: log.Facts) -> None:
    """Require that the command lines name exactly the asked arch."""
    found = commands.archs
    if found == (request.arch,):
        return
    place = supported(request.source)
    listed = f"; the source supports {', '.join(place[1])} ({place[0]})" if place else ""
    if not found:
        why = "no compile command names any arch"
    else:
        why = f"asked: {request.arch}; on the command lines: {', '.join(found)}"
    raise BadValues(
        f"the build would not compile for exactly {request.arch}",
        why=why + listed,
        fix=f"make CMakeLists.txt take {request.arch} from PYTORCH_ROCM_ARCH",
    )


def supported(source: Path) -> tuple[str, tuple[str, ...]] | None:
    """Find the list of archs that a source supports: its place, and the names."""
    path = source / "CMakeLists.txt"
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    found = _SUPPORT.search(text)
    if not found:
        return None
    line = text[: found.start()].count("\n") + 1
    return f"CMakeLists.txt:{line}, {found[1]}", tuple(re.findall(r"gfx[0-9a-f]+", found[2]))


def objects_are_fresh(
    items: Iterable[objects.Object],
    facts: log.Facts,
    known: Mapping[str, str],
    contents: objects.Contents,
) -> dict[str, str]:
    """Return object -> digest of all it was compiled from; raise when one is older than that.

    `known` holds the digests of the last build in this folder, if it goes on from one.
    """
    compiled = {step.output for step in facts.compiled}
    fresh: dict[str, str] = {}
    stale = []
    for item in items:
        fresh[item.path] = contents.all_of(item)
        if item.path not in compiled and known.get(item.path) != fresh[item.path]:
            stale.append(item.path)
    if stale:
        raise BadValues(
            "an object was not compiled although what it is made from has changed",
            why=f"{len(stale)} of them, first {stale[0]}",
            fix="remove the build folder, and build again",
        )
    return fresh


def twins_are_fresh(request: BuildRequest, facts: log.Facts, listing: Listing) -> None:
    """Compare the converted files with the sources that are there now."""
    found = twins.faults(request.source, request.binary, facts.hipified, listing)
    if found:
        raise BadValues(
            f"{found[0].path} in the build folder is stale",
            why=found[0].why + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""),
            fix="remove the build folder, and build again",
        )


def sources_are_used(
    request: BuildRequest, items: Sequence[objects.Object]
) -> dict[str, tuple[str, ...]]:
    """Return changed source -> the objects compiled from it; raise when one is in no object.

    An edit outside every built target would be deployed by name only.
    """
    there = [p for p in request.changed if p.endswith(COMPILED) and (request.source / p).is_file()]
    used = objects.uses(items, there, {path: twins.names(path) for path in there})
    unused = sorted(path for path, names in used.items() if not names)
    if unused:
        raise BadValues(
            f"{len(unused)} changed sources were not compiled into anything",
            why=f"no object of {', '.join(w.target for w in request.extensions)} depends on"
            f" {', '.join(unused)}",
            fix="add the extension that they belong to under kernels.extensions,"
            " or ignore them with a reason under overlay.ignore",
        )
    return used


def binary(
    facts: elf.Facts, request: BuildRequest, module: str, missing: Sequence[str], torch: str
) -> None:
    """Require device code for exactly the asked arch, an entry point, and symbols that exist.

    `missing` are the symbols that no library of the build's torch defines.
    """
    if why := arch_fault(facts.archs, len(facts.bundles), request.arch):
        raise BadValues(
            f"{facts.path.name} is not for {request.arch}",
            why=why,
            fix="build from clean: remove the build folder",
        )
    if not any(name == f"PyInit_{module.rsplit('.', 1)[-1]}" for name in facts.exported):
        raise BadValues(
            f"{facts.path.name} cannot be imported as {module}",
            why=f"it does not export PyInit_{module.rsplit('.', 1)[-1]}",
            fix="correct the extension's module in the manifest, or its source",
        )
    if missing:
        raise BadValues(
            f"{facts.path.name} was not built for the torch of base.python",
            why=f"{len(missing)} symbols are in no library of torch {torch}, first {missing[0]}",
            fix="correct base.python, and build from clean",
        )


def arch_fault(found: Sequence[str], bundles: int, asked: str) -> str:
    """Return why these archs are not exactly the asked one, "" when they are."""
    if not bundles:
        return f"it has no device code at all, needs {asked}"
    if not found:
        return f"its {bundles} bundles hold code for the host only, needs {asked}"
    if tuple(found) != (asked,):
        return f"it has {', '.join(found)}, needs {asked}"
    return ""


def imports(request: BuildRequest) -> list[str]:
    """Say what a reader must know of a source in which nothing loads or builds the extension."""
    notes = []
    for want in request.extensions:
        if not _importers(request.source / request.package, want):
            notes.append(
                f"nothing below {request.package}/ imports {want.module}: it may be installed and"
                " whole, and still never be loaded"
            )
        if _left_out_of_setup(request.source / "setup.py", want):
            notes.append(f"setup.py leaves {want.module} out, so a wheel of this tree lacks it")
    return notes


def compile_target(evidence: Mapping[str, Any], arch: str, changed: Iterable[str] = ()) -> Findings:
    """Gate 2: log and binary speak of exactly the asked arch, and of every changed source."""
    faults, proofs = [], []
    said = sorted({a for step in evidence["log"]["compiled"] for a in step["archs"]})
    commands = list(evidence["commands"])
    if commands != [arch]:
        faults.append(f"the command lines name {', '.join(commands) or 'no arch'}, not {arch}")
    elif said not in ([], [arch]):
        faults.append(f"the log names {', '.join(said)}, not {arch}")
    else:
        proofs.append(f"every HIP compile command has --offload-arch={arch} and no other")
    for row in evidence["artefacts"]:
        facts = row["elf"]
        if why := arch_fault(facts["archs"], len(facts["bundles"]), arch):
            faults.append(f"{row['path']}: {why}")
        else:
            ids = sorted({i for bundle in facts["bundles"] for i in bundle[2]})
            proofs.append(f"{row['path']}: {len(facts['bundles'])} bundles, {', '.join(ids)}")
    used = evidence["sources"]
    for path in sorted(changed):
        if path.endswith(COMPILED) and not used.get(path):
            faults.append(f"{path}: changed, and compiled into nothing")
        elif path.endswith(COMPILED):
            proofs.append(f"{path}: compiled into {', '.join(used[path])}")
    return Findings(tuple(proofs), tuple(faults))


def binary_installed(
    artefact: Mapping[str, Any], promised: str, found: Mapping[str, Any]
) -> Findings:
    """Gate 3: the staged install, the bundle and the file that an import resolves to are one.

    `promised` is the sha256 in the plan, `found` the agent's answer for this extension: `origin`,
    `sha256`, and `expected`, the path where the site has it.
    """
    path, staged = artefact["path"], artefact["sha256"]
    faults = []
    # Python prefers some suffixes to others, so a second file beside ours may be taken.
    expected = f"{os.path.dirname(found.get('expected', ''))}/{os.path.basename(path)}"
    if promised != staged:
        faults.append(f"{path}: the bundle holds {promised}, the build made {staged}")
    if not found.get("origin"):
        faults.append(f"{path}: no file is found for {artefact['module']}")
    elif found["origin"] != expected:
        faults.append(f"{path}: an import takes {found['origin']} instead of {expected}")
    elif found["sha256"] != staged:
        faults.append(f"{found['origin']}: it holds {found['sha256']}, the build made {staged}")
    if faults:
        return Findings((), tuple(faults))
    return Findings((f"{found['origin']}: {staged}, as staged and as in the bundle",), ())


def joined(every: Iterable[Findings]) -> Findings:
    """Return the findings of several extensions as those of one gate."""
    found = list(every)
    proofs = tuple(line for one in found for line in one.proofs)
    return Findings(proofs, tuple(line for one in found for line in one.faults))


def ops_registered(answers: Iterable[Mapping[str, Any]]) -> Findings:
    """Gate 4: every extension loads, and every op is there with the schema asked for."""
    faults, proofs = [], []
    for answer in answers:
        if answer["state"] == "ok":
            ops = ", ".join(sorted(answer["schemas"].values())) or "no op was asked for"
            proofs.append(f"{answer['module']} loaded from {answer['origin']}: {ops}")
        else:
            faults.append(f"{answer['module']}: {answer['state']}: {answer['why']}")
    return Findings(tuple(proofs), tuple(faults))


def _importers(package: Path, want: Wanted) -> list[str]:
    """Return the modules that import the extension, read as syntax: a comment is no import."""
    name = want.module.rsplit(".", 1)[-1]
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text("utf-8", "replace")
        if name not in text:
            continue
        try:
            tree = ast.parse(text)
        except SyntaxError:
            continue
        if any(_imports(node, want.module, name) for node in ast.walk(tree)):
            found.append(str(path))
    return found


def _imports(node: ast.AST, module: str, name: str) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name == module for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        whole = [f"{node.module or ''}.{alias.name}".lstrip(".") for alias in node.names]
        return module in whole or (node.level > 0 and name in (a.name for a in node.names))
    return False


def _left_out_of_setup(path: Path, want: Wanted) -> bool:
    """True when setup.py names the extension in comments only."""
    if not path.is_file():
        return False
    lines = [
        line for line in path.read_text("utf-8", "replace").splitlines() if want.module in line
    ]
    return bool(lines) and all(line.lstrip().startswith("#") for line in lines)
