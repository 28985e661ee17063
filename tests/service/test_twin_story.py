"""A measured service without markers, then its twin with them, and what the report makes of both.

All of it goes through the operator's own functions and the rendered scripts, on a stand-in server.
Run as a program it is the story itself: among processes of its own, where no other server is seen.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from deploy import flow, reporting, serving
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.errors import BadValues
from deploy.gates import Gate, Visit
from deploy.layout import HERE, Layout
from tests.service.test_service_verbs import STANDIN, own_processes

IDENTITY = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
TO = "local:/"
MANIFEST = """\
schema: 1
name: mine
base: {{python: {python}, site: {site}, requires: {{vllm: "1.0"}}}}
source: {{git: repo, base: {base}, head: {head}, package: vllm}}
overlay: {{include: ["vllm/**"]}}
launch:
  dir: {folder}
  command: [{top}/bin/vllm, serve]
  port: {port}
  ready: 30s
  serve: {{max-num-batched-tokens: 4096, enforce-eager: }}
  env: {{VLLM_DCU_CANDIDATE: {{value: "1", why: the candidate}}}}
model: {{path: {folder}/model, served_name: m, files: {{config.json: {{size: 2}}}}}}
dispatch:
  diag: twin
  switch: VLLM_DCU_CANDIDATE
  markers: [{{shape: chunks, dtype: bfloat16, phase: prefill}}]
gates:
  not_applicable: {{"2": none is compiled, "3": none is compiled, "4": none is compiled}}
"""


def build(top: Path) -> Layout:
    """Make a repository, a site that holds its base, a launch folder and a locked manifest."""
    layout, repo, folder = Layout(top / "checkout"), top / "checkout" / "repo", top / "submission"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", top / "venv"], check=True)
    where = {"base": str(top / "venv"), "platbase": str(top / "venv")}
    site = Path(sysconfig.get_path("purelib", "posix_prefix", vars=where))
    for name, text in {
        "vllm/__init__.py": "V = 1\n",
        "vllm-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\n",
    }.items():
        (site / name).parent.mkdir(parents=True)
        (site / name).write_text(text)
    program = top / "bin" / "vllm"
    program.parent.mkdir()
    _, _, body = STANDIN.read_text().partition("\n")
    program.write_text(f"#!{top}/venv/bin/python3\n{body}")
    program.chmod(0o755)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (repo / "vllm").mkdir(parents=True)
    git(repo, "init", "-q")
    base, head = commit(repo, "V = 1\n"), commit(repo, "V = 2\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    layout.manifest("mine").parent.mkdir()
    layout.manifest("mine").write_text(MANIFEST.format(
        python=top / "venv" / "bin" / "python3", site=site, base=base, head=head, folder=folder,
        top=top, port=port,
    ))  # fmt: skip
    flow.lock("mine", layout)
    return layout


def git(repo: Path, *args: str) -> str:
    done = subprocess.run(
        ("git", *IDENTITY, *args), cwd=repo, capture_output=True, check=True, timeout=60, text=True
    )
    return done.stdout.strip()


def commit(repo: Path, text: str) -> str:
    (repo / "vllm" / "__init__.py").write_text(text)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "x")
    return git(repo, "rev-parse", "HEAD")


def story(top: Path) -> dict[str, Any]:
    """Deploy, start and prove each variant in turn; say what was judged and what is reported."""
    layout = build(top)
    told: dict[str, Any] = {"judged": {}}

    def ask(verb: Verb, **variant: bool) -> Visit:
        [visit] = serving.ask("mine", TO, verb, {}, layout=layout, **variant)
        assert visit.error is None, visit.error
        return visit

    def prove(**variant: bool) -> Gate:
        [visit] = serving.prove("mine", TO, prompt=9000, layout=layout, **variant)
        assert visit.error is None, visit.error
        return visit.gates[-1]

    def reported() -> dict[int, str]:
        found, _ = reporting.write("mine", layout=layout)
        return {row["gate"]: row["verdict"] for row in found["gates"]}

    [deployed] = flow.deploy("mine", TO, Request(verb=Verb.DEPLOY), layout)
    assert deployed.exit == 0, deployed.error
    told["before"] = reported()
    started = ask(Verb.START)
    told["judged"]["measured"] = started.gates[-1].to_json()
    told["started"] = reported()
    try:
        prove()
    except BadValues as err:
        told["refused"] = str(err)
    told["judged"]["none printed"] = prove(twin=True).to_json()
    ask(Verb.STOP)
    for kind, off in (("twin", False), ("twin-off", True)):
        told["judged"][f"{kind} start"] = ask(Verb.START, twin=True, off=off).gates[-1].to_json()
        told["judged"][kind] = prove(twin=True, off=off).to_json()
        told[kind] = reported()
        ask(Verb.STOP)
    told["page"] = reporting.write("mine", layout=layout)[0]["gates"]
    ask(Verb.START, twin=True)
    told["another start"] = reported()
    ask(Verb.STOP)
    [restored] = flow.run("mine", TO, Request(verb=Verb.RESTORE), layout)
    [deployed] = flow.deploy("mine", TO, Request(verb=Verb.DEPLOY), layout)
    assert (restored.exit, deployed.exit) == (0, 0), restored.error or deployed.error
    told["another deploy"] = reported()
    return told


@pytest.mark.slow
def test_a_twin_proves_what_the_measured_service_does_not_print(tmp_path: Path) -> None:
    with own_processes() as inside:
        done = subprocess.run(
            [*inside, sys.executable, "-m", "tests.service.test_twin_story", str(tmp_path)],
            cwd=HERE.top, capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "PYTHONPATH": str(HERE.top)},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    judged = told["judged"]

    assert told["before"] == {**told["before"], "1": "passed", "5": "not reached"}
    assert (judged["measured"]["gate"], judged["measured"]["verdict"]) == (5, "passed")
    assert told["started"] == {**told["before"], "5": "passed"}
    assert "is proven on a twin" in told["refused"]
    # The measured process prints nothing: asked as if it were the twin, it proves nothing.
    assert judged["none printed"]["verdict"] == "failed"
    assert judged["twin start"]["verdict"] == "passed"
    assert judged["twin"]["verdict"] == "passed"
    assert "twin of the measured process" in judged["twin"]["reason"]
    assert judged["twin"]["proofs"] == [
        "(4096, *) bfloat16 prefill: selected=True 2 times inside the window",
        "(808, *) bfloat16 prefill: selected=True 1 times inside the window",
    ]
    assert told["twin"] == {**told["started"], "6": "passed", "7": "not reached"}
    # Switched off, the fallback is right; the report goes on speaking of the candidate.
    assert judged["twin-off"]["proofs"] == ["no marker was selected; 3 took the fallback"]
    assert told["page"][4:6] == [judged["measured"], judged["twin"]]
    # What an earlier twin printed proves nothing of the one that was started since.
    assert told["another start"] == told["started"]
    # The same plan, given back and deployed again: nothing has run on it since.
    assert told["another deploy"] == told["before"]


if __name__ == "__main__":
    began = time.monotonic()
    print(json.dumps(story(Path(sys.argv[1]))))
    print(f"{time.monotonic() - began:.1f} s", file=sys.stderr)
