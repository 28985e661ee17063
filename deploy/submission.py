"""A manifest and everything it resolves to: repository, difference, plan and lock inputs.

`resolve` is this module's face. Nothing in here writes to a target or believes a lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy import listing, scripts, series, source, wheel
from deploy import manifest as manifests
from deploy.agent.plan import Extension, Plan, PlannedFile, State
from deploy.bundle import Bundle
from deploy.errors import BadValues
from deploy.kernels import order
from deploy.kernels.request import Artefact, planned
from deploy.layout import Layout
from deploy.lock import SCHEMA
from deploy.manifest import Manifest
from deploy.plan import make_plan
from deploy.scripts import Rendered
from deploy.values import Blob, Change, Delta

# A folder beside a series that holds the base itself, for manifests that need no network.
OWN_BASE = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What a manifest means today. `inputs` is what a lock would pin of it."""

    manifest: Manifest
    layout: Layout
    repo: Path
    delta: Delta
    plan: Plan
    inputs: Mapping[str, Any]
    wheel: wheel.Wheel | None = None
    base: listing.Base = field(default_factory=listing.Base)
    artefacts: tuple[Artefact, ...] = ()
    scripts: tuple[Rendered, ...] = ()  # what lies in launch.dir
    built: Mapping[str, Any] = field(default_factory=dict)  # kernels/1, of the build they are from
    worktree: bool = False  # the head is a throw-away commit of the files as they lie there

    @property
    def name(self) -> str:
        return self.manifest.name

    @property
    def out(self) -> Path:
        return self.layout.out_of(self.name)

    @property
    def waived(self) -> dict[int, str]:
        """Gates that the manifest says cannot apply, with its reasons."""
        return {int(n): why for n, why in self.manifest.gates.not_applicable.items()}


def resolve(manifest: Manifest, layout: Layout, *, worktree: bool = False) -> Submission:
    """Look up everything that `manifest` names.

    With `worktree` the head is a throw-away commit of the files as they lie there now; such a
    submission cannot be locked.

    Raises:
        BadValues, StaleLock, Unfit, Unreachable: from the part that could not be resolved.
    """
    repo, delta, pinned = changes(manifest, layout, worktree=worktree)
    artefacts, built = order.finished(manifest, repo, delta, layout)
    plan = _plan(manifest, delta, tuple(_planned(manifest, one) for one in artefacts))
    base = _base(manifest, layout, repo, delta, pinned)
    rendered = scripts.on_target(manifest)
    return Submission(
        manifest=manifest,
        layout=layout,
        repo=repo,
        delta=delta,
        plan=plan,
        inputs=_inputs(manifest, delta, base, rendered) | _kernels(order.pinned(artefacts, built)),
        wheel=pinned,
        base=base,
        artefacts=artefacts,
        scripts=rendered,
        built=built,
        worktree=worktree,
    )


def of_bundle(manifest: Manifest, layout: Layout, made: Bundle) -> Submission:
    """What a bundle says of itself; no source was looked at, so its difference has no paths."""
    told = made.inputs
    delta = Delta(base=told["base"], head=told["head"], head_time=told["head_time"], changes=())
    return Submission(
        manifest=manifest, layout=layout, repo=layout.top, delta=delta, plan=made.plan, inputs=told
    )


def changes(
    manifest: Manifest, layout: Layout, *, worktree: bool = False
) -> tuple[Path, Delta, wheel.Wheel | None]:
    """Return the repository, the difference base..head, and the wheel that the base is from."""
    repo, base, head, pinned = _commits(manifest, layout, worktree=worktree)
    delta = source.delta(
        repo,
        base=base,
        head=head,
        rules=_rules(manifest),
        may_be_dirty=manifest.source.may_be_dirty,
        check_worktree=not worktree and manifest.source.wheel is None,
    )
    return repo, delta, pinned


def _commits(
    manifest: Manifest, layout: Layout, *, worktree: bool
) -> tuple[Path, str, str, wheel.Wheel | None]:
    wanted = manifest.source
    if wanted.wheel is not None:
        if worktree:
            raise _no_worktree(manifest)
        return _of_wheel(manifest, layout)
    repo = (layout.top / Path(wanted.git).expanduser()).resolve()
    if not repo.exists():
        raise BadValues(
            f"source.git {repo} is not there",
            why=f"manifests/{manifest.name}.yaml names it, and there is no such folder",
            fix="clone it there, or name the folder where it is",
        )
    head = _head(repo, manifest) if worktree else wanted.head
    return repo, wanted.base, head, None


