"""Which run is the newest: many within one second, and a clock that was set back."""

from __future__ import annotations

import os
import time
from pathlib import Path

from deploy.agent import jobs


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
