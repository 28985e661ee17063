"""A profile made by the rendered scripts, detached, with a stand-in for the profiler."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy import manifest as manifests
from deploy import scripts
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.agent.profiling import kernel_calls, markers_in
from deploy.bundle import Bundle, Sink
from deploy.measure.profile import summary

STANDIN = Path(__file__).parent / "standin"
FIXTURES = Path(__file__).parent / "fixtures"
BODY = b"V = 1\n"
MANIFEST = """schema: 1
name: t
base: {{python: {python}, site: {site}}}
source: {{git: ., base: {base}, head: {head}, package: vllm}}
overlay: {{include: ["vllm/**"]}}
launch: {{dir: {folder}, port: {port}, ready: 90s}}
model: {{path: {folder}/model, served_name: m}}
bench:
  buckets: {{8-16K: {{dataset: {folder}/d.jsonl, sha256: "{sha256}", requests: 5}}}}
profile:
  classes: {{gemm: ["Cijk_*"]}}
  tool: {tool}
  library_path: [/opt/dcc-lib]
"""


@dataclass
class Target:
    bundle: Bundle
    folder: Path
    inside: tuple[str, ...]
    sessions: Path

    overrides: tuple[str, ...] = ()

    def run(
        self, verb: str, options: Mapping[str, Any] | None = None, **env: str
    ) -> tuple[int, dict[str, Any], str]:
        argv = [*self.inside, sys.executable, "-I", "-S", str(self.bundle.path), verb]
        argv += ["--root", "/", *self.overrides]
        argv += ["--options", json.dumps(options)] if options else []
        # The stand-in's `env python3` is then base.python's own, as a vendor's vllm names it.
        path = os.pathsep.join((str(STANDIN), str(Path(sys.executable).parent), os.environ["PATH"]))
        environment = {**os.environ, "PATH": path, "HIPPROF_SESSIONS": str(self.sessions), **env}
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=120, check=False, env=environment
        )
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    def profile(self, *words: str, **env: str) -> dict[str, Any]:
        asked = {"act": "start", "kind": "profile", "words": words}
        code, _, said = self.run("measure", asked, **env)
        assert code == 0, said
        limit = time.monotonic() + 180
        while True:
            look = {"act": "status", "kind": "profile", "record": True}
            _, evidence, said = self.run("measure", look)
            assert "measure" in evidence, said
            found: dict[str, Any] = evidence["measure"]
            if found["state"] not in ("starting", "running"):
                return found
            assert time.monotonic() < limit, found
            time.sleep(0.3)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    site, folder = tmp_path / "site", tmp_path / "submission"
    (site / "vllm").mkdir(parents=True)
    (folder / "model").mkdir(parents=True)
    data = folder / "d.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"p {i}"}) + "\n" for i in range(5)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    text = MANIFEST.format(
        python=sys.executable, site=site, folder=folder, port=port, base="1" * 40, head="2" * 40,
        sha256=hashlib.sha256(data.read_bytes()).hexdigest(), tool=STANDIN / "hipprof",
    )  # fmt: skip
    manifest = manifests.parse(text, "t")
    state = State(type="file", mode="0644", sha256=hashlib.sha256(BODY).hexdigest(), size=len(BODY))
    entry = PlannedFile(path="vllm/__init__.py", role="module", want=state, assume=(ABSENT,))
    plan = Plan(name="t", package="vllm", python=sys.executable, site=str(site),
                launch_dir=str(folder), files=(entry,))  # fmt: skip
    made = bundles.pack(plan, {"manifest": manifest.meaning()}, _fill, tmp_path / "out")
    for one in scripts.on_target(manifest):
        (folder / one.name).write_bytes(one.data)
    (folder / made.path.name).write_bytes(made.path.read_bytes())
    keeper = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "600")
    with subprocess.Popen(keeper) as outer:
        inner = _child_of(outer.pid)
        # The stand-in interpreter's own site must be the target's, as in a container.
        os.environ["PYTHONPATH"] = str(site)
        try:
            yield Target(made, folder, ("nsenter", "-p", "-m", "-t", str(inner)), tmp_path / "h")
        finally:
            del os.environ["PYTHONPATH"]
            outer.kill()


def _fill(wanted: Iterator[tuple[str, Sink]]) -> None:
    for _, sink in wanted:
        sink.write(BODY)


def _child_of(pid: int) -> int:
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found and Path(f"/proc/{found[0]}/comm").read_text().strip() == "sleep":
            return int(found[0])
        time.sleep(0.02)
    raise AssertionError("no namespace of processes could be made")


@pytest.mark.slow
def test_a_profile_is_recorded_after_the_warm_round_and_believed_by_its_calls(
    target: Target,
) -> None:
    assert target.run("deploy")[0] == 0

    found = target.profile(HIPPROF_SLOW="2")

    assert found["state"] == "done", found["error"]
    assert target.run("measure", {"act": "status", "kind": "profile"})[0] == 0
    record = found["record"]
    assert record["calls"] > 0
    table, [database] = Path(record["table"]), record["databases"]
    classes = {"gemm": ("Cijk_*",)}
    assert summary(table, classes).classes == summary(Path(database), classes).classes
    text = "\n".join(found["lines"])
    assert text.index("warming up") < text.index("recording") < text.index("kernel calls")
    assert any(line.startswith("trace.db") for line in found["files"])
    # A second one has names of its own; nothing of the first is left running or overwritten.
    again = target.profile()
    assert again["record"]["table"] != record["table"]
    assert target.run("service", {"expect": "clean", "ask": False})[0] == 0


@pytest.mark.slow
def test_a_profile_is_made_where_the_machine_has_its_launch_folder(
    target: Target, tmp_path: Path
) -> None:
    away = tmp_path / "it's elsewhere"
    away.mkdir()
    laid = {path.name: path.read_text() for path in target.folder.glob("*.sh")}
    for path in [*target.folder.glob("*.sh"), *target.folder.glob("*.pyz")]:
        path.unlink()
    # Another submission's bundle is there already, as where two take turns on one machine.
    (away / "other-0123456789ab.pyz").touch()
    target.overrides = ("--launch-dir", str(away))
    own = {"name": target.bundle.path.name, "sha256": target.bundle.sha256}
    rows = {name: {"mode": "0755", "text": text} for name, text in laid.items()}
    assert target.run("scripts", {"scripts": rows, "bundle": own})[0] == 0
    assert target.run("deploy")[0] == 0

    found = target.profile("sh", "./run_throughput.sh", "8-16K")

    assert found["state"] == "done", found["error"]
    assert found["record"]["calls"] > 0
    assert list(away.glob("bench/*/8-16K/result.json"))
    assert not (target.folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loses", "why"),
    [("data", "the profiler recorded nothing"), ("lock", "while the profiler still wrote it")],
)
def test_a_profiler_that_lost_its_data_is_not_believed_when_it_says_finish(
    target: Target, loses: str, why: str
) -> None:
    assert target.run("deploy")[0] == 0

    found = target.profile(HIPPROF_LOSES=loses)

    assert found["state"] == "failed"
    assert target.run("measure", {"act": "status", "kind": "profile"})[0] == 10
    assert "no kernel call" in found["error"]["what"]
    assert why in found["error"]["why"]
    assert "there is no *.hipkernel.csv" in found["error"]["why"]


@pytest.mark.slow
def test_nothing_is_profiled_where_the_plan_is_not_deployed_or_a_service_runs(
    target: Target,
) -> None:
    undeployed = target.profile()
    assert undeployed["state"] == "failed"
    assert any("verify failed" in line for line in undeployed["lines"])
    assert "profile.sh ended with 10: not started: verify failed" in undeployed["error"]["why"]

    assert target.run("deploy")[0] == 0
    started, _, said = target.run("start", {"ready": 30})
    assert started == 0, said
    code, evidence, _ = target.run("measure", {"act": "start", "kind": "profile"})
    assert code == 6
    assert "an API server runs" in evidence["error"]["why"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("hipprof_stdout_ok.txt", []),
        ("hipprof_stdout_novalid.txt", ["the profiler recorded nothing"]),
        ("hipprof_stdout_locked.txt", ["the profiler recorded nothing",
                                       "the database was read while the profiler still wrote it"]),
    ],
)  # fmt: skip
def test_what_the_profiler_prints_on_failure_is_known(name: str, said: list[str]) -> None:
    text = (FIXTURES / name).read_text()
    assert "HIP_PROF:finish" in text

    assert markers_in(text) == said


def test_only_the_total_row_tells_the_calls(tmp_path: Path) -> None:
    assert kernel_calls(str(FIXTURES / "hipkernel.csv")) == 7976
    cut = tmp_path / "cut.csv"
    cut.write_text('"Name","Calls","TotalDurationNs"\n"a","1","1"\n')
    assert kernel_calls(str(cut)) == 0
    assert kernel_calls(str(tmp_path / "none.csv")) == 0