def _head(repo: Path, manifest: Manifest) -> str:
    """A throw-away commit of the work tree, whatever head the manifest names."""
    return source.worktree_commit(repo, _rules(manifest), manifest.source.may_be_dirty)


def _of_wheel(manifest: Manifest, layout: Layout) -> tuple[Path, str, str, wheel.Wheel]:
    spec = manifest.source.wheel
    assert spec is not None
    folder = layout.top / manifest.source.series
    own = folder / OWN_BASE
    found = wheel.fetch(
        wheel.WheelSpec(
            name=spec.name,
            version=spec.version,
            sha256=spec.sha256,
            platform=spec.platform,
            python=spec.python,
        ),
        layout.cache,
        made_from=own if own.is_dir() else None,
    )
    repo = layout.cache / "repos" / f"{spec.sha256}.git"
    base = wheel.base_commit(found, repo)
    return repo, base, series.head_commit(repo, base, folder), found


def _no_worktree(manifest: Manifest) -> BadValues:
    return BadValues(
        f"{manifest.name} has no work tree to deploy",
        why="its source is a pinned wheel and a series of edits",
        fix="edit the series, or use a manifest with `source.git`",
    )


def _rules(manifest: Manifest) -> source.Rules:
    return source.Rules(
        include=manifest.overlay.include,
        ignore=manifest.overlay.ignore,
        kernels=manifest.kernel_sources,
    )


def _plan(manifest: Manifest, delta: Delta, artefacts: tuple[PlannedFile, ...] = ()) -> Plan:
    base, kernels = manifest.base, manifest.kernels
    # An extension is proven only where its artefact is part of the plan.
    built = {entry.path for entry in artefacts}
    return make_plan(
        name=manifest.name,
        package=manifest.source.package,
        python=base.python,
        site=base.site,
        env_script=base.env_script,
        launch_dir=manifest.launch.dir if manifest.launch else "",
        requires=base.requires,
        delta=delta,
        accept={path: variant.sha256 for path, variant in manifest.overlay.accept.items()},
        artefacts=artefacts,
        extensions=[
            Extension(module=ext.module, namespace=ext.namespace, ops=ext.ops)
            for ext in (kernels.extensions.values() if kernels and built else ())
        ],
    )


def _planned(manifest: Manifest, artefact: Artefact) -> PlannedFile:
    """Return an artefact as a file of the plan; what a vendor may have there is in `accept`."""
    variant = manifest.overlay.accept.get(artefact.path)
    known = variant.sha256 if variant else ()
    return planned(artefact, *(State(type="file", mode="0644", sha256=sha) for sha in known))


def _kernels(found: Mapping[str, Any]) -> dict[str, Any]:
    return {"kernels": found} if found else {}


def _base(
    manifest: Manifest, layout: Layout, repo: Path, delta: Delta, pinned: wheel.Wheel | None
) -> listing.Base:
    """What the base holds, file by file; a vendor's own listing wins where there is one."""
    if pinned is not None:
        found = listing.of_wheel(pinned)
    else:
        found = listing.of_tree(repo, delta.base, manifest.source.package, layout.cache)
    files = layout.files(manifest.name)
    return listing.with_vendor(found, files, pinned) if files.exists() else found


def _inputs(
    manifest: Manifest, delta: Delta, base: listing.Base, rendered: tuple[Rendered, ...]
) -> dict[str, Any]:
    """What a lock pins and a bundle carries: no path of this machine, no clock but the commit's."""
    return {
        "schema": SCHEMA,
        "manifest": manifest.meaning(),
        "base": delta.base,
        "head": delta.head,
        "head_time": delta.head_time,
        "files": [_row(change) for change in delta.changes],
        "base_files": dict(base.pin),
        "scripts": scripts.pinned(rendered),
    }


def _row(change: Change) -> dict[str, Any]:
    return {
        "path": change.path,
        "class": change.cls.value,
        "reason": change.reason,
        "old": _side(change.old),
        "new": _side(change.new),
    }


def _side(blob: Blob | None) -> dict[str, Any] | None:
    if blob is None:
        return None
    return {"blob": blob.oid, "mode": blob.mode, "sha256": blob.sha256, "size": blob.size}


def load(name: str, layout: Layout) -> Manifest:
    """Return the manifest that is meant by `name` (see `deploy.manifest.choose`)."""
    return manifests.load(layout.manifest(manifests.choose(name, layout)))
