"""The bundle's own verbs about the service, run as a person runs them, on a stand-in server.

The start script here is the smallest that keeps the promises of the rendered one.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy.agent import launch
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.bundle import Bundle, Sink

STANDIN = Path(__file__).parent / "standin" / "vllm"
BODY = b"V = 1\n"
START = """#!/bin/sh
set -u
cd "$(dirname "$0")" || exit 8
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY
export VLLM_DCU_KERNEL_DIAG=1
run=$PWD/runs/20260101T000000Z-$$
mkdir -p "$run"
setsid nohup {python} {standin} {words} >"$run/serve.log" 2>&1 </dev/null &
{python} -I -S *.pyz record --root / {overrides} --pid $! --run "$run" >/dev/null
"""


@dataclass
class Target:
    """A site that holds what the plan promises, a launch folder, and the bundle."""

    bundle: Bundle
    folder: Path
    overrides: tuple[str, ...]
    port: int
    inside: tuple[str, ...]  # enters the processes' own namespace: others may run servers here

    def argv(self, verb: str, *words: str) -> list[str]:
        """One call of the bundle, among the processes of this test only."""
        agent = (sys.executable, "-I", "-S", str(self.bundle.path), verb, "--root", "/")
        return [*self.inside, *agent, *self.overrides, *words]

    def run(self, verb: str, *words: str) -> tuple[int, dict[str, Any], str]:
        done = subprocess.run(
            self.argv(verb, *words), capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, json.loads(done.stdout), done.stderr

    def sleeper(self) -> int:
        """A process that does nothing, named as the bundle will see it."""
        argv = [*self.inside, "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"]
        return int(subprocess.run(argv, capture_output=True, timeout=20, check=True).stdout)

    def start(
        self, *words: str, scripts: bool = True, exports: str = ""
    ) -> tuple[int, dict[str, Any], str]:
        text = START.format(
            python=sys.executable, standin=STANDIN, overrides=" ".join(self.overrides),
            words=" ".join(self.words[1:]),
        )  # fmt: skip
        text = text.replace("run=$PWD", f"{exports}\nrun=$PWD")
        options: dict[str, Any] = {"ready": 30}
        if scripts:
            options["scripts"] = {"start_vllm.sh": {"mode": "0755", "text": text}}
            options["bundle"] = {"name": self.bundle.path.name, "sha256": self.bundle.sha256}
        return self.run("start", "--options", json.dumps(options), *words)

    @property
    def words(self) -> tuple[str, ...]:
        model = str(self.folder / "model")
        return ("vllm", "serve", model, "--served-model-name", "m", "--port", str(self.port))

    def pid(self) -> int:
        run = launch.read_run(str(self.folder))
        assert run is not None
        return run.pid


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    site, folder = tmp_path / "site", tmp_path / "submission"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_bytes(BODY)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    made = bundles.pack(plan(), inputs(folder, port), fill, tmp_path / "out")
    overrides = ("--site", str(site), "--python", sys.executable, "--launch-dir", str(folder))
    with own_processes() as inside:
        yield Target(made, folder, overrides, port, inside)


@contextmanager
def own_processes() -> Iterator[tuple[str, ...]]:
    """A namespace of processes: the words that enter it. What was started there goes with it."""
    keeper = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sleep", "600")
    with subprocess.Popen(keeper) as outer:
        try:
            yield ("nsenter", "-p", "-m", "-t", str(_child_of(outer.pid)))
        finally:
            outer.kill()


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


def inputs(folder: Path, port: int) -> dict[str, Any]:
    """The part of a bundle's inputs that says how the service is started."""
    return {
        "manifest": {
            "launch": {
                "dir": str(folder), "port": port,
                "env": {"VLLM_DCU_KERNEL_DIAG": {"value": "1", "why": "markers"}},
            },
            "model": {"path": str(folder / "model"), "served_name": "m",
                      "files": {"config.json": {"size": 2}}},
        }
    }  # fmt: skip


def fill(wanted: Iterator[tuple[str, Sink]]) -> None:
    for _, sink in wanted:
        sink.write(BODY)


@pytest.mark.slow
def test_a_service_is_started_seen_and_stopped_by_the_bundle_alone(target: Target) -> None:
    code, evidence, said = target.start()
    assert (code, evidence["outcome"]) == (0, "running"), said
    assert evidence["service"]["faults"] == []
    assert "brought to" in said
    assert sorted(p.name for p in target.folder.glob("*.pyz")) == [target.bundle.path.name]

    code, evidence, _ = target.run("service", "--expect", "running")
    assert (code, evidence["service"]["faults"]) == (0, [])

    code, evidence, said = target.run("service", "--expect", "clean")
    assert code == 10
    assert "fault: an API server runs" in said

    code, evidence, said = target.start()
    assert code == 6
    assert "the process state is not clean" in evidence["error"]["why"]

    code, evidence, _ = target.run("stop")
    assert (code, evidence["outcome"]) == (0, "stopped")
    assert [row["how"] for row in evidence["service"]["ended"]] == ["ended", "ended"]

    code, evidence, _ = target.run("stop")
    assert (code, evidence["outcome"]) == (0, "nothing to do")
    code, evidence, _ = target.run("service", "--expect", "clean")
    assert (code, evidence["service"]["faults"]) == (0, [])


