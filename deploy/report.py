"""Evidence, gates and plans -> text for a terminal, or JSON. Pure: returns texts, prints nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deploy.agent.plan import Plan, State
from deploy.agent.words import printable
from deploy.evidence import Evidence
from deploy.gates import NOT_PROVEN, Gate, Verdict
from deploy.values import Blob, Change, Delta, PathClass

_MARKS = {
    Verdict.PASSED: "passed",
    Verdict.FAILED: "FAILED",
    Verdict.NOT_REACHED: "not reached",
    Verdict.NOT_APPLICABLE: "not applicable",
}


def as_json(value: Any) -> str:
    """The JSON that `--json` prints: sorted, indented, one final newline left to the printer."""
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False)


def table(rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Columns as wide as their widest cell; no row is cut, since people paste from it."""
    cells = [[printable(cell) for cell in row] for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells)
    return "\n".join(indent + line for line in lines)


def plan_text(plan: Plan, delta: Delta) -> str:
    """Every path of the diff with its class, and what the plan will make of it."""
    rows = [(change.cls.value, _act(change), change.path, change.reason) for change in delta.changes]
    return "\n".join(
        [
            f"{plan.name}: {delta.base[:12]}..{delta.head[:12]}, {len(delta.changes)} changed paths",
            table(rows),
            "",
            table([("plan", plan.digest), ("payload", plan.payload), ("tree", plan.tree)]),
        ]
    )


def plan_json(plan: Plan, delta: Delta) -> dict[str, Any]:
    """The same as `plan/1` with the identities and the whole classed diff beside it."""
    return {
        **plan.to_json(),
        "digest": plan.digest,
        "payload": plan.payload,
        "tree": plan.tree,
        "source": delta_json(delta),
    }


def delta_json(delta: Delta) -> dict[str, Any]:
    return {
        "base": delta.base,
        "head": delta.head,
        "dirty": list(delta.dirty),
        "notes": list(delta.notes),
        "paths": [
            {"path": c.path, "class": c.cls.value, "act": _act(c), "reason": c.reason}
            for c in delta.changes
        ],
    }


def _act(change: Change) -> str:
    if change.old is None:
        return "add"
    if change.new is None:
        return "delete"
    return "modify" if _content(change.old) != _content(change.new) else "mode"


def _content(blob: Blob) -> tuple[str, bool]:
    return blob.oid, blob.mode == "120000"


def gates_text(gates: Iterable[Gate]) -> str:
    """A line a gate, its proofs below it, and what the whole does not prove."""
    lines: list[str] = []
    for gate in gates:
        reason = f"  ({printable(gate.reason)})" if gate.reason else ""
        lines.append(f"  gate {gate.number}  {gate.name:<24} {_MARKS[gate.verdict]}{reason}")
        lines += [f"            - {printable(proof)}" for proof in gate.proofs]
        lines += [f"            ! {printable(fault)}" for fault in gate.faults]
    lines.append("  not proven: " + "; ".join(NOT_PROVEN))
    return "\n".join(lines)


def files_text(evidence: Evidence) -> str:
    """The files that are not as they should be; one line when all are."""
    if not evidence.faults:
        return f"  {len(evidence.files)} files: all as planned"
    rows = [
        (str(row.get("state", "")), row["path"], str(row.get("why") or row.get("detail") or ""))
        for row in evidence.faults
    ]
    return table(rows)


def links_text(links: Sequence[Mapping[str, str]]) -> str:
    """The identity chain of a reproduction: name, what was locked, what came out."""
    rows = [
        (
            link["link"],
            "same" if link["locked"] == link["found"] else "DIFFERS",
            link["found"],
            "" if link["locked"] == link["found"] else f"locked: {link['locked']}",
        )
        for link in links
    ]
    return table(rows)


def state_text(state: State) -> str:
    """One state in a few words, for messages."""
    if state.type == "file":
        return f"file {state.mode} {state.sha256[:12]}"
    return f"link to {state.link}" if state.type == "link" else "absent"


def overlay_count(delta: Delta) -> int:
    return len(delta.of(PathClass.OVERLAY))
