"""Gates: a verdict comes from evidence alone, and silence is never a pass."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.evidence import Evidence
from deploy.gates import NAMES, Gate, Verdict, in_order, source_complete

SHA = "a" * 64
FOUND = {"state": "ok", "file": "/site/vllm/__init__.py", "why": ""}
PLAN = Plan(
    name="t",
    package="vllm",
    python="/usr/bin/python3",
    site="/site",
    files=(
        PlannedFile(
            path="vllm/a.py",
            role="module",
            want=State(type="file", mode="0644", sha256=SHA, size=1),
            assume=(ABSENT,),
        ),
        PlannedFile(
            path="vllm/b.json",
            want=State(type="file", mode="0644", sha256=SHA, size=1),
            assume=(ABSENT,),
        ),
    ),
)


def evidence(**changes: Any) -> Evidence:
    raw: dict[str, Any] = {
        "schema": "evidence/1",
        "verb": "verify",
        "exit": 0,
        "outcome": "ok",
        "plan": PLAN.digest,
        "tree": PLAN.tree,
        "files": [{"path": "vllm/a.py", "state": "ok"}, {"path": "vllm/b.json", "state": "ok"}],
        "origin": {"empty": FOUND, "launch": FOUND},
        "python": {"version": "3.10.12"},
    }
    return Evidence({**raw, **changes})


def test_clean_evidence_passes_gate_1_and_says_on_what_it_rests() -> None:
    gate = source_complete(PLAN, evidence(), None)

    assert gate.verdict is Verdict.PASSED
    assert any("2 of 2 files" in proof for proof in gate.proofs)
    assert any("1 of 1 modules compiled by 3.10.12" in proof for proof in gate.proofs)
    assert sum("/site/vllm/__init__.py" in proof for proof in gate.proofs) == 2


def test_a_module_that_is_not_as_planned_does_not_count_as_compiled() -> None:
    rows = [{"path": "vllm/a.py", "state": "missing"}, {"path": "vllm/b.json", "state": "ok"}]
    gate = source_complete(PLAN, evidence(files=rows), None)

    assert any("1 of 2 files" in proof for proof in gate.proofs)
    assert any("0 of 1 modules compiled" in proof for proof in gate.proofs)


SILENT: dict[str, dict[str, Any]] = {
    "a file left out": {"files": [{"path": "vllm/a.py", "state": "ok"}]},
    "no files at all": {"files": []},
    "one file changed": {
        "files": [{"path": "vllm/a.py", "state": "changed"}, {"path": "vllm/b.json", "state": "ok"}]
    },
    "no origin": {"origin": {}},
    "shadowed": {"origin": {"empty": FOUND, "launch": {"state": "shadowed", "why": "cwd"}}},
    "not known": {"origin": {"empty": FOUND, "launch": {}}},
    "one probe only": {"origin": {"empty": FOUND}},
    "other tree": {"tree": "b" * 64},
    "no tree": {"tree": ""},
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_missing_or_wrong_fails_gate_1(name: str) -> None:
    plan = PLAN if name != "one probe only" else with_launch()
    clean = {} if name != "one probe only" else {"plan": plan.digest}
    assert source_complete(plan, evidence(**clean), None).verdict is Verdict.PASSED

    gate = source_complete(plan, evidence(**clean, **SILENT[name]), None)

    assert gate.verdict is Verdict.FAILED
    assert gate.faults


def with_launch() -> Plan:
    return Plan(
        name="t",
        package="vllm",
        python="/usr/bin/python3",
        site="/site",
        launch_dir="/root/submission",
        files=PLAN.files,
    )


def passed(number: int) -> Gate:
    return Gate(number=number, verdict=Verdict.PASSED)


def test_all_seven_are_always_named_and_a_failed_gate_stops_the_later_ones() -> None:
    failed = Gate(number=2, verdict=Verdict.FAILED, faults=("has gfx906",))

    gates = in_order([passed(1), failed, passed(3)], {4: "no op"}, "no service")

    assert [gate.number for gate in gates] == list(NAMES)
    assert [gate.verdict.value for gate in gates] == [
        "passed",
        "FAILED".lower(),
        "not reached",
        "not applicable",
        "not reached",
        "not reached",
        "not reached",
    ]
    assert gates[2].reason == "gate 2 failed"
    assert gates[3].reason == "no op"


def test_a_gate_nobody_looked_at_is_not_reached_with_the_reason_and_so_are_those_after_it() -> None:
    gates = in_order([passed(1), passed(6)], {2: "a", 3: "b", 4: "c"}, "no service was started")

    assert gates[4].verdict is Verdict.NOT_REACHED
    assert gates[5].verdict is Verdict.NOT_REACHED
    assert gates[5].reason == "no service was started"


def test_a_waiver_never_hides_a_verdict_that_was_found() -> None:
    gates = in_order([Gate(number=1, verdict=Verdict.FAILED, faults=("x",))], {1: "why"}, "")

    assert gates[0].verdict is Verdict.FAILED
