"""Gates 5 to 7 from a record, and what a terminal shows of runs, profiles and accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy import figures, measuring
from deploy import manifest as manifests
from deploy.errors import BadValues
from deploy.gates import Gate, Verdict
from deploy.measure import accuracy, record
from deploy.measure.compare import compare
from deploy.measure.profile import summary
from deploy.measure.record import Run

FIXTURES = Path(__file__).parent / "fixtures"
MANIFEST = """schema: 1
name: t
base: {python: /usr/bin/python3, site: /s}
source: {git: ., base: "1111111111111111111111111111111111111111",
         head: "2222222222222222222222222222222222222222", package: vllm}
overlay: {include: ["vllm/**"]}
launch: {dir: /l, port: 8001, serve: {max-num-batched-tokens: 4096}}
model: {path: /m, served_name: m}
dispatch: {markers: [{shape: chunks, dtype: bfloat16, phase: prefill}]}
gates: {not_applicable: {"2": none, "3": none, "4": none}}
"""
TEMPLATE = 7  # tokens that the server's chat template adds to each prompt
STATE = {"pid": 41, "start_ticks": 9, "boot_id": "b", "members": [41, 42], "faults": []}
EARLIER = (Gate(number=1, verdict=Verdict.PASSED, proofs=("files",)),)


def manifest(text: str = MANIFEST) -> manifests.Manifest:
    return manifests.parse(text, "t")


def raw_run(*, extra: float = 0, shapes: tuple[int, ...] | None = None) -> dict[str, Any]:
    """A run whose server was asked for prompts of 9127 to 15297 tokens, in chunks of 4096."""
    result = json.loads((FIXTURES / "bench_result_ok.json").read_text())
    lengths = [n + TEMPLATE for n in result["input_lens"]]
    tails = sorted({n % 4096 for n in lengths})
    marked = shapes if shapes is not None else (4096, *tails)
    markers = [
        {"pid": 42, "shape": [n, 5120], "dtype": "torch.bfloat16", "selected": True, "before": 0,
         "after": 3, "window": 3}
        for n in marked
    ]  # fmt: skip
    warmups = 2 * lengths[0]
    before = {"vllm:prompt_tokens": 1000.0, "vllm:prefix_cache_queries": 0.0,
              "vllm:prefix_cache_hits": 0.0}  # fmt: skip
    after = {**before, "vllm:prompt_tokens": 1000.0 + sum(lengths) + warmups + extra}
    scan = {"markers": markers, "pids": [41, 42], "signs": [], "lost": [], "ready": True,
            "damaged": 0, "uncounted": 0}  # fmt: skip
    rounds = [
        {"round": name, "exit": 0, "begun": 1.0 + n, "stale": [], "result": result,
         "before": STATE, "after": STATE, "counters": {"before": before, "after": after},
         "markers": scan, "compiled": 0, "compiling": []}
        for n, name in enumerate(("warm", "counted"))
    ]  # fmt: skip
    bucket = {"bucket": "8-16K", "sha256": "a" * 64, "requests": 5, "rounds": rounds,
              "argv": ["--num-prompts", "5", "--num-warmups", "2"]}  # fmt: skip
    return {"schema": "bench/1", "flags": [], "buckets": [bucket], "started": 1.0,
            "locked": {"buckets": {"8-16K": {"sha256": "a" * 64, "requests": 5}}}}  # fmt: skip


def run(**options: Any) -> Run:
    return record.parse(raw_run(**options))


def test_a_good_run_passes_all_gates_when_it_equals_its_baseline() -> None:
    found = measuring.judge(manifest(), run(), EARLIER, run())

    assert [gate.verdict.value for gate in found] == [
        "passed", "not applicable", "not applicable", "not applicable", "passed", "passed",
        "passed",
    ], [gate.faults for gate in found]  # fmt: skip
    assert all(gate.proofs for gate in found if gate.verdict is Verdict.PASSED)


def test_without_a_baseline_gate_7_is_not_reached_and_says_why() -> None:
    found = measuring.judge(manifest(), run(), EARLIER)

    assert found[6].verdict is Verdict.NOT_REACHED
    assert found[6].reason == "no baseline was named: the run itself is valid"


def test_prompt_lengths_follow_from_the_servers_own_counter() -> None:
    one = run().buckets["8-16K"]
    assert measuring.prompt_lengths(one, one.rounds[0]) == {
        9127, 11854, 14409, 8740, 15297,
    }  # fmt: skip
    other = run(extra=3).buckets["8-16K"]  # somebody else's request is in it
    assert measuring.prompt_lengths(other, other.rounds[0]) == set()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"shapes": (4096,)}, "not proven"),
        ({"shapes": ()}, "the log holds no marker of this service"),
        ({"extra": 3}, "the prompts' lengths on the server are not known"),
    ],
)
def test_a_chunk_without_its_marker_fails_gate_6_and_stops_gate_7(
    options: dict[str, Any], why: str
) -> None:
    found = measuring.judge(manifest(), run(**options), EARLIER, run())

    assert found[5].verdict is Verdict.FAILED
    assert any(why in text for text in found[5].faults)
    assert (found[6].verdict, found[6].reason) == (Verdict.NOT_REACHED, "gate 6 failed")


def test_a_fault_of_the_process_fails_gate_5() -> None:
    raw = raw_run()
    fault = {"what": "listener", "text": "two processes listen", "warning": False}
    raw["buckets"][0]["rounds"][1]["after"] = {**STATE, "faults": [fault]}

    found = measuring.judge(manifest(), record.parse(raw), EARLIER, run())

    assert found[4].faults == ("after the counted round: two processes listen",)
    assert found[5].verdict is Verdict.NOT_REACHED


def test_an_invalid_run_fails_gate_7_even_without_a_baseline() -> None:
    raw = raw_run()
    raw["buckets"][0]["rounds"][1]["result"] = {
        **raw["buckets"][0]["rounds"][1]["result"], "completed": 3, "failed": 2,
    }  # fmt: skip

    found = measuring.judge(manifest(), record.parse(raw), EARLIER)

    assert found[6].verdict is Verdict.FAILED
    assert "3 of 5 requests completed, 2 failed" in found[6].faults[0]


def test_a_manifest_without_markers_leaves_gate_6_open() -> None:
    text = "\n".join(line for line in MANIFEST.splitlines() if "dispatch" not in line)

    found = measuring.judge(manifest(text), run(), EARLIER, run())

    assert found[5].verdict is Verdict.NOT_REACHED
    assert "no marker" in found[5].reason


def test_the_terminal_shows_what_is_proven_and_what_is_not() -> None:
    slower = raw_run()
    result = dict(slower["buckets"][0]["rounds"][1]["result"])
    result["output_throughput"] *= 0.9
    result["duration"] /= 0.9
    slower["buckets"][0]["rounds"][1]["result"] = result

    text = figures.comparison_text(compare([run()], [record.parse(slower)], 0.9775))

    assert "8-16K: possible loss: 0.851 -> 0.766 tok/s (-10.00%; 1 pair)" in text
    assert "regression in 8-16K, whatever the total says" in text
    assert "of what was seen: the change of 8-16K is not shown" in text
    assert "x 0.9775 accuracy" in text
    assert "slowest of 5 (p99)" in text


def test_a_profile_is_shown_with_bars_and_with_what_is_left_to_gain() -> None:
    found = summary(FIXTURES / "hipkernel.csv", {"gemm": ("Cijk_*",)})

    text = figures.profile_text(found)

    assert "█" * 40 in text
    assert "14 kernels, 7976 calls, 1315.492 ms" in text
    assert "10 % less of gemm, the largest class, is 9.04% less kernel time in all" in text
    # Into a file every name goes whole; what a terminal sees is tested with one.
    assert all(part.name in text for part in found.top[:10])
    assert "the hot spot stayed: gemm" in figures.changes_text(found, found)


def test_accuracy_is_shown_task_by_task() -> None:
    base = dict.fromkeys(accuracy.TASKS, 100.0)

    text = figures.accuracy_text(accuracy.compare(base, {**base, "hotpotqa": 98.4}))

    assert "hotpotqa" in text
    assert "+1.60 %" in text
    assert "mean factor 0.9925" in text
    assert "no factor" in figures.accuracy_text(accuracy.compare(base, {"hotpotqa": 99.0}))


def test_scores_are_read_from_tables_and_from_records_of_a_run(tmp_path: Path) -> None:
    table = "| dataset | version | metric | mode | M |\n| hotpotqa | a | score | gen | 77.96 |\n"
    (tmp_path / "t.md").write_text(table)
    raw = {"schema": "accuracy-run/1", "tables": [{"path": "t.md", "text": table}]}
    (tmp_path / "r.json").write_text(json.dumps(raw))

    assert measuring.scores(tmp_path / "t.md") == measuring.scores(tmp_path / "r.json")
    with pytest.raises(BadValues):
        measuring.scores(tmp_path / "none")
