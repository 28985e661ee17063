"""Measured runs made by the bundle's own agent, detached, on real processes with a stand-in model.

Each state that looks like a result is planted, and must be named for its own reason.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.bundle import Bundle, Sink
from deploy.measure import record
from deploy.measure.compare import compare
from deploy.measure.record import Run

STANDIN = Path(__file__).parent / "standin"
BODY = b"V = 1\n"
PROMPTS = [f"prompt number {i} " + "word " * (10 * i) for i in range(5)]
FLAGS = ["--backend", "openai-chat", "--disable-shuffle"]


@dataclass
class Target:
    """A site, a launch folder with a running service, a data set, and the bundle."""

    bundle: Bundle
    folder: Path
    overrides: tuple[str, ...]
    inside: tuple[str, ...]
    port: int
    env: dict[str, str] = field(default_factory=dict)

    def run(
        self, verb: str, options: Mapping[str, Any] | None = None, *words: str, **env: str
    ) -> tuple[int, dict[str, Any], str]:
        """One call of the bundle, among the processes of this test only."""
        argv = [*self.inside, sys.executable, "-I", "-S", str(self.bundle.path), verb]
        argv += ["--root", "/", *self.overrides, *words]
        argv += ["--options", json.dumps(options)] if options else []
        path = f"{STANDIN}:{os.environ['PATH']}"
        environment = {**os.environ, **self.env, "PATH": path, **env}
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=120, check=False, env=environment
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    def start(self, **env: str) -> int:
        """Start a server and record it, as the rendered script does; return its pid."""
        run = self.folder / "runs" / f"20260101T0000{time.monotonic_ns() % 10**9}"
        run.mkdir(parents=True)
        there = ("sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(self.folder))
        words = [*self.inside, "setsid", *there, sys.executable, str(STANDIN / "vllm"), "serve"]
        words += [str(self.folder / "model"), "--served-model-name", "m", "--port", str(self.port)]
        shell = f"{_shell(words)} >{run}/serve.log 2>&1 </dev/null & sleep 0.3"
        subprocess.run(["sh", "-c", shell], check=True, timeout=20, env={**os.environ, **env})
        limit = time.monotonic() + 20
        while "startup complete" not in (run / "serve.log").read_text():
            assert time.monotonic() < limit, (run / "serve.log").read_text()
            time.sleep(0.05)
        pid = int((run / "serve.log").read_text().split("pid=")[1].split(")")[0])
        code, _, said = self.run("record", None, "--pid", str(pid), "--run", str(run))
        assert code == 0, said
        return pid

    def end(self, pid: int) -> None:
        subprocess.run([*self.inside, "sh", "-c", f"kill {pid}; sleep 0.5"], check=True, timeout=20)

    def measure(self, options: Mapping[str, Any] | None = None, **env: str) -> Run:
        """Make a run to its end and return its record."""
        code, evidence, said = self.run("measure", {"act": "start", **(options or {})}, **env)
        assert code == 0, said
        return self.collect(evidence["measure"]["stamp"])

    def collect(self, stamp: str) -> Run:
        limit = time.monotonic() + 60
        while True:
            asked = {"act": "status", "stamp": stamp, "record": True}
            _, evidence, _ = self.run("measure", asked)
            found = evidence["measure"]
            if found["state"] not in ("starting", "running"):
                assert found["state"] == "done", found
                return record.parse(found["record"])
            assert time.monotonic() < limit, found
            time.sleep(0.2)


def _shell(words: list[str]) -> str:
    import shlex

    return shlex.join(words)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    site, folder = tmp_path / "site", tmp_path / "submission"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_bytes(BODY)
    (site / "transformers-5.5.0.dist-info").mkdir()
    (folder / "model").mkdir(parents=True)
    data = folder / "8-16K.jsonl"
    data.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    made = bundles.pack(plan(), inputs(folder, port, data), fill, tmp_path / "out")
    overrides = ("--site", str(site), "--python", sys.executable, "--launch-dir", str(folder))
    keeper = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "600")
    with subprocess.Popen(keeper) as outer:
        inner = _child_of(outer.pid)
        inside = ("nsenter", "-p", "-m", "-t", str(inner))
        yield Target(made, folder, overrides, inside, port)
        outer.kill()  # whatever was started goes with its namespace


def _child_of(pid: int) -> int:
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found and Path(f"/proc/{found[0]}/comm").read_text().strip() == "sleep":
            return int(found[0])
        time.sleep(0.02)
    raise AssertionError("no namespace of processes could be made")


def plan() -> Plan:
    state = State(type="file", mode="0644", sha256=hashlib.sha256(BODY).hexdigest(), size=len(BODY))
    entry = PlannedFile(path="vllm/__init__.py", role="module", want=state, assume=(ABSENT,))
    return Plan(name="t", package="vllm", python="/usr/bin/python3", site="/s", files=(entry,))


def inputs(folder: Path, port: int, data: Path) -> dict[str, Any]:
    sha256 = hashlib.sha256(data.read_bytes()).hexdigest()
    bucket = {"dataset": str(data), "sha256": sha256, "requests": 5}
    return {
        "manifest": {
            "name": "t",
            "launch": {"dir": str(folder), "port": port},
            "model": {"path": str(folder / "model"), "served_name": "m"},
            "bench": {"buckets": {"8-16K": bucket}, "flags": FLAGS},
        }
    }


def fill(wanted: Iterator[tuple[str, Sink]]) -> None:
    for _, sink in wanted:
        sink.write(BODY)


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
    target.start(STANDIN_SLOW="0.3")
    begun = time.monotonic()

    code, evidence, _ = target.run("measure", {"act": "start"})

    assert code == 0
    assert time.monotonic() - begun < 2.5  # ten requests take three seconds
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
    _, evidence, _ = target.run("service", {"expect": "running", "ask": False})
    assert not [r for r in evidence["service"]["processes"] if "bench" in r["argv"]]


def test_without_a_service_nothing_is_measured(target: Target) -> None:
    code, evidence, _ = target.run("measure", {"act": "start"})

    assert code == 6
    assert "not as locked" in evidence["error"]["why"]
    assert not (target.folder / "measured" / "bench").exists()


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
