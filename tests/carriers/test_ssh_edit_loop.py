"""The edit loop over a real sshd: uncommitted edits, audit, listing, and a service in the way.

A repository, its manifest and the whole flow on this side; behind `ssh:a` a target that is as its
vendor made it. What a local target answers is the yardstick.
"""

from __future__ import annotations

import _ctypes
import getpass
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy import flow, inventory
from deploy.agent.launch import read_run
from deploy.agent.words import BundleError, Exit, Verb
from deploy.bundle import Bundle
from deploy.carriers import Request
from deploy.gates import Visit
from deploy.inventory import Key
from deploy.layout import HERE
from tests.agent.target import BASE_FILES
from tests.carriers.remote import Remote
from tests.carriers.sshd import free_port
from tests.service.test_service_verbs import STANDIN, own_processes
from tests.unit.test_flow_edits import CORE, Bench

pytestmark = [pytest.mark.sshd, pytest.mark.slow]

TO = "ssh:a"
DEPLOY = Request(verb=Verb.DEPLOY, operator="tester")
PLAIN = "SetEnv SHLVL=5"


def introduce(remote: Remote, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the target known as `ssh:a`, by the two files that an operator writes."""
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text(remote.sshd.config_of("a", f"User {getpass.getuser()}"))
    hosts = home / "hosts.yaml"
    hosts.write_text(f'hosts:\n  a:\n    ssh: a\n    root: "{remote.target.root}"\n')
    inventory.trust(hosts, "a", Key(fingerprint=remote.sshd.fingerprint, reason="test"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("DCU_HOSTS", str(hosts))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "bench")


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    made = Remote(tmp_path / "remote", PLAIN).start()
    try:
        introduce(made, tmp_path / "home", monkeypatch)
        yield made
    finally:
        made.stop()


def ask(bench: Bench, to: str, verb: Verb, **options: Any) -> Visit:
    [visit] = flow.run("mine", to, Request(verb=verb, options=options), bench.layout)
    return visit


def raw(visit: Visit) -> dict[str, Any]:
    assert visit.evidence is not None, visit
    return dict(visit.evidence.raw)


def comparable(visit: Visit) -> dict[str, Any]:
    """The evidence without what may differ between two equal targets."""
    found = raw(visit)
    found.pop("incidental")
    return found


def test_uncommitted_edits_reach_a_target_over_ssh_under_a_plan_of_their_own(
    bench: Bench, remote: Remote
) -> None:
    locked, _ = flow.lock("mine", bench.layout)
    edits: list[tuple[str, bytes | None]] = [
        (CORE, b"V = 'first'\n"),
        (CORE, b"V = 'again'\n"),  # of equal size, within the same second
        ("pack/fresh.py", b"NEW = 1\n"),
        ("pack/fresh.py", None),
    ]
    plans = []
    for path, data in edits:
        if data is None:
            (bench.repo / path).unlink()
        else:
            bench.write(path, data)
        [visit] = flow.deploy("mine", TO, DEPLOY, bench.layout, worktree=True)
        assert (visit.exit, visit.target) == (Exit.OK, TO), visit
        assert raw(visit)["verb"] == Verb.VERIFY
        assert {row["state"] for row in raw(visit)["files"]} == {"ok"}
        assert (remote.target.read(path) if remote.target.exists(path) else None) == data
        plans.append(raw(visit)["plan"])

    assert remote.target.imported("pack.core") == "again"
    assert locked.expect["plan"] not in plans
    assert len(set(plans)) == 3  # without the added file it is the plan of before
    assert plans[1] == plans[3]
    assert bench.git("rev-parse", "HEAD") == bench.head
    filed = json.loads((bench.layout.out_of("mine") / "evidence-ssh-a.json").read_text())
    assert filed["plan"] == plans[-1]


def test_the_audit_of_a_whole_package_answers_as_on_a_local_target(
    bench: Bench, remote: Remote
) -> None:
    flow.lock("mine", bench.layout)
    for visit in flow.deploy("mine", f"{bench.to},{TO}", DEPLOY, bench.layout):
        assert visit.exit == Exit.OK, visit

    clean = [ask(bench, to, Verb.VERIFY, all=True) for to in (bench.to, TO)]
    for target in (bench.target, remote.target):
        target.write("pack/tool.py", b"TOOL = 'edited'\n")
        target.write("pack/stray.py", b"STRAY = 1\n")
    edited = [ask(bench, to, Verb.VERIFY, all=True) for to in (bench.to, TO)]

    assert [visit.exit for visit in (*clean, *edited)] == [0, 0, 10, 10]
    assert raw(clean[1])["audit"]["owners"]["ours"] == [CORE]
    assert comparable(clean[0])["audit"] == comparable(clean[1])["audit"]
    assert comparable(edited[0])["audit"] == comparable(edited[1])["audit"]
    verdicts = [[(g.number, g.verdict, g.faults) for g in visit.gates] for visit in edited]
    assert verdicts[0] == verdicts[1]
    faults = edited[1].gates[0].faults
    for path in ("pack/stray.py", "pack/tool.py"):
        assert any(fault.startswith(f"foreign: {path}") for fault in faults), faults


def test_the_listing_of_a_vendors_package_is_that_of_a_local_target(
    bench: Bench, remote: Remote
) -> None:
    for target in (bench.target, remote.target):
        target.write("pack/blas.so", b"\x7fELF")

    path, changed = flow.list_base("mine", bench.to, bench.layout)
    local = path.read_bytes()
    path.unlink()
    again, written = flow.list_base("mine", TO, bench.layout)

    assert (changed, written, again) == (True, True, path)
    assert path.read_bytes() == local
    assert b"pack/blas.so" in local
    remote.target.write("pack/blas.so", b"\x7fELF of another build")
    assert flow.list_base("mine", TO, bench.layout)[1] is True


def test_a_target_with_an_overlay_is_no_vendors_over_ssh_either(
    bench: Bench, remote: Remote
) -> None:
    flow.lock("mine", bench.layout)
    for visit in flow.deploy("mine", f"{bench.to},{TO}", DEPLOY, bench.layout):
        assert visit.exit == Exit.OK, visit

    told = []
    for to in (bench.to, TO):
        with pytest.raises(BundleError) as caught:
            flow.list_base("mine", to, bench.layout)
        told.append((caught.value.exit, caught.value.what, caught.value.why, caught.value.fix))

    assert told[0] == told[1]
    assert told[1][:2] == (Exit.REFUSED, "this target is not as its vendor made it")
    assert not bench.layout.files("mine").exists()


class Service:
    """A stand-in server that maps a file of the target's package, with the record of its start."""

    def __init__(self, bench: Bench, remote: Remote, inside: tuple[str, ...]) -> None:
        self.bench, self.remote, self.inside = bench, remote, inside
        self.launch = remote.target.root / "launch"
        self.port = free_port()
        manifest = bench.layout.manifest("mine")
        manifest.write_text(manifest.read_text() + f"  port: {self.port}\n")

    def start(self, bundle: Bundle) -> int:
        """Start it as the rendered script does, and record it by the bundle's own verb."""
        library = self.remote.target.top / "pack" / "native.so"
        shutil.copy(_ctypes.__file__, library)
        run = self.launch / "runs" / "x"
        run.mkdir(parents=True)
        shell = 'cd "$1" && shift && { setsid "$@" >serve.log 2>&1 </dev/null & echo $!; }'
        words = (sys.executable, str(STANDIN), "serve", "/model", "--port", str(self.port))
        env = {**os.environ, "STANDIN_LIBRARY": str(library)}
        pid = self.among("sh", "-c", shell, "sh", str(run), *words, env=env).strip()
        self._await(run / "serve.log")
        agent = (sys.executable, "-I", "-S", str(bundle.path))
        root = ("--root", str(self.remote.target.root))
        self.among(*agent, "record", *root, "--pid", pid, "--run", str(run))
        found = read_run(str(self.launch))
        assert found is not None
        assert found.pid == int(pid)
        return found.pid

    def among(self, *argv: str, env: dict[str, str] | None = None) -> str:
        """Run a command among the processes of this test only; return its output."""
        done = subprocess.run(
            [*self.inside, *argv], capture_output=True, text=True, timeout=60, check=True, env=env
        )
        return done.stdout

    def _await(self, log: Path) -> None:
        end = time.monotonic() + 20
        while not (log.exists() and {b"engine is up", b"startup complete"} <= self._said(log)):
            assert time.monotonic() < end, log.read_bytes()
            time.sleep(0.05)

    def _said(self, log: Path) -> set[bytes]:
        text = log.read_bytes()
        return {word for word in (b"engine is up", b"startup complete") if word in text}

    def processes(self) -> dict[str, int]:
        """The pids, as the target has them, of what runs of the server."""
        listed = self.among("ps", "-ww", "-eo", "pid=,args=")  # -ww: whatever COLUMNS says
        rows = (line.split(None, 1) for line in listed.splitlines())
        kinds = {"engine": "VLLM::EngineCore", "server": str(STANDIN)}
        found = [(pid, args) for pid, args in rows]
        return {k: int(pid) for k, word in kinds.items() for pid, args in found if word in args}

    def inv(self, *words: str) -> subprocess.CompletedProcess[str]:
        """One call of the task in a checkout of the product's own code and this manifest."""
        top = self.bench.layout.top
        if not (top / "deploy").exists():
            # A copy: the product finds its checkout by where its code really is.
            left = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HERE.top / "deploy", top / "deploy", ignore=left)
            shutil.copytree(HERE.top / "docker", top / "docker")
            shutil.copy(HERE.top / "tasks.py", top / "tasks.py")
        return subprocess.run(
            [sys.executable, "-m", "invoke", *words, "-n", "mine", "-t", TO],
            capture_output=True, text=True, timeout=120, check=False, cwd=top,
        )  # fmt: skip


