"""From a manifest to a build, and from a finished build to the plan.

An artefact belongs to a commit when the files that extensions are compiled from are the same, byte
for byte, as those of the commit it was built from: an edited Python file makes no kernel stale.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deploy.agent.words import digest
from deploy.errors import BadValues, StaleLock, Unfit
from deploy.git import Git
from deploy.globs import first_match
from deploy.layout import Layout
from deploy.manifest import Manifest
from deploy.values import Delta, PathClass

from . import build, elf, record, results, tree
from .proof import Findings
from .request import Artefact, BuildRequest, Wanted
from .runner import Local


def out_of(layout: Layout, name: str) -> Path:
    """Return the folder that holds the results of the last build of a manifest."""
    return layout.out_of(name) / "kernels"


def request_of(manifest: Manifest, repo: Path, delta: Delta, layout: Layout) -> BuildRequest:
    """Return what a manifest asks to be built.

    Raises:
        BadValues: the manifest has no `kernels:`.
    """
    kernels = manifest.kernels
    if kernels is None:
        raise BadValues(
            f"{manifest.name} has nothing to compile",
            why="its manifest has no `kernels:`",
            fix=f"add it to manifests/{manifest.name}.yaml; example.yaml shows one",
        )
    own = manifest.source.wheel is not None
    wanted = tuple(
        Wanted(
            module=ext.module,
            namespace=ext.namespace,
            target=ext.target,
            component=ext.component,
            ops=ext.ops,
            mode=ext.mode,
        )
        for ext in kernels.extensions.values()
    )
    return BuildRequest(
        name=manifest.name,
        repo=repo,
        base=delta.base,
        head=delta.head,
        package=manifest.source.package,
        arch=kernels.arch,
        preset=kernels.preset,
        extensions=wanted,
        env_script=manifest.base.env_script,
        python=manifest.base.python,
        changed=changed(delta),
        sources=sources_digest(Git(repo, own), delta.head, kernels.sources),
        # One folder a manifest: a build owns its folder.
        build_dir=Path(kernels.build_dir) / manifest.name,
        out=out_of(layout, manifest.name),
        presets=layout.top / "kernels",
        ccache_dir=Path(kernels.ccache.dir or Path(kernels.build_dir) / "ccache"),
        ccache_size=kernels.ccache.size,
        jobs=kernels.jobs,
        own_repo=own,
    )


def changed(delta: Delta) -> tuple[str, ...]:
    """Return the changed paths that are there to be compiled."""
    return tuple(change.path for change in delta.of(PathClass.KERNEL) if change.new is not None)


def sources_digest(git: Git, commit: str, globs: Iterable[str]) -> str:
    """Return one digest over path, mode and content of everything that is compiled."""
    patterns = tuple(globs)
    listing = tree.of(git, commit).listing
    return digest({p: list(r) for p, r in listing.items() if first_match(patterns, p)})


def finished(
    manifest: Manifest, repo: Path, delta: Delta, layout: Layout
) -> tuple[tuple[Artefact, ...], Mapping[str, Any]]:
    """Return artefacts and evidence of the build that belongs to this commit; nothing without one.

    Raises:
        StaleLock: there is a build, but of other sources.
    """
    out = out_of(layout, manifest.name)
    if manifest.kernels is None or not (out / results.DOCUMENT).is_file():
        return (), {}
    artefacts, evidence = results.read(out)
    git = Git(repo, manifest.source.wheel is not None)
    now = sources_digest(git, delta.head, manifest.kernels.sources)
    if evidence.get("sources_digest") != now:
        raise _stale(manifest.name, f"it was built from commit {evidence['commit'][:12]},"
                     f" whose kernel sources are not those of {delta.head[:12]}")  # fmt: skip
    return artefacts, evidence


def audited(
    manifest: Manifest, repo: Path, delta: Delta, layout: Layout, evidence: Mapping[str, Any]
) -> Findings:
    """Ask the build folder, where it lies on this machine, whether it still stands for the build.

    A folder that is elsewhere, or holds a later build, has nothing to say.
    """
    request = request_of(manifest, repo, delta, layout)
    before = record.read(request.build_dir)
    there = Path(request.python).exists() and before.complete
    mine = before.evidence.get("artefacts") == evidence["artefacts"]
    if evidence["incidental"]["where"] != Local.where or not (there and mine):
        return Findings()
    try:
        return build.audit(replace(request, head=before.head, changed=tuple(before.changed)))
    except Unfit as err:
        return Findings((f"the build folder could not be asked: {err.why}",))


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """One artefact and a second build of it; `difference` is "" when the bytes are equal."""

    path: str
    first: str
    again: str
    difference: str


def rebuilt(
    manifest: Manifest, repo: Path, delta: Delta, layout: Layout, artefacts: Iterable[Artefact]
) -> list[Rebuilt]:
    """Build from nothing once more, without the compiler cache's help, and compare the bytes.

    Raises:
        Unfit: this machine has no toolchain. And whatever `build.build` raises.
    """
    request = request_of(manifest, repo, delta, layout)
    folder = request.build_dir.with_name(f"{request.build_dir.name}-again")
    again = replace(
        request, build_dir=folder, out=folder / "out", ccache_dir=folder.with_name("ccache-again")
    )
    for place in (again.build_dir, again.ccache_dir):
        assert place is not None
        shutil.rmtree(place, ignore_errors=True)
    try:
        made = {one.path: one for one in build.build(again).artefacts}
        return [_compared(one, made.get(one.path)) for one in artefacts]
    finally:
        for place in (again.build_dir, again.ccache_dir):
            assert place is not None
            shutil.rmtree(place, ignore_errors=True)


def _compared(one: Artefact, other: Artefact | None) -> Rebuilt:
    if other is None:
        return Rebuilt(one.path, one.sha256, "", "the rebuild has no such file")
    difference = elf.first_difference(elf.read(one.file), elf.read(other.file))
    return Rebuilt(one.path, one.sha256, other.sha256, difference)


def pinned(artefacts: Iterable[Artefact], evidence: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a lock pins of a build."""
    if not evidence:
        return {}
    return {
        "artefacts": [artefact.to_json() for artefact in artefacts],
        "arch": evidence["arch"],
        "preset": evidence["preset"],
        "sources": evidence["sources_digest"],
        "toolchain": evidence["toolchain"]["digest"],
    }


def _stale(name: str, why: str) -> StaleLock:
    return StaleLock(
        f"the kernels of {name} are of another source",
        why=why,
        fix=f"run `./inv build-kernels -n {name}`",
    )
