"""The seven gates, in order: what each proves, and the proof.

A gate that fails stops the later ones; "not applicable" needs a reason from the manifest. Verdicts
are drawn from evidence only, never from what a deploy meant to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from deploy.agent.plan import Plan
from deploy.agent.words import Exit, printable
from deploy.errors import BundleError, worst
from deploy.evidence import Evidence
from deploy.globs import first_match
from deploy.kernels import proof
from deploy.service.markers import Dispatch
from deploy.values import Delta, PathClass


class Verdict(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_REACHED = "not reached"
    NOT_APPLICABLE = "not applicable"


NAMES = {
    1: "source complete",
    2: "compile target",
    3: "new binary installed",
    4: "op registered",
    5: "process state clean",
    6: "real request dispatched",
    7: "result comparable",
}

# Why nobody looked further, where a service was judged.
_UNTIL = {
    6: "no prompt was sent to be proven (`./inv serve.prove`)",
    7: "nothing was measured (`./inv bench.run`)",
}

# What a deploy past the lock brings: no commit holds those bytes.
UNLOCKED = "the work tree (not committed, not locked)"

# What stays open even when every gate that was reached has passed.
NOT_PROVEN = (
    "that a kernel is numerically right (run the accuracy suite)",
    "that a kernel is faster (run a counted benchmark against a baseline)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate's verdict. `proofs` say which bytes it rests on, `faults` what speaks against it."""

    number: int
    verdict: Verdict
    reason: str = ""
    proofs: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return NAMES[self.number]

    def to_json(self) -> dict[str, Any]:
        return {
            "gate": self.number,
            "name": self.name,
            "verdict": self.verdict.value,
            "reason": self.reason,
            "proofs": list(self.proofs),
            "faults": list(self.faults),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """What came of one target: evidence and gates, or the error that kept it from answering."""

    target: str
    evidence: Evidence | None = None
    gates: tuple[Gate, ...] = ()
    error: BundleError | None = None
    met: str = ""  # in what state the target was found before anything was done
    worktree: bool = False  # what was brought is in no commit and no lock
    name: str = ""  # the manifest that was brought

    @property
    def exit(self) -> Exit:
        if self.error is not None:
            return self.error.exit
        assert self.evidence is not None
        failed = any(gate.verdict is Verdict.FAILED for gate in self.gates)
        return worst([self.evidence.exit, Exit.DIFFERS if failed else Exit.OK])


def source_complete(
    plan: Plan, evidence: Evidence, delta: Delta | None, *, worktree: bool = False
) -> Gate:
    """Gate 1: the whole diff classed; every runtime file installed, compiled and imported."""
    faults = [
        *_missing_answers(plan, evidence),
        *_file_faults(plan, evidence),
        *_origin_faults(plan, evidence),
        *_package_faults(evidence),
    ]
    if evidence.tree != plan.tree and not _broken_extensions(plan, evidence):
        faults.append(f"tree read on the target is {evidence.tree or 'absent'}, not {plan.tree}")
    proofs = [] if delta is None else [_classed(delta)]
    of = UNLOCKED if worktree else "the commit"
    proofs += _installed(plan, evidence, of) + _found_at(evidence) + _audited(evidence)
    return Gate(
        number=1,
        verdict=Verdict.FAILED if faults else Verdict.PASSED,
        proofs=tuple(proofs),
        faults=tuple(faults),
    )


def compile_target(
    found: Mapping[str, Any], arch: str, changed: Sequence[str], audit: proof.Findings
) -> Gate:
    """Gate 2: log and binary of the build `found` (kernels/1) speak of exactly the asked arch.

    `audit` is what the build folder itself says, where it lies on this machine.
    """
    return _gate(2, proof.joined((proof.compile_target(found, arch, changed), audit)))


def no_kernels(delta: Delta, sources: Sequence[str]) -> str:
    """Why gates 2 to 4 cannot apply; a kernel source that the manifest leaves out is named."""
    ignored = delta.of(PathClass.IGNORED)
    left = [change for change in ignored if first_match(sources, change.path) is not None]
    if not left:
        return "the manifest has no kernels and the diff no kernel source"
    reason = left[0].reason.partition(": ")[2]  # behind "ignore GLOB"
    more = f" (and {len(left) - 1} more)" if left[1:] else ""
    return f"kernel source {printable(left[0].path)}{more} is ignored by the manifest: {reason}"


def not_built(name: str, delta: Delta, *, worktree: bool = False) -> str:
    """What the manifest asks to be compiled, and nobody compiled; and how it is done."""
    changed = delta.of(PathClass.KERNEL)
    more = f" (and {len(changed) - 1} more)" if changed[1:] else ""
    why = f": {printable(changed[0].path)}{more} changed" if changed else ""
    own, then = (" --worktree", "") if worktree else ("", f", then `./inv lock -n {name}`")
    build = f"run `./inv build-kernels -n {name}{own}`{then}"
    return f"the kernels of {name} were not built{why}; {build}"


def kernels_left_out(why: str) -> Gate:
    """Gate 2 of a changed kernel that the manifest wants and the plan has no extension of.

    This is no gate that nobody looked at: the edited source is known to run nowhere.
    """
    return Gate(number=2, verdict=Verdict.FAILED, faults=(why,))


def binary_installed(plan: Plan, built: Mapping[str, Any], evidence: Evidence) -> Gate:
    """Gate 3: what was staged, what was bundled and what an import takes are the same bytes."""
    promised = {entry.path: entry.want.sha256 for entry in plan.files}
    answers = {row["module"]: row for row in evidence.raw.get("extensions") or ()}
    found = [
        proof.binary_installed(row, promised.get(row["path"], ""), answers.get(row["module"], {}))
        for row in built["artefacts"]
    ]
    return _gate(3, proof.joined(found))


def op_registered(plan: Plan, evidence: Evidence) -> Gate:
    """Gate 4: each extension of the plan loads, and its ops are there with their schemas."""
    answers = {row["module"]: row for row in evidence.raw.get("extensions") or ()}
    silent = [e.module for e in plan.extensions if e.module not in answers]
    found = proof.ops_registered(answers.values())
    faults = tuple(f"{module}: the agent did not answer for it" for module in silent)
    return _gate(4, proof.Findings(found.proofs, found.faults + faults))


def _gate(number: int, found: proof.Findings) -> Gate:
    verdict = Verdict.FAILED if found.faults or not found.proofs else Verdict.PASSED
    return Gate(number=number, verdict=verdict, proofs=found.proofs, faults=found.faults)


def process_clean(seen: Mapping[str, Any]) -> Gate:
    """Gate 5: the service that runs is the one that was locked, and nothing runs beside it.

    `seen` is a service/1 document with the agent's faults; its warnings speak against nothing.
    Without a request that was answered it can fail, and not pass.
    """
    faults = [row["text"] for row in seen["faults"] if not row["warning"]]
    if not faults and not seen["answers"]:
        return Gate(number=5, verdict=Verdict.NOT_REACHED, reason="no request was sent to it")
    server, run = seen["server"], seen["run"] or {}
    mapped = [row["path"] for row in server["mapped"] if row["state"] == "ok"]
    libraries = len(set(mapped))
    proofs = [
        f"pid {server['pid']}, started at {server['start_ticks']} ticks, plan {run.get('plan')}",
        f"{len(server['members'])} processes; arguments, folder and environment are the locked",
        f"{len(mapped)} mappings of {libraries} libraries are the site's own, by inode",
        *(f"{row['probe']} answered {row['status']}" for row in seen["answers"]),
    ]
    return Gate(
        number=5,
        verdict=Verdict.FAILED if faults else Verdict.PASSED,
        proofs=() if faults else tuple(proofs),
        faults=tuple(faults),
    )


def dispatched(found: Dispatch, answer: Mapping[str, Any], reason: str = "") -> Gate:
    """Gate 6: what the markers of one request's window prove; `reason` says what kind of run."""
    faults = list(found.faults)
    if answer.get("error"):
        faults.insert(0, f"the request was not answered: {answer['error']}")
    failed = bool(faults) or not found.proven
    return Gate(
        number=6,
        verdict=Verdict.FAILED if failed else Verdict.PASSED,
        reason=reason,
        proofs=(*found.proofs, *(f"not observable: {text}" for text in found.blind)),
        faults=tuple(faults),
    )


def in_order(found: Sequence[Gate], waived: Mapping[int, str], until: str) -> tuple[Gate, ...]:
    """Return all seven: those found, those the manifest waives, and the rest "not reached".

    `until` says why nobody looked further, for instance "no service was started".
    """
    by_number = {gate.number: gate for gate in found}
    gates: list[Gate] = []
    stopped = ""
    for number in NAMES:
        gate = by_number.get(number)
        if gate is None and number in waived:
            gate = Gate(number=number, verdict=Verdict.NOT_APPLICABLE, reason=waived[number])
        elif stopped:
            gate = Gate(number=number, verdict=Verdict.NOT_REACHED, reason=stopped)
        elif gate is None:
            gate = Gate(number=number, verdict=Verdict.NOT_REACHED, reason=until)
            stopped = until
        elif gate.verdict is Verdict.FAILED:
            stopped = f"gate {number} failed"
        gates.append(gate)
    return tuple(gates)


def continued(rows: Sequence[Mapping[str, Any]], later: Sequence[Gate]) -> tuple[Gate, ...]:
    """Return the gates of a verify, as JSON, with those that its service was judged by later."""
    known = [of_json(row) for row in rows]
    judged = [gate for gate in known if gate.verdict in (Verdict.PASSED, Verdict.FAILED)]
    waived = {gate.number: gate.reason for gate in known if gate.verdict is Verdict.NOT_APPLICABLE}
    have = {gate.number for gate in (*judged, *later)} | waived.keys()
    first = min(NAMES.keys() - have, default=0)
    said = {gate.number: gate.reason for gate in known}
    return in_order([*judged, *later], waived, _UNTIL.get(first) or said.get(first, ""))


def of_json(row: Mapping[str, Any]) -> Gate:
    """Return the gate that `Gate.to_json` wrote."""
    return Gate(
        number=int(row["gate"]), verdict=Verdict(row["verdict"]), reason=str(row["reason"]),
        proofs=tuple(row["proofs"]), faults=tuple(row["faults"]),
    )  # fmt: skip


def _missing_answers(plan: Plan, evidence: Evidence) -> list[str]:
    """A verify that leaves a file out must not pass for one that looked at it."""
    answered = {row["path"] for row in evidence.files}
    return [
        f"{entry.path}: the agent did not answer for it"
        for entry in plan.files
        if entry.path not in answered
    ]


def _file_faults(plan: Plan, evidence: Evidence) -> list[str]:
    """What gate 3 is about is left to it: an extension does not make the source incomplete."""
    others = _extensions(plan)
    return [_fault(row) for row in evidence.faults if row["path"] not in others]


def _extensions(plan: Plan) -> set[str]:
    return {entry.path for entry in plan.files if entry.role == "extension"}


def _broken_extensions(plan: Plan, evidence: Evidence) -> bool:
    """True when the tree that was read differs by an extension, and so must its digest."""
    return any(row["path"] in _extensions(plan) for row in evidence.faults)


def _fault(row: Mapping[str, Any]) -> str:
    detail = row.get("why") or row.get("detail") or ""
    return f"{row['path']}: {row['state']}" + (f" ({detail})" if detail else "")


def _origin_faults(plan: Plan, evidence: Evidence) -> list[str]:
    # The service starts in the launch folder; an empty one shows what that folder adds.
    asked = ("empty", "launch") if plan.launch_dir else ("empty",)
    probes = evidence.origin
    silent = [f"import from {where} was not probed" for where in asked if where not in probes]
    return silent + [
        f"import from {where}: {probe.get('state', 'no answer')}: {probe.get('why', '')}"
        for where, probe in sorted(probes.items())
        if probe.get("state") != "ok"
    ]


def _package_faults(evidence: Evidence) -> list[str]:
    """What undermines an import, and what an audit found that should not be there."""
    audit, traps = evidence.raw.get("audit") or {}, evidence.raw.get("traps") or ()
    return [
        *(f"{trap['kind']}: {trap['where']}: {trap['why']}" for trap in traps if trap["harm"]),
        *audit.get("faults", ()),
        *(f"{row['owner']}: {row['path']}: {row['why']}" for row in audit.get("files", ())),
    ]


def _audited(evidence: Evidence) -> list[str]:
    audit = evidence.raw.get("audit") or {}
    counts = {owner: len(paths) for owner, paths in audit.get("owners", {}).items() if paths}
    told = ", ".join(f"{count} {owner}" for owner, count in counts.items())
    return [f"the whole package was read: {told}"] if told else []


def _classed(delta: Delta) -> str:
    counts = ", ".join(f"{len(delta.of(cls))} {cls.value}" for cls in PathClass)
    return f"{len(delta.changes)} changed paths, every one classed: {counts}"


def _installed(plan: Plan, evidence: Evidence, of: str) -> list[str]:
    ok = {row["path"] for row in evidence.files if row["state"] == "ok"}
    files = {entry.path for entry in plan.files}
    modules = {entry.path for entry in plan.files if entry.compiled}
    version = evidence.raw.get("python", {}).get("version", "?")
    return [
        f"{len(ok & files)} of {len(files)} files read back from disk and equal to {of}",
        f"{len(ok & modules)} of {len(modules)} modules compiled by {version}",
        f"tree {evidence.tree}",
    ]


def _found_at(evidence: Evidence) -> list[str]:
    return [
        f"import from {where}: {probe.get('file', '')}"
        for where, probe in sorted(evidence.origin.items())
        if probe.get("state") == "ok"
    ]