@pytest.fixture
def service(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    with own_processes() as inside:
        # Others may run servers on this machine: whoever comes in finds this test's processes only.
        enter = f'ForceCommand {" ".join(inside)} sh -c "$SSH_ORIGINAL_COMMAND"'
        remote = Remote(tmp_path / "remote", PLAIN, enter).start()
        try:
            introduce(remote, tmp_path / "home", monkeypatch)
            yield Service(bench, remote, inside)
        finally:
            remote.stop()


@pytest.mark.parametrize("edit", ["", "--worktree"])
def test_a_deploy_over_ssh_refuses_a_running_service_and_stops_it_when_asked(
    service: Service, edit: str
) -> None:
    flow.lock("mine", service.bench.layout)
    _, made = flow.bundle("mine", service.bench.layout)
    pid = service.start(made)
    running = service.processes()
    assert running["server"] == pid
    want = b"V = 'ours'\n"
    if edit:
        want = b"V = 'not committed'\n"
        service.bench.write(CORE, want)
    words = ("deploy", *([edit] if edit else []), "--json")

    refused = service.inv(*words)

    assert refused.returncode == Exit.REFUSED, refused.stderr
    [row] = json.loads(refused.stdout)["targets"]
    assert row["error"]["what"] == "a process runs from this site"
    assert f"pid {running['engine']} (" in row["error"]["why"]
    assert "pack/native.so" in row["error"]["why"]
    assert service.remote.target.read(CORE) == BASE_FILES[CORE]
    assert service.processes() == running

    stopped = service.inv(*words, "--stop-service")

    assert stopped.returncode == Exit.OK, stopped.stderr
    assert "ssh:a: no service runs" in stopped.stderr
    assert service.processes() == {}
    assert service.remote.target.read(CORE) == want
    again = service.inv(*words, "--stop-service")
    assert again.returncode == Exit.OK, again.stderr
