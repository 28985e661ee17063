"""Measured runs made by the bundle's own agent, detached, on real processes with a stand-in model.

Each state that looks like a result is planted, and must be named for its own reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.measure import record
from deploy.measure.compare import compare
from deploy.measure.record import Run
from tests.measure.room import STANDIN, Target, child_of, make


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    keeper = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "600")
    with subprocess.Popen(keeper) as outer:
        inner = child_of(outer.pid)
        yield make(tmp_path, ("nsenter", "-p", "-m", "-t", str(inner)))
        outer.kill()  # whatever was started goes with its namespace


def said(run: Run) -> str:
    return "\n".join(record.faults(run, run.buckets["8-16K"]))


pytestmark = pytest.mark.slow


def test_a_run_makes_a_warm_and_a_counted_round_that_compare_with_another_run(
    target: Target, tmp_path: Path
) -> None:
    target.start()
    names = tmp_path / "names"

    one = target.measure(
        STANDIN_ENV=str(names), HTTP_PROXY="http://127.0.0.1:9", http_proxy="http://127.0.0.1:9",
        VLLM_TYPO="1", NUM_WARMUPS="7", PYTHONPATH="/nowhere",
    )  # fmt: skip
    two = target.measure()

    assert said(one) == ""
    bucket = one.buckets["8-16K"]
    assert [r.name for r in bucket.rounds] == ["warm", "counted"]
    assert bucket.counted.gained("vllm:request_success") == 5
    assert one.versions == {"transformers": "5.5.0"}
    # What the caller's shell held reached neither the client nor the numbers.
    assert {"HTTP_PROXY", "http_proxy", "VLLM_TYPO", "NUM_WARMUPS", "PYTHONPATH"} <= set(
        one.raw["cleared"]
    )
    assert not {"HTTP_PROXY", "VLLM_TYPO", "NUM_WARMUPS", "PYTHONPATH"} & set(
        names.read_text().split()
    )
    found = compare([one], [two])
    assert found.comparable, found.rows[0].faults
    assert found.rows[0].claim is not None
    # Texts stay on the target; the record holds their digests.
    assert "three four" not in json.dumps(one.raw)
    folders = sorted(p.name for p in (target.folder / "measured" / "bench").iterdir())
    assert len(folders) == 2


def test_a_run_goes_on_when_its_caller_is_gone_and_is_collected_later(target: Target) -> None:
    target.start(STANDIN_SLOW="1")

    code, evidence, _ = target.run("measure", {"act": "start"})

    assert code == 0
    stamp = evidence["measure"]["stamp"]
    code, evidence, _ = target.run("measure", {"act": "status"})
    assert (evidence["measure"]["stamp"], evidence["outcome"]) == (stamp, "running")
    assert any("warm round" in line for line in evidence["measure"]["lines"])
    code, evidence, text = target.run("measure", {"act": "start"})
    assert (code, evidence["error"]["what"]) == (6, "another run is being made")
    assert stamp in text
    assert said(target.collect(stamp)) == ""
    at = evidence = target.run("measure", {"act": "status"})[1]["measure"]["at"]
    assert target.run("measure", {"act": "status", "since": at})[1]["measure"]["lines"] == []


def test_a_run_can_be_ended_and_leaves_nothing_running(target: Target) -> None:
    target.start(STANDIN_SLOW="5")
    stamp = target.run("measure", {"act": "start"})[1]["measure"]["stamp"]
    time.sleep(0.5)

    assert target.run("measure", {"act": "stop"})[1]["outcome"] == "asked to end"

    limit = time.monotonic() + 20
    while (found := target.run("measure", {"act": "status"})[1]["measure"])["state"] == "running":
        assert time.monotonic() < limit
        time.sleep(0.2)
    assert (found["stamp"], found["state"]) == (stamp, "stopped")
    assert target.run("measure", {"act": "status"})[0] == 10  # it has no result
    code, evidence, _ = target.run("measure", {"act": "stop"})
    assert (code, evidence["outcome"]) == (0, "nothing to do")
    _, evidence, _ = target.run("service", {"expect": "running", "ask": False})
    assert not [r for r in evidence["service"]["processes"] if "bench" in r["argv"]]


def test_without_a_service_nothing_is_measured(target: Target) -> None:
    code, evidence, _ = target.run("measure", {"act": "start"})

    assert code == 6
    assert "not as locked" in evidence["error"]["why"]
    assert not (target.folder / "measured" / "bench").exists()
    # As serve.stop: nothing is there, and nothing is what was asked for. A stamp names something.
    code, evidence, _ = target.run("measure", {"act": "stop"})
    assert (code, evidence["outcome"]) == (0, "nothing to do")
    assert target.run("measure", {"act": "stop", "stamp": "20260101T000000Z-1"})[0] == 10


@pytest.mark.parametrize(
    ("options", "env", "why"),
    [
        ({}, {"STANDIN_FAIL": "1"}, "0 of 5 requests completed, 5 failed"),
        ({}, {"STANDIN_SILENT": "1"}, "requests 1, 2, 3, 4, 5 made no token"),
        ({"warm": False}, {}, "the warm round was skipped"),
        ({"requests": 3}, {}, "3 requests, the lock has 5: an observation"),
    ],
)
def test_what_is_no_result_is_named(
    target: Target, options: dict[str, Any], env: dict[str, str], why: str
) -> None:
    target.start()

    run = target.measure(options, **env)

    assert why in said(run)
    assert not compare([run], [run]).comparable


def test_the_result_of_an_earlier_run_is_not_taken_for_this_ones(
    target: Target, tmp_path: Path
) -> None:
    target.start()
    target.measure()
    old = next((target.folder / "measured" / "bench").glob("*/8-16K/counted/result.json"))
    os.utime(old, (1, 1))
    raw = json.loads(old.read_text())
    fresh = tmp_path / "fresh.json"  # a new file with an old date: copied by hand
    fresh.write_text(json.dumps({**raw, "date": "20260101-000000"}))

    assert "older than the round" in said(target.measure(STANDIN_OLD=str(old)))
    assert "dated 20260101-000000, before the round" in said(target.measure(STANDIN_OLD=str(fresh)))


def test_another_data_set_is_an_observation(target: Target) -> None:
    target.start()
    data = target.folder / "8-16K.jsonl"
    base = target.measure()
    lines = data.read_text().splitlines(keepends=True)
    data.write_text("".join(reversed(lines)))

    shuffled = target.measure()

    assert "the data set's sha256 is" in said(shuffled)
    faults = compare([base], [shuffled]).rows[0].faults
    assert any("in another order: the requests were shuffled" in text for text in faults)


def test_a_server_that_was_started_anew_between_the_rounds_is_seen(target: Target) -> None:
    pid = target.start(STANDIN_SLOW="0.3")
    stamp = target.run("measure", {"act": "start"})[1]["measure"]["stamp"]
    log = target.folder / "measured" / "bench" / stamp / "job.log"
    while "completed" not in log.read_text():
        time.sleep(0.02)
    # Between the rounds or in the counted one: either way another process serves its end.
    target.end(pid)
    target.start()

    limit = time.monotonic() + 60
    while True:
        found = target.run("measure", {"act": "status", "record": True})[1]["measure"]
        if found["state"] not in ("starting", "running"):
            break
        assert time.monotonic() < limit
        time.sleep(0.2)

    run = record.parse(found["record"])
    text = said(run) + str(found["error"])
    assert "started anew between the rounds" in text or "not as locked" in text


def test_a_second_server_on_the_port_is_a_fault_of_the_round(target: Target) -> None:
    target.start()
    target.run("measure", {"act": "start"})
    run = target.collect(target.run("measure", {"act": "status"})[1]["measure"]["stamp"])
    assert said(run) == ""
    words = [*target.inside, sys.executable, str(STANDIN / "vllm"), "serve", "other",
             "--served-model-name", "o", "--port", str(target.port)]  # fmt: skip
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as second:
        time.sleep(1.0)
        code, evidence, _ = target.run("measure", {"act": "start"})
        second.send_signal(signal.SIGKILL)

    assert code == 6
    assert "listen" in evidence["error"]["why"]


def test_compiling_inside_the_counted_round_is_seen(target: Target, tmp_path: Path) -> None:
    flag = tmp_path / "compile"
    target.start(STANDIN_COMPILE=str(flag))
    flag.touch()

    run = target.measure()

    assert "something was compiled inside the counted round: WARNING kernel compiled" in said(run)


def test_another_clients_requests_inside_the_round_are_seen(target: Target) -> None:
    target.start(STANDIN_SLOW="0.2")
    stamp = target.run("measure", {"act": "start"})[1]["measure"]["stamp"]
    log = target.folder / "measured" / "bench" / stamp / "job.log"
    while "counted round" not in log.read_text():
        time.sleep(0.02)
    time.sleep(0.4)
    body = json.dumps({"model": "m", "prompt": "x"})
    ask = (
        "import http.client; c = http.client.HTTPConnection('127.0.0.1', %d);"
        "c.request('POST', '/v1/completions', '%s'); c.getresponse().read()"
    )
    subprocess.run([sys.executable, "-c", ask % (target.port, body)], check=True, timeout=20)

    assert "finished 6 requests, 5 were ours" in said(target.collect(stamp))
