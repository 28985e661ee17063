"""A service's gates are kept beside the evidence, and taken for the same plan and target only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy import gates, serving
from deploy.errors import BadValues
from deploy.gates import Gate, Verdict
from deploy.layout import HERE

PLAN = "a" * 64
DEPLOY = "d" * 64
EVIDENCE = {"plan": PLAN, "target": "local:/", "incidental": {"receipt": DEPLOY}}


def judged(number: int, *, passed: bool = True) -> Gate:
    verdict = Verdict.PASSED if passed else Verdict.FAILED
    return Gate(number=number, verdict=verdict, proofs=("seen",) if passed else ())


def verified(waived: tuple[int, ...] = (2, 3, 4), *, source: bool = True) -> list[dict[str, Any]]:
    names = dict.fromkeys(waived, "nothing is compiled")
    return [g.to_json() for g in gates.in_order([judged(1, passed=source)], names, "no service")]


def verdicts(rows: list[dict[str, Any]], *later: Gate) -> dict[int, str]:
    return {gate.number: gate.verdict.value for gate in gates.continued(rows, later)}


def write(folder: Path, **kinds: dict[str, Gate]) -> Path:
    told = {
        kind: {
            "run": {"receipt": DEPLOY},
            "gates": {n: gate.to_json() for n, gate in found.items()},
        }
        for kind, found in kinds.items()
    }
    (folder / "serve.json").write_text(
        json.dumps({"schema": "serve/1", **EVIDENCE, "kinds": told}), encoding="utf-8"
    )
    return folder / "evidence.json"


def test_later_gates_follow_those_of_the_verify() -> None:
    found = gates.continued(verified(), [judged(5), judged(6)])

    assert [g.verdict.value for g in found[4:]] == ["passed", "passed", "not reached"]
    assert "bench.run" in found[6].reason
    assert "serve.prove" in gates.continued(verified(), [judged(5)])[5].reason


def test_nothing_is_proven_behind_a_gate_that_failed_or_was_not_reached() -> None:
    later = (judged(5), judged(6))

    assert verdicts(verified(source=False), *later)[5] == "not reached"
    assert verdicts(verified((3, 4)), *later)[6] == "not reached"
    assert verdicts(verified(), judged(5, passed=False), judged(6))[6] == "not reached"
    assert verdicts(verified(), judged(6))[6] == "not reached"


def test_the_candidate_switched_off_is_no_proof_of_the_candidate(tmp_path: Path) -> None:
    measured, off = {"5": judged(5)}, {"5": judged(5), "6": judged(6)}
    path = write(tmp_path, measured=measured, off=off)

    assert serving.kept(path, EVIDENCE) == [judged(5)]


def test_gates_of_another_plan_or_target_are_not_taken(tmp_path: Path) -> None:
    path = write(tmp_path, measured={"5": judged(5)})

    assert serving.kept(path, {**EVIDENCE, "plan": "b" * 64}) == []
    assert serving.kept(path, {**EVIDENCE, "target": "ssh:a"}) == []
    assert serving.kept(tmp_path / "evidence-b.json", EVIDENCE) == []
    assert serving.kept(path, EVIDENCE) == [judged(5)]


def test_gates_of_another_deploy_of_the_same_plan_are_not_taken(tmp_path: Path) -> None:
    path = write(tmp_path, measured={"5": judged(5)}, twin={"6": judged(6)})

    assert serving.kept(path, {**EVIDENCE, "incidental": {"receipt": "e" * 64}}) == []
    assert serving.kept(path, {**EVIDENCE, "incidental": {}}) == []
    assert serving.kept(path, EVIDENCE) == [judged(5), judged(6)]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": "serve/1"}', '{"schema": "x"}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "serve.json").write_text(text)

    with pytest.raises(BadValues, match=r"serve\.json"):
        serving.kept(tmp_path / "evidence.json", EVIDENCE)


def test_two_who_look_at_a_time_do_not_trip_each_other(tmp_path: Path) -> None:
    write = "serving._write(Path(sys.argv[1]), {'schema': 'serve/1', 'kinds': {}})"
    code = (
        "import sys; from pathlib import Path; from deploy import serving\n"
        f"for _ in range(500): {write}"
    )
    argv = (sys.executable, "-c", code, str(tmp_path / "serve.json"))
    both = [subprocess.Popen(argv, cwd=HERE.top) for _ in range(2)]

    assert [one.wait(timeout=60) for one in both] == [0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["serve.json"]


def service(*answers: dict[str, Any], faults: tuple[str, ...] = ()) -> dict[str, Any]:
    """A service/1 document, as far as gate 5 reads it."""
    rows = [{"text": text, "warning": False} for text in faults]
    server = {"pid": 7, "start_ticks": 1, "members": [7], "mapped": []}
    run = {"pid": 7, "start_ticks": 1, "boot_id": "b", "plan": PLAN}
    return {"server": server, "run": run, "answers": list(answers), "faults": rows}


def test_gate_5_fails_without_a_request_but_does_not_pass() -> None:
    answered = {"probe": "generation", "status": 200}

    assert gates.process_clean(service(answered)).verdict is Verdict.PASSED
    assert gates.process_clean(service()).verdict is Verdict.NOT_REACHED
    assert gates.process_clean(service(faults=("two listeners",))).verdict is Verdict.FAILED
