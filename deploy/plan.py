"""(Manifest, Delta) -> Plan: what must be true on every target. Pure; touches nothing.

`make_plan` is this module's face. The plan's own type lives in the agent, which parses it again on
the target (`deploy.agent.plan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from deploy.agent.plan import ABSENT, Extension, Plan, PlannedFile, State
from deploy.errors import BadValues
from deploy.values import Blob, Change, Delta, PathClass

_GIT_MODES = {"100644": "0644", "100755": "0755"}
_LINK = "120000"


def make_plan(
    *,
    name: str,
    package: str,
    python: str,
    site: str,
    delta: Delta,
    env_script: str = "",
    launch_dir: str = "",
    requires: Mapping[str, str] | None = None,
    accept: Mapping[str, Sequence[str]] | None = None,
    extensions: Sequence[Extension] = (),
    artefacts: Sequence[PlannedFile] = (),
) -> Plan:
    """Return the plan of a submission: its overlay files, plus compiled artefacts.

    `accept` holds, by path, the sha256 of further contents that may be there before.

    Raises:
        BadValues: a path has a git mode that cannot be installed, or two sources claim one path.
    """
    accept = accept or {}
    _refuse_idle(accept, delta, artefacts)
    overlay = delta.of(PathClass.OVERLAY)
    files = [_planned(change, accept.get(change.path, ())) for change in overlay]
    files += artefacts
    files.sort(key=lambda entry: entry.path)
    _refuse_twins(files)
    plan = Plan(
        name=name,
        package=package,
        python=python,
        site=site,
        env_script=env_script,
        launch_dir=launch_dir,
        requires=dict(requires or {}),
        files=tuple(files),
        extensions=tuple(extensions),
    )
    # What is made here must pass the door through which every target will take it.
    return Plan.parse(plan.to_json())


def _planned(change: Change, accept: Sequence[str]) -> PlannedFile:
    # A vendor's size and mode are unknown here; what counts of an assumed file is its content.
    variants = (State(type="file", mode="0644", sha256=sha) for sha in sorted(set(accept)))
    return PlannedFile(
        path=change.path,
        role=_role(change.path),
        want=_state(change.path, change.new),
        assume=(_state(change.path, change.old), *variants),
    )


def _refuse_idle(
    accept: Mapping[str, Sequence[str]], delta: Delta, artefacts: Sequence[PlannedFile]
) -> None:
    """A variant of a file that is not replaced would be a permission that nobody notices."""
    replaced = {change.path for change in delta.of(PathClass.OVERLAY)}
    replaced |= {entry.path for entry in artefacts}
    if idle := sorted(set(accept) - replaced):
        raise BadValues(
            "overlay.accept names files that this overlay does not replace",
            why=", ".join(idle),
            fix="remove them from overlay.accept",
        )


def _role(path: str) -> str:
    if path.endswith(".py"):
        return "module"
    return "extension" if path.endswith(".so") else "data"


def _state(path: str, blob: Blob | None) -> State:
    if blob is None:
        return ABSENT
    if blob.mode == _LINK:
        return State(type="link", link=blob.link)
    if blob.mode not in _GIT_MODES:
        raise BadValues(
            f"cannot plan {path}",
            why=f"git mode {blob.mode} is neither a file nor a link",
            fix="take the path out of overlay.include, or commit it as a plain file",
        )
    return State(type="file", mode=_GIT_MODES[blob.mode], sha256=blob.sha256, size=blob.size)


def _refuse_twins(files: Sequence[PlannedFile]) -> None:
    twins = sorted({a.path for a, b in pairwise(files) if a.path == b.path})
    if twins:
        raise BadValues(
            "two sources claim one path of the site",
            why=", ".join(twins) + " comes from the diff and from the kernel build",
            fix="a compiled artefact must not be committed; remove it from the source's history",
        )
