"""What a build leaves behind: artefacts, logs, the source patch, and the document `kernels/1`.

All of it goes into one folder, each file whole or not at all, and the document last: a folder
without it holds no finished build.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from deploy.agent.words import BundleError
from deploy.errors import BadValues, Refused, Unfit
from deploy.git import Git

from . import elf, log, toolchain
from .record import Record, put
from .request import Artefact, BuildRequest, Wanted
from .workshop import Workshop

SCHEMA = "kernels/1"
DOCUMENT = "kernels.json"
PATCH = "source.patch"


def document(
    shop: Workshop,
    *,
    tree: str,
    reasons: Sequence[str],
    facts: log.Facts,
    commands: Sequence[str],
    sources: Mapping[str, Sequence[str]],
    staged: Sequence[tuple[Artefact, elf.Facts]],
    notes: Sequence[str],
    warnings: Sequence[str],
    incidental: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the evidence of one build; what may differ between two equal builds is incidental."""
    request = shop.request
    found = {
        "schema": SCHEMA,
        "name": request.name,
        "commit": request.head,
        "base": request.base,
        "source_tree": tree,
        "sources_digest": request.sources,
        "arch": request.arch,
        "preset": request.preset,
        "toolchain": shop.chain.to_json(),
        "environment": toolchain.recorded(shop.env),
        "rebuilt": True,
        "configured": list(reasons),
        "log": facts.to_json(),
        "commands": list(commands),
        "changed": list(request.changed),
        "sources": {path: list(names) for path, names in sources.items()},
        "artefacts": [{**one.to_json(), "elf": found.to_json()} for one, found in staged],
        "notes": list(notes),
        "warnings": list(warnings),
        "incidental": dict(incidental),
    }
    neutral: dict[str, Any] = _neutral(found, request)
    return neutral


def hipified(evidence: Mapping[str, Any], request: BuildRequest) -> tuple[log.Hipified, ...]:
    """Return the lines of hipify from a document, with the paths they had."""
    rows = evidence.get("log", {}).get("hipified", ())
    home = str(request.build_dir)
    return tuple(log.Hipified(f"{home}/{a}", f"{home}/{b}", ending) for a, b, ending in rows)


def staged(stage: Path, want: Wanted) -> tuple[Artefact, elf.Facts]:
    """Find the one installed file of an extension and read it."""
    found = sorted((stage / want.stem).parent.glob(Path(want.stem).name + ".*so"))
    if len(found) != 1:
        raise BadValues(
            f"component {want.component} did not install {want.module}",
            why=f"below {stage} there are {len(found)} files named {want.stem}.*so",
            fix="correct the extension's module or component in the manifest",
        )
    facts = elf.read(found[0])
    artefact = Artefact(
        module=want.module,
        path=found[0].relative_to(stage).as_posix(),
        mode=want.mode,
        size=facts.size,
        sha256=facts.sha256,
        file=found[0],
    )
    return artefact, facts


def install_failed(want: Wanted, kept: Path, path: Path) -> BadValues:
    lines = [line for line in path.read_text("utf-8", "replace").splitlines() if line.strip()]
    return BadValues(
        f"cmake --install of component {want.component} failed",
        why=lines[-1] if lines else "it printed nothing",
        fix=f"look into {kept}",
    )


def collect(
    request: BuildRequest, artefacts: Sequence[Artefact], evidence: Mapping[str, Any]
) -> tuple[Artefact, ...]:
    """Copy the artefacts out and write the document; return the artefacts where they lie now."""
    patch = _patch(request) if request.base else None
    with _written(request.out):
        taken = tuple(_collect(request.out, artefact) for artefact in artefacts)
        if patch is not None:
            put(request.out / PATCH, patch)
        put(request.out / DOCUMENT, json.dumps(evidence, indent=2).encode() + b"\n")
    return taken


def kept(before: Record, request: BuildRequest) -> tuple[Artefact, ...] | None:
    """Return the collected artefacts of the last build, if each still has the bytes it had."""
    there = (request.out / DOCUMENT).is_file()
    return _whole(before.evidence, request.out) if there else None


