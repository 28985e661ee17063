"""A room for measured runs: a site, a launch folder, a data set, a bundle, and a stand-in service.

Its processes live in a namespace of their own: others may run servers on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy import bundle as bundles
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.bundle import Bundle, Sink
from deploy.measure import record
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
        shell = f"{shlex.join(words)} >{run}/serve.log 2>&1 </dev/null & sleep 0.3"
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


def make(tmp_path: Path, inside: tuple[str, ...], script: str = "") -> Target:
    """Lay the room below a folder; `inside` are the words that enter its processes' namespace."""
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
    made = bundles.pack(plan(), inputs(folder, port, data, script), fill, tmp_path / "out")
    overrides = ("--site", str(site), "--python", sys.executable, "--launch-dir", str(folder))
    return Target(made, folder, overrides, inside, port)


def child_of(pid: int, comm: str = "sleep") -> int:
    """Return the pid of the program that a namespace was made for, once it runs there."""
    limit = time.monotonic() + 10
    while time.monotonic() < limit:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found and Path(f"/proc/{found[0]}/comm").read_text().strip() == comm:
            return int(found[0])
        time.sleep(0.02)
    raise AssertionError("no namespace of processes could be made")


def plan() -> Plan:
    state = State(type="file", mode="0644", sha256=hashlib.sha256(BODY).hexdigest(), size=len(BODY))
    entry = PlannedFile(path="vllm/__init__.py", role="module", want=state, assume=(ABSENT,))
    return Plan(name="t", package="vllm", python="/usr/bin/python3", site="/s", files=(entry,))


def inputs(folder: Path, port: int, data: Path, script: str = "") -> dict[str, Any]:
    sha256 = hashlib.sha256(data.read_bytes()).hexdigest()
    bucket = {"dataset": str(data), "sha256": sha256, "requests": 5}
    return {
        "manifest": {
            "name": "t",
            "launch": {"dir": str(folder), "port": port},
            "model": {"path": str(folder / "model"), "served_name": "m"},
            "bench": {
                "buckets": {"8-16K": bucket},
                "flags": FLAGS,
                **({"script": script} if script else {}),
            },
        }
    }


def fill(wanted: Iterator[tuple[str, Sink]]) -> None:
    for _, sink in wanted:
        sink.write(BODY)