@pytest.mark.slow
def test_base_python_is_what_it_starts_and_no_other_venv(target: Target, tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    code, _, said = target.start()
    assert code == 0, said

    code, evidence, _ = target.run("service", "--python", str(script))
    assert (code, evidence["service"]["faults"]) == (0, [])
    code, evidence, _ = target.run("service", "--python", str(tmp_path / "venv" / "bin" / "python"))
    assert (code, [row["what"] for row in evidence["service"]["faults"]]) == (10, ["interpreter"])
    code, evidence, _ = target.run("service", "--python", "/nowhere/python")
    assert (code, [row["warning"] for row in evidence["service"]["faults"]]) == (0, [True])


@pytest.mark.slow
def test_what_env_script_exports_is_given_and_what_a_script_adds_is_not(
    target: Target, tmp_path: Path
) -> None:
    script = tmp_path / "env.sh"
    script.write_text("export LD_LIBRARY_PATH=/opt/dtk/lib:${LD_LIBRARY_PATH-} HSA_XNACK=1\n")
    both = f". {script}\nexport PYTHONOPTIMIZE=2 ROCBLAS_LAYER=0"
    code, evidence, _ = target.start(exports=both)

    def steering(seen: dict[str, Any]) -> list[str]:
        rows = seen["service"]["server"]["environment"]
        return sorted(row["name"] for row in rows if row["state"] == "not given")

    assert code == 10
    assert steering(evidence) == ["HSA_XNACK", "LD_LIBRARY_PATH", "PYTHONOPTIMIZE", "ROCBLAS_LAYER"]
    code, evidence, _ = target.run("service", "--env-script", str(script))
    assert (code, steering(evidence)) == (10, ["PYTHONOPTIMIZE", "ROCBLAS_LAYER"])


@pytest.mark.slow
def test_a_file_that_is_put_back_under_a_running_server_is_found(target: Target) -> None:
    site = Path(target.overrides[1])
    module = site / "vllm" / "__init__.py"
    module.write_bytes(b"V = 666\n")
    code, evidence, said = target.start()
    assert (code, evidence["service"]["faults"]) == (0, []), said

    module.write_bytes(BODY)
    os.utime(module, ns=(0, 0))  # as old as can be: times that can be set tell nothing
    code, evidence, _ = target.run("service", "--expect", "running")

    assert (code, [row["what"] for row in evidence["service"]["faults"]]) == (10, ["old process"])
    assert "vllm/__init__.py was written, or its mode" in evidence["service"]["faults"][0]["text"]
    target.run("stop")
    code, evidence, _ = target.start()
    assert (code, evidence["service"]["faults"]) == (0, [])


@pytest.mark.slow
def test_a_service_survives_the_terminal_that_started_it(target: Target) -> None:
    target.start("--ready", "0")
    pid = target.pid()
    target.run("stop")
    # A terminal of its own, which goes away while the server is being waited for.
    code = (
        "import os, pty, sys\npid, fd = pty.fork()\n"
        "if not pid: os.execvp(sys.argv[1], sys.argv[1:])\n"
        "seen = b''\nwhile b'is started' not in seen: seen += os.read(fd, 1000)\n"
        "os.close(fd)\nos.waitpid(pid, 0)"
    )
    argv = [sys.executable, "-c", code, *target.argv("start", "--ready", "30")]
    subprocess.run(argv, timeout=60, check=True)

    assert target.pid() != pid
    code_, evidence, _ = target.run("service", "--expect", "running")
    assert (code_, evidence["service"]["faults"]) == (0, [])


def test_a_script_that_starts_nothing_is_named(target: Target) -> None:
    (target.folder / "start_vllm.sh").write_text(
        "echo no model here >&2\necho '  why: gone'\nexit 3\n"
    )

    code, evidence, _ = target.start(scripts=False)

    assert code == 6
    assert evidence["error"]["why"] == "exit 3:\n    no model here\n    why: gone"


def test_what_a_start_script_says_when_it_gives_up_is_passed_on(target: Target) -> None:
    log = "\n".join(f"line {number} of the log" for number in range(100))
    (target.folder / "start_vllm.sh").write_text(
        f"echo '{log}' >&2\n"
        "printf 'the server died\\n  why: it ended with 3\\n  fix: read the log\\n' >&2\nexit 10\n"
    )

    code, evidence, _ = target.start(scripts=False)

    error = evidence["error"]
    assert (code, evidence["outcome"]) == (10, "differs")
    assert (error["what"], error["fix"]) == ("the server died", "read the log")
    first, *rows = error["why"].splitlines()
    assert first == "it ended with 3"
    assert rows[-1] == "    line 99 of the log"
    assert 20 <= len(rows) < 100


def test_without_a_script_nothing_is_started(target: Target) -> None:
    code, evidence, _ = target.start(scripts=False)

    assert code == 3
    assert "./inv render" in evidence["error"]["fix"]


@pytest.mark.parametrize("asked", [{}, {"act": "start", "kind": "profile"}])
def test_nothing_is_started_or_brought_where_the_target_is_a_folder(
    target: Target, tmp_path: Path, asked: dict[str, str]
) -> None:
    root = tmp_path / "root"
    (root / target.overrides[1].lstrip("/")).mkdir(parents=True)
    options = {**asked, "scripts": {"start_vllm.sh": {"mode": "0755", "text": "exit 0"}}}
    words = ("--options", json.dumps(options), "--root", str(root))

    code, evidence, _ = target.run("measure" if asked else "start", *words)

    assert code == 3
    assert f"the target's root is {root}" in evidence["error"]["why"]
    assert not [path for path in root.rglob("*") if not path.is_dir()]


def test_a_request_may_not_write_elsewhere_than_into_the_launch_folder(target: Target) -> None:
    for name in ("../evil.sh", "/tmp/evil.sh", "", ".hidden"):
        options = json.dumps({"scripts": {name: {"mode": "0755", "text": "x"}}})
        code, evidence, _ = target.run("start", "--options", options)

        assert code == 3
        assert "no name of a script" in evidence["error"]["what"]
    assert sorted(os.listdir(target.folder)) == ["model"]


def test_a_process_that_has_ended_is_not_recorded(target: Target) -> None:
    run = target.folder / "runs" / "x"
    run.mkdir(parents=True)

    code, evidence, _ = target.run("record", "--pid", "99999", "--run", str(run))

    assert code == 3
    assert evidence["error"]["why"] == "no process 99999"


def test_markers_are_read_from_the_log_of_the_recorded_run(target: Target) -> None:
    run = launch.new_run(str(target.folder), "x")
    pid = target.sleeper()
    assert target.run("record", "--pid", str(pid), "--run", run)[0] == 0
    Path(run, "serve.log").write_text(
        f"(EngineCore pid={pid}) DCU_KERNEL_DIAG selected=True shape=(4, 5) dtype=bfloat16\n"
    )

    code, evidence, _ = target.run("markers")

    assert code == 0
    assert evidence["markers"]["markers"] == [
        {"pid": pid, "shape": [4, 5], "dtype": "bfloat16", "selected": True,
         "before": 1, "after": 0, "window": 0}
    ]  # fmt: skip
    assert pid in evidence["markers"]["pids"]


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_log_that_is_no_file_of_the_launch_folder_is_named_and_not_waited_for(
    target: Target, tmp_path: Path, kind: str
) -> None:
    run = launch.new_run(str(target.folder), "x")
    assert target.run("record", "--pid", str(target.sleeper()), "--run", run)[0] == 0
    path, secret = Path(run, "serve.log"), tmp_path / "secret"
    secret.write_text("a secret of this machine\n")
    os.mkfifo(path) if kind == "fifo" else path.symlink_to(secret)

    code, evidence, said = target.run("markers")
    assert (code, evidence["error"]["what"]) == (10, f"the log {path} is not read")
    code, seen, more = target.run("service", "--expect", "running")
    assert code == 10
    assert "log" in [row["what"] for row in seen["service"]["faults"]]
    assert "a secret of this machine" not in json.dumps([evidence, seen]) + said + more


def test_a_record_whose_log_is_no_name_is_not_believed(target: Target) -> None:
    run = launch.new_run(str(target.folder), "x")
    assert target.run("record", "--pid", str(target.sleeper()), "--run", run)[0] == 0
    record = Path(run, "run.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "log": ".."}))

    code, evidence, _ = target.run("markers")

    assert code == 10
    assert evidence["error"]["why"] == "its log '..' is no file's name"


def test_without_a_start_there_are_no_markers_to_read(target: Target) -> None:
    code, evidence, _ = target.run("markers")

    assert code == 10
    assert "no start is recorded" in evidence["error"]["why"]


@pytest.mark.slow
def test_the_doctor_names_what_it_finds_with_its_mend(target: Target) -> None:
    site = target.overrides[1]
    (target.folder / "tunableop_results0.csv").touch()
    script = target.folder / "env.sh"
    script.write_text(f"export PYTHONPATH={site}\n")

    code, evidence, said = target.run("doctor", "--env-script", str(script))
    _, without, _ = target.run("doctor")

    found = {row["about"]: row for row in evidence["doctor"]}
    assert {r["level"] for r in without["doctor"] if r["about"] == "import"} == {"error"}
    assert found["import"]["level"] == "ok"
    assert found["python"]["level"] == "ok"
    assert found["torch"]["level"] in ("error", "info", "ok")
    assert found["import"]["text"].endswith(f"{site}/vllm/__init__.py")
    assert found["TunableOp"]["level"] == "warning"
    assert found["TunableOp"]["mend"]
    assert all(row["mend"] for row in evidence["doctor"] if row["level"] == "error")
    assert "TunableOp" in said
    assert (code == 10) == any(row["level"] == "error" for row in evidence["doctor"])