def read(out: Path) -> tuple[tuple[Artefact, ...], Mapping[str, Any]]:
    """Return the artefacts and the document of the finished build in `out`.

    Raises:
        BadValues: there is none, or an artefact is no longer what its document says.
    """
    try:
        evidence = json.loads((out / DOCUMENT).read_text("utf-8"))
        schema = evidence["schema"]
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise _none(out, f"{out / DOCUMENT} cannot be read: {err}") from err
    if schema != SCHEMA:
        raise _none(out, f"{DOCUMENT} is {schema}, this product reads {SCHEMA}")
    found = _whole(evidence, out)
    if found is None:
        raise _none(out, "an artefact is missing, or its bytes are not those of the document")
    return found, evidence


def forget(out: Path) -> None:
    """Remove the results of an earlier build: from here on they are not this source's."""
    with _written(out):
        out.mkdir(parents=True, exist_ok=True)
        # The document goes first; without it nothing in the folder counts.
        for path in (out / DOCUMENT, *sorted(out.iterdir())):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def logs_kept(request: BuildRequest) -> Iterator[None]:
    """Copy logs back, after a failure too: the build folder may die with its container."""
    try:
        yield
    except BaseException:
        # What stopped the build is told, not that its logs found no room.
        with suppress(Unfit):
            _keep_logs(request)
        raise
    _keep_logs(request)


def _keep_logs(request: BuildRequest) -> None:
    target = request.out / "logs"
    with _written(request.out):
        shutil.rmtree(target, ignore_errors=True)
        for path in sorted((request.build_dir / "logs").glob("*.log")):
            target.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path.name)


@contextmanager
def _written(out: Path) -> Iterator[None]:
    """Tell where results found no place: it is not the folder that is built in."""
    try:
        yield
    except OSError as err:
        raise Unfit(
            f"cannot write to {out}",
            why=err.strerror or str(err),
            fix="let it be writable and have room (`./inv gc` shows what out/ holds), then ask"
            " again",
        ) from err


def _whole(evidence: Mapping[str, Any], out: Path) -> tuple[Artefact, ...] | None:
    found = []
    for row in evidence.get("artefacts", ()):
        values = {key: row[key] for key in ("module", "path", "mode", "size", "sha256")}
        artefact = Artefact(file=out / row["path"], **values)
        if artefact.file.is_symlink() or not artefact.file.is_file():
            return None
        if _sha256(artefact.file) != artefact.sha256:
            return None
        found.append(artefact)
    return tuple(found) or None


def _none(out: Path, why: str) -> BadValues:
    return BadValues(
        f"there is no finished build in {out}", why=why, fix="run `./inv build-kernels` first"
    )


def _collect(out: Path, artefact: Artefact) -> Artefact:
    target = out / artefact.path
    target.parent.mkdir(parents=True, exist_ok=True)
    put(target, artefact.file.read_bytes())
    target.chmod(int(artefact.mode, 8))
    if (again := _sha256(target)) != artefact.sha256:
        raise BundleError(
            f"{target} could not be written",
            why=f"read back it is {again}, the stage holds {artefact.sha256}",
            fix="check that disk, and build again",
            exit=Refused.exit,
        )
    return replace(artefact, file=target)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _patch(request: BuildRequest) -> bytes:
    git = Git(request.repo, request.own_repo)
    options = (
        "--no-renames",
        "--full-index",
        "--binary",
        "--no-color",
        "--no-ext-diff",
        "-p",
        "-r",
    )
    return git.run("diff-tree", *options, "--no-textconv", request.base, request.head).stdout


def _neutral(value: Any, request: BuildRequest) -> Any:
    """Replace the build folder at the start of paths, so that equal builds say equal things."""
    if isinstance(value, dict):
        return {key: _neutral(child, request) for key, child in value.items()}
    if isinstance(value, list):
        return [_neutral(child, request) for child in value]
    if isinstance(value, str) and value.startswith(f"{request.build_dir}/"):
        return value[len(str(request.build_dir)) + 1 :]
    return value
