"""Gather the evidence of a submission and write it as JSON, Markdown and one HTML page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy import gates, measuring, page, report, serving, submission
from deploy.agent.words import Verb
from deploy.errors import BadValues, Differs
from deploy.layout import HERE, Layout
from deploy.lock import read_lock
from deploy.manifest import Manifest
from deploy.measure import accuracy, record
from deploy.measure.compare import Comparison, compare
from deploy.measure.record import Run


def write(
    name: str,
    *,
    to: str = "",
    run: str = "",
    base: str = "",
    profile: str = "",
    before: str = "",
    accuracy_base: str = "",
    accuracy_candidate: str = "",
    out: str = "",
    layout: Layout = HERE,
) -> tuple[dict[str, Any], list[Path]]:
    """Write ``report.json``, ``.md`` and ``.html`` below `out` (``out/NAME/``); return all of it.

    `run` and `base` are comma lists of records; without `run` the newest collected one is taken.
    Nothing is asked of a target: what verify and bench.collect left is shown.

    Raises:
        BadValues: a file that was named is not what it should be.
        Differs: the evidence speaks of a work tree, or of another plan than the locked one.
    """
    manifest = submission.load(name, layout)
    identities, evidence = _identities(manifest, layout), _evidence(manifest, to, layout)
    if evidence is not None:
        _require_locked(manifest, identities, evidence)
    runs = [record.read(p) for p in measuring.paths(run) or _newest(manifest, layout)]
    bases = [record.read(path) for path in measuring.paths(base)]
    if bases and not runs:
        raise BadValues(
            "there is no run to hold the baseline against",
            why=f"--run names none, and {layout.out_of(manifest.name) / 'bench'} holds none",
            fix="measure and fetch one (`./inv bench.run --follow`), or leave --base out",
        )
    after, older = measuring.profiles(name, profile, before, layout) if profile else (None, None)
    found = page.document(
        name=manifest.name,
        identities=identities,
        evidence=evidence,
        environment=environment(manifest),
        run=runs[-1] if runs else None,
        comparison=_comparison(runs, bases, accuracy_base, accuracy_candidate),
        profile=after,
        before=older,
    )
    folder = Path(out) if out else layout.out_of(manifest.name)
    return found, _files(folder, found)


def environment(manifest: Manifest) -> list[dict[str, str]]:
    """Return the list that a submission must carry: name, value and reason of each variable."""
    launch = manifest.launch
    if launch is None:
        return []
    return [{"name": k, "value": v.value, "why": v.why} for k, v in sorted(launch.env.items())]


def _comparison(
    runs: list[Run], bases: list[Run], accuracy_base: str, accuracy_candidate: str
) -> Comparison | None:
    if not runs or not bases:
        return None
    factor = None
    if accuracy_base and accuracy_candidate:
        sides = [measuring.scores(Path(p)) for p in (accuracy_base, accuracy_candidate)]
        factor = accuracy.compare(*sides).factor
    return compare(bases, runs, factor)


def _newest(manifest: Manifest, layout: Layout) -> list[Path]:
    found = (layout.out_of(manifest.name) / "bench").glob("*.json")
    return sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))[-1:]


def _identities(manifest: Manifest, layout: Layout) -> dict[str, str]:
    path = layout.lock(manifest.name)
    if not path.exists():
        return {}
    pinned = read_lock(path)
    links = {key: str(value) for key, value in sorted(pinned.expect.items())}
    inputs = pinned.inputs
    return {
        "base": str(inputs.get("base", "")),
        "head": str(inputs.get("head", "")),
        "inputs": pinned.digest,
        **links,
    }


def _evidence(manifest: Manifest, to: str, layout: Layout) -> dict[str, Any] | None:
    """What the last verify of a target left, and its service since; without `to` the newest."""
    out = layout.out_of(manifest.name)
    found = sorted(out.glob("evidence*.json"), key=lambda path: path.stat().st_mtime_ns)
    for path in reversed(found):
        try:
            raw = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as err:
            raise BadValues(
                f"cannot read {path}", why=str(err), fix="verify again, which writes it anew"
            ) from err
        if isinstance(raw, dict) and to in ("", raw.get("target")):
            if _undone(raw):
                return raw
            later = serving.kept(path, raw)
            if later:
                raw["gates"] = [g.to_json() for g in gates.continued(raw.get("gates") or (), later)]
            return raw
    if to:
        raise BadValues(
            f"there is no evidence of {to}",
            why=f"{out} holds none",
            fix=f"run `./inv verify -n {manifest.name} -t {to}`",
        )
    return None


def _undone(evidence: Mapping[str, Any]) -> bool:
    return evidence.get("verb") == Verb.RESTORE.value


def _require_locked(
    manifest: Manifest, identities: Mapping[str, str], evidence: Mapping[str, Any]
) -> None:
    """Raise Differs when a report would show a proof beside a lock that it is not of."""
    if _undone(evidence):
        return  # it proves nothing, of whatever plan
    target, locked = evidence.get("target", ""), identities.get("plan", "")
    here = f"-n {manifest.name} -t {target}"
    if evidence.get("worktree"):
        raise Differs(
            f"the evidence of {target} is of the work tree",
            why="`--worktree` deployed files that are not committed and not locked",
            fix=f"commit, lock, and deploy what was locked: `./inv deploy {here}`",
        )
    if locked and evidence.get("plan") != locked:
        raise Differs(
            f"the evidence of {target} is of another plan than the locked one",
            why=f"it speaks of {evidence.get('plan')}, the lock pins {locked}",
            fix=f"deploy what was locked, which verifies it: `./inv deploy {here}`",
        )


def _files(folder: Path, found: dict[str, Any]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    texts = {
        "report.json": report.as_json(found) + "\n",
        "report.md": page.markdown(found),
        "report.html": page.html(found),
    }
    paths = []
    for name, text in texts.items():
        beside = folder / f".{name}.new"
        beside.write_text(text, encoding="utf-8")
        beside.replace(folder / name)
        paths.append(folder / name)
    return paths


__all__ = ["environment", "write"]
