"""Which run is the newest: many within one second, and a clock that was set back."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from deploy import bundle as bundles
from deploy.agent import jobs
from tests.measure import room


def made(top: Path) -> str:
    """Start a job that does nothing, wait for its end, and return its stamp."""
    job = jobs.start(str(top), "bench", {}, lambda _: None)
    limit = time.monotonic() + 20
    while jobs.state_of(jobs.find(str(top), "bench", job.state["stamp"]).state) != "done":
        assert time.monotonic() < limit
        time.sleep(0.005)
    return str(job.state["stamp"])


def test_the_newest_of_many_runs_of_one_second_is_the_last_started(tmp_path: Path) -> None:
    for _ in range(12):  # past 9: as text, 10 sorts before it
        stamp = made(tmp_path)
        assert jobs.find(str(tmp_path), "bench").state["stamp"] == stamp


def test_a_clock_that_was_set_back_does_not_bring_back_an_old_run(tmp_path: Path) -> None:
    first = made(tmp_path)
    above = tmp_path / jobs.FOLDER / "bench"
    os.rename(above / first, above / "20990101T000000Z-99")

    stamp = made(tmp_path)

    assert stamp.endswith("-100")
    assert jobs.find(str(tmp_path), "bench").state["stamp"] == stamp


def test_a_status_without_a_run_says_what_starts_one(tmp_path: Path) -> None:
    code, evidence, _ = room.make(tmp_path, ()).run("measure", {"act": "status"})

    assert (code, evidence["error"]["what"]) == (10, "there is no bench run")
    assert evidence["error"]["fix"] == "start one: `./inv bench.run`"


@pytest.mark.parametrize("lacking", ["bench", "model", "launch"])
def test_a_manifest_that_says_nothing_to_measure_is_a_wrong_value(
    tmp_path: Path, lacking: str
) -> None:
    target = room.make(tmp_path, ())
    meant = room.inputs(target.folder, target.port, target.folder / "8-16K.jsonl")
    del meant["manifest"][lacking]
    target.bundle = bundles.pack(room.plan(), meant, room.fill, tmp_path / "poor")

    code, evidence, _ = target.run("measure", {"act": "start"})

    assert (code, evidence["error"]["exit"]) == (2, 2)
    assert "bench:, model: and launch:" in evidence["error"]["why"]
