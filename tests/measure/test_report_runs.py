"""Whose gates a report shows: a run counts for the lock, the target and the verify it is of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from deploy import flow, measuring, page, reporting
from deploy.agent.words import Verb
from deploy.errors import BadValues, Differs
from deploy.gates import NAMES, Gate, Verdict
from deploy.measure import record
from deploy.measure.compare import compare
from tests.measure.test_bench_compare import counted, raw_run
from tests.measure.test_measured_gates import manifest
from tests.measure.test_measured_gates import run as measured_run
from tests.unit.test_flow_edits import CORE, Bench

ALL = "what was measured is what was edited"
WAIVED = 'gates: {not_applicable: {"2": none, "3": none, "4": none}}\n'


class Reported(Bench):
    """A bench that was deployed and verified, and whose runs are written as a collect does."""

    def describe(self, accept: str = "") -> None:
        super().describe(accept)
        path = self.layout.manifest("mine")
        path.write_text(path.read_text() + WAIVED)

    def again(self) -> None:
        flow.lock("mine", self.layout)
        assert self.deploy().exit == 0

    @property
    def plan(self) -> str:
        return str(reporting.write("mine", layout=self.layout)[0]["identities"]["plan"])

    def collected(self, name: str = "a", **change: Any) -> Path:
        gates = [
            Gate(number=number, verdict=Verdict.PASSED, proofs=(f"of the run {name}",)).to_json()
            for number in NAMES
        ]
        raw = {**raw_run(), "plan": self.plan, "target": self.to, "gates": gates, **change}
        path = self.layout.out_of("mine") / "bench" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(raw))
        return path

    def report(self, **options: Any) -> dict[str, Any]:
        return reporting.write("mine", layout=self.layout, **options)[0]

    def commit_newer(self) -> None:
        self.write(CORE, b"V = 'newer'\n")
        self.head = self.commit()
        self.describe()


@pytest.fixture
def bench(tmp_path: Path) -> Reported:
    found = Reported(tmp_path)
    found.again()
    return found


def test_a_run_of_what_is_locked_and_verified_is_shown_with_its_gates(bench: Reported) -> None:
    path = bench.collected()

    assert ALL in page.headline(bench.report())
    found = bench.report(run=str(path))
    assert ALL in page.headline(found)
    by_number = {row["gate"]: row["proofs"] for row in found["gates"]}
    assert by_number[7] == ["of the run a"]
    assert "of the run a" not in by_number[1]
    assert found["left_out"] == []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"plan": "0" * 64}, "the run is of 0000"),
        ({"plan": None}, "a plan that it does not tell"),
        ({"inputs": "1" * 64}, "the run is of the inputs 1111"),
        ({"target": "local:/other"}, "the run is of local:/other, the evidence of local:"),
        ({"target": None}, "a target that it does not tell"),
    ],
)
def test_a_run_of_another_plan_or_target_is_left_out_or_refused(
    bench: Reported, change: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bench.collected(**change)
    capsys.readouterr()

    found = bench.report()

    assert ALL not in page.headline(found)
    assert found["process"] is None
    assert why in found["left_out"][0]
    assert "left out: a.json: " in capsys.readouterr().err
    assert "a.json" in page.html(found)
    assert "a.json" in page.markdown(found)
    with pytest.raises(Differs) as caught:
        bench.report(run=str(path))
    assert why in caught.value.why


def test_the_newest_run_that_belongs_here_is_taken(bench: Reported) -> None:
    ours = bench.collected("ours")
    other = bench.collected("other", target="local:/other")
    os.utime(ours, (1, 1))
    os.utime(other, (2, 2))

    found = bench.report()

    assert ALL in page.headline(found)
    assert [text.partition(":")[0] for text in found["left_out"]] == ["other.json"]


def test_a_damaged_file_behind_the_newest_run_ends_no_report(bench: Reported) -> None:
    other = bench.collected("other", target="local:/other")
    note = other.with_name("note.json")
    note.write_text('{"hotpotqa": 50}')
    os.utime(note, (1, 1))

    found = bench.report()

    assert [text.partition(":")[0] for text in found["left_out"]] == ["other.json", "note.json"]
    os.utime(other, (0, 0))
    with pytest.raises(BadValues):
        bench.report()


def test_a_run_of_before_another_lock_is_no_proof_of_it(bench: Reported) -> None:
    bench.collected()
    bench.commit_newer()
    bench.again()

    found = bench.report()

    assert ALL not in page.headline(found)
    assert [row["verdict"] for row in found["gates"]][4:] == ["not reached"] * 3
    with pytest.raises(BadValues, match=r"left out: a\.json"):
        bench.report(base=str(bench.collected("b", plan="0" * 64)))


def test_a_run_with_other_flags_than_the_locked_is_no_proof_of_the_same_plan(
    bench: Reported,
) -> None:
    inputs = bench.report()["identities"]["inputs"]
    bench.collected(inputs=inputs)
    assert ALL in page.headline(bench.report())
    path, plan = bench.layout.manifest("mine"), bench.plan
    path.write_text(path.read_text().replace("dir: /launch", "dir: /launch\n  port: 8123"))
    bench.again()

    found = bench.report()

    assert found["identities"]["plan"] == plan
    assert ALL not in page.headline(found)
    assert "of the inputs" in found["left_out"][0]


def test_nothing_of_a_run_stands_behind_a_verify_that_failed(bench: Reported) -> None:
    bench.collected()
    bench.target.write(CORE, b"V = 'edited'\n")
    assert bench.run(Verb.VERIFY).exit == 10

    found = bench.report()

    assert page.headline(found).startswith("Gate 1 failed")
    assert {row["reason"] for row in found["gates"][4:]} == {"gate 1 failed"}


def test_nothing_of_a_run_stands_behind_a_restore(bench: Reported) -> None:
    bench.collected()
    assert bench.run(Verb.RESTORE).exit == 0

    found = bench.report()

    assert page.headline(found) == "Nothing was verified yet."
    assert found["gates"] == []


def test_gate_7_is_of_the_baseline_that_is_shown_beside_it(bench: Reported) -> None:
    path = bench.collected()
    other = raw_run()
    counted(other)["result"]["model_id"] = "another"
    base = bench.layout.top / "base.json"
    base.write_text(json.dumps(other))

    found = bench.report(run=str(path), base=str(base))

    assert page.headline(found).startswith("Gate 7 failed")
    assert any("the model: 'another'" in text for text in found["gates"][6]["faults"])
    base.write_text(json.dumps(raw_run()))
    assert ALL in page.headline(bench.report(base=str(base)))


def test_a_run_names_the_evidence_that_is_meant(bench: Reported) -> None:
    path = bench.collected()
    [ours] = bench.layout.out_of("mine").glob("evidence*.json")
    raw = json.loads(ours.read_text())
    other = ours.with_name("evidence-of-another.json")
    other.write_text(json.dumps({**raw, "target": "local:/other"}))
    os.utime(ours, (1, 1))

    assert bench.report()["target"] == "local:/other"
    assert bench.report(run=str(path))["target"] == bench.to


def test_a_run_of_another_plan_than_the_target_holds_when_it_is_collected_fails_gate_5() -> None:
    run = measured_run()

    [clean] = [g for g in measuring.judge(manifest(), run, plan="f" * 64) if g.number == 5]

    assert measuring.clean(run).verdict is Verdict.PASSED
    assert measuring.clean(run, "f" * 64).faults == (
        f"the run is of plan None, the target now holds {'f' * 64}",
    )
    assert clean.verdict is Verdict.NOT_REACHED  # nothing was verified before it


@pytest.mark.parametrize("lacking", ["baseline", "candidate"])
def test_a_bucket_of_one_side_alone_makes_two_runs_not_comparable(lacking: str) -> None:
    more = raw_run(1.0, 2000.0)
    more["buckets"].append({**more["buckets"][0], "bucket": "4-8K"})
    more["locked"]["buckets"]["4-8K"] = more["locked"]["buckets"]["8-16K"]
    sides = [record.parse(raw_run()), record.parse(more)]

    base, candidate = sides if lacking == "baseline" else sides[::-1]
    found = compare([base], [candidate])

    assert [row.bucket for row in found.rows if not row.comparable] == ["4-8K"]
    assert f"{lacking}: it lacks this bucket" in found.rows[1].faults
    assert not found.comparable
    assert measuring.equal(found).verdict is Verdict.FAILED
