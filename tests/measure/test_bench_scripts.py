"""The site's own scripts as client and as accuracy suite: their traps, on real processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.measure import accuracy, record
from deploy.measure.compare import compare
from tests.measure.room import Target, child_of, make

pytestmark = pytest.mark.slow

# As the site's: no `set -e`, so it ends with 0 whatever happened, and lists old results as new.
THROUGHPUT = """#!/bin/sh
[ -z "$BROKEN" ] || exit 0
vllm bench serve --host "$VLLM_HOST" --port "$VLLM_PORT" --model "$SERVED_MODEL_NAME" \\
  --tokenizer "$MODEL_DIR" --dataset-path ./$1.jsonl --num-prompts "$2" \\
  --result-dir "$RESULT_ROOT" --result-filename result.json
mkdir -p "$RESULT_ROOT/$1_throughput" && mv "$RESULT_ROOT/result.json" "$RESULT_ROOT/$1_throughput/"
find . -name result.json
"""
TABLE = """| dataset | version | metric | mode | m |
|---|---|---|---|---|
| hotpotqa | a | score | gen | {score} |
"""
# As the site's: prints the newest folder there is, even when its own run died early.
ACCURACY = """#!/bin/sh
[ -n "$BROKEN" ] || { mkdir -p output/new/summary; cp fresh.md output/new/summary/summary_new.md; }
cat output/*/summary/*.md
"""


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    keeper = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "600")
    with subprocess.Popen(keeper) as outer:
        inside = ("nsenter", "-p", "-m", "-t", str(child_of(outer.pid)))
        script = tmp_path / "submission" / "run_throughput.sh"
        made = make(tmp_path, inside, str(script))
        script.write_text(THROUGHPUT)
        yield made
        outer.kill()


def finished(target: Target, kind: str) -> dict[str, Any]:
    limit = time.monotonic() + 60
    while True:
        asked = {"act": "status", "kind": kind, "record": True}
        found: dict[str, Any] = target.run("measure", asked)[1]["measure"]
        if found["state"] not in ("starting", "running"):
            return found
        assert time.monotonic() < limit, found
        time.sleep(0.2)


def test_the_sites_script_is_told_everything_and_its_result_is_read(target: Target) -> None:
    target.start()

    one, two = target.measure(RESULT_ROOT="/nowhere", MODEL_DIR="/other"), target.measure()

    bucket = one.buckets["8-16K"]
    assert record.faults(one, bucket) == ()
    assert bucket.result is not None
    assert bucket.result.tokenizer == str(target.folder / "model")
    assert {"MODEL_DIR", "RESULT_ROOT"} <= set(one.raw["cleared"])
    assert compare([one], [two]).comparable


def test_a_script_that_measured_nothing_has_no_result_though_it_ends_with_0(
    target: Target,
) -> None:
    target.start()
    old = target.folder / "test" / "8-16K_throughput"
    old.mkdir(parents=True)
    (old / "result.json").write_text("{}")

    run = target.measure(BROKEN="1")

    said = record.faults(run, run.buckets["8-16K"])
    assert "the client wrote no result" in said
    assert run.buckets["8-16K"].rounds[0].raw["exit"] == 0


def test_accuracy_counts_only_what_its_own_run_has_written(target: Target) -> None:
    target.start()
    (target.folder / "output" / "old" / "summary").mkdir(parents=True)
    (target.folder / "output" / "old" / "summary" / "summary_old.md").write_text(
        TABLE.format(score="99.0")
    )
    (target.folder / "fresh.md").write_text(TABLE.format(score="77.96"))
    script = target.folder / "run_accuracy.sh"
    script.write_text(ACCURACY)
    asked = {"act": "start", "kind": "accuracy", "script": str(script)}

    assert target.run("measure", asked, BROKEN="1")[0] == 0
    broken = finished(target, "accuracy")
    assert target.run("measure", asked)[0] == 0
    fresh = finished(target, "accuracy")

    assert broken["state"] == "failed"
    assert "is of an earlier run" in broken["error"]["why"]
    assert "99.0" in broken["record"]["said"]
    assert fresh["state"] == "done"
    assert accuracy.of_record(fresh["record"]) == {"hotpotqa": 77.96}
