"""The rendered scripts, run in a container of the built image, with stand-ins for vLLM and hipprof.

The stand-ins have the processes, ports and files of the real ones and neither a model nor a card.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import scripts
from deploy.agent.launch import Launch
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.assembly import Folders, Order, build, handed_in
from deploy.carriers.container import Container
from deploy.carriers.engine import open_engine
from deploy.image.layer import Entry
from tests.carriers import dock

pytestmark = [pytest.mark.docker, pytest.mark.slow]

HERE = Path(__file__).resolve().parent
DIR = "/root/submission"
SERVER = HERE.parent / "service/standin/vllm"


class Box:
    """One running container."""

    def __init__(self, image: str, *options: str) -> None:
        argv = (
            "docker",
            "run",
            "-d",
            "--init",
            "--network",
            "none",
            *options,
            image,
            "sleep",
            "900",
        )
        self.id = _run(argv).stdout.strip()

    def sh(self, line: str, *options: str, timeout: float = 90) -> subprocess.CompletedProcess[str]:
        return _run(("docker", "exec", *options, self.id, "sh", "-c", line), timeout=timeout)

    def script(self, words: str, *options: str) -> subprocess.CompletedProcess[str]:
        """Run a script of launch.dir from another folder."""
        return self.sh(f"cd /tmp && {DIR}/{words}", *options)

    def remove(self) -> None:
        _run(("docker", "rm", "-f", self.id))


def _run(argv: tuple[str, ...], timeout: float = 90) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)


def _stand_in(name: str) -> bytes:
    return (HERE / "standin" / name).read_bytes()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("story")
    stand_ins = (
        Entry(path="usr/local/bin/vllm", mode=0o755, data=_stand_in("vllm")),
        Entry(path="usr/local/bin/hipprof", mode=0o755, data=_stand_in("hipprof")),
        Entry(path="usr/local/lib/standin/vllm", mode=0o755, data=SERVER.read_bytes()),
        Entry(path="srv/4-8K.jsonl", data=b"{}"),
        Entry(path="srv/model/config.json", data=b"{}"),
    )
    reference = dock.own("launch")
    with open_engine() as engine, dock.base_image(engine, entries=stand_ins) as base:
        manifest = dock.manifest(base)
        made = dock.bundle(folder, meaning=manifest.meaning())
        rendered = scripts.on_target(manifest)
        order = Order(
            bundle=made,
            base=base,
            reference=reference,
            epoch=dock.EPOCH,
            extras=handed_in(made, rendered),
        )
        build(engine, order, Folders(folder / "work", folder / "cache"))
        yield str(reference)
        engine.remove_image(str(reference))


@pytest.fixture
def box(image: str) -> Iterator[Box]:
    made = Box(image)
    yield made
    made.remove()


def test_a_start_ends_ready_recorded_and_detached_and_a_stop_leaves_nothing(box: Box) -> None:
    started = box.script("start_vllm.sh", "-e", "http_proxy=http://127.0.0.1:9")

    assert started.returncode == 0, started.stderr
    pid = int(started.stdout)
    record = json.loads(box.sh(f"cat {DIR}/runs/current/run.json").stdout)
    assert record["pid"] == pid
    assert record["argv"][:3] == ["vllm", "serve", "/srv/model"]
    environment = box.sh(f"tr '\\0' '\\n' </proc/{pid}/environ").stdout.splitlines()
    assert "VLLM_STORY=it's $HOME" in environment
    assert not [line for line in environment if line.startswith("http_proxy=")]
    assert box.sh(f"readlink /proc/{pid}/cwd").stdout.strip() == DIR
    seen = box.script("verify.sh")
    assert seen.returncode == 0, seen.stderr
    assert f"process {pid} " in seen.stdout
    assert "vllm/envs.py" in seen.stdout
    for place in ("empty", "launch"):
        assert f"origin  {place}: {dock.SITE}/vllm/__init__.py" in seen.stdout.splitlines()

    stopped = box.script("stop_vllm.sh")

    assert stopped.returncode == 0, stopped.stderr
    assert not box.sh("ls /proc/*/exe -l 2>/dev/null | grep python").stdout


def test_a_second_start_is_refused_and_names_the_first(box: Box) -> None:
    first = box.script("start_vllm.sh")
    pid = first.stdout.strip()

    second = box.script("start_vllm.sh")

    assert first.returncode == 0, first.stderr
    assert second.returncode == 6
    assert pid in second.stderr
    assert len(box.sh(f"ls {DIR}/runs").stdout.split()) == 2  # one start, and the link to it


def test_of_starts_at_the_same_time_one_starts_and_the_others_are_refused(box: Box) -> None:
    one = f"{DIR}/start_vllm.sh --no-wait >/tmp/out.$i 2>/tmp/err.$i; echo $?"
    codes = box.sh(f"for i in 1 2 3; do ({one}) & done; wait", "-e", "STANDIN_SLOW=60")

    assert sorted(codes.stdout.split()) == ["0", "6", "6"], box.sh("cat /tmp/err.*").stdout
    pid = box.sh("cat /tmp/out.*").stdout.strip()
    held = box.sh("ls -l /proc/[0-9]*/fd 2>/dev/null | grep start.lock").stdout
    assert box.sh(f"kill -0 {pid}").returncode == 0
    assert len(box.sh(f"ls {DIR}/runs").stdout.split()) == 2  # one start, and the link to it
    assert not held


def test_a_start_that_another_start_precedes_says_which(box: Box) -> None:
    holder = "import fcntl, time; f = open('.start.lock', 'w'); fcntl.flock(f, 2)"
    holder += "; print('pid 4711', file=f, flush=True); open('held', 'w'); time.sleep(60)"
    box.sh(f'cd {DIR} && (python3 -c "{holder}" & while [ ! -e held ]; do sleep 0.1; done)')

    refused = box.script("start_vllm.sh")

    assert refused.returncode == 6
    assert f"{DIR}/.start.lock is held by: pid 4711" in refused.stderr
    assert len(refused.stderr.splitlines()[-3:]) == 3


@pytest.mark.parametrize("has_its_own", [True, False])
def test_a_program_of_another_python_starts_only_with_the_verified_package(
    box: Box, has_its_own: bool
) -> None:
    box.sh("python3 -m venv --without-pip --system-site-packages /opt/other")
    box.sh(
        "sed '1s,.*,#!/opt/other/bin/python3 -s,' /usr/local/lib/standin/vllm >/usr/local/bin/vllm"
    )
    own = "/opt/other/lib/python3.11/site-packages/vllm"
    if has_its_own:
        box.sh(f"mkdir {own} && touch {own}/__init__.py")

    started = box.script("start_vllm.sh --no-wait")

    assert box.sh("/opt/other/bin/python3 -c 'import vllm'").returncode == 0
    if has_its_own:
        assert started.returncode == 10
        assert f"/usr/local/bin/vllm starts a python that finds {own}/" in started.stderr
        assert box.sh(f"ls {DIR}/runs").returncode != 0
    else:
        assert started.returncode == 0, started.stderr


def test_an_engine_that_outlived_its_server_refuses_a_start(box: Box) -> None:
    pid = box.script("start_vllm.sh").stdout.strip()
    box.sh(f"kill -9 {pid}; sleep 0.5")

    refused = box.script("start_vllm.sh")

    assert refused.returncode == 6
    assert "EngineCore" in refused.stderr
    assert box.script("stop_vllm.sh").returncode == 0
    assert box.script("start_vllm.sh").returncode == 0


def test_one_changed_byte_is_named_by_verify_and_refuses_a_start(box: Box) -> None:
    box.sh(f"sed -i s/submission/submissioN/ {dock.SITE}/vllm/envs.py")

    seen = box.script("verify.sh")
    refused = box.script("start_vllm.sh")

    assert seen.returncode == refused.returncode == 10
    for said in (seen.stderr, refused.stderr):
        assert "changed: vllm/envs.py" in said
    assert "not started: verify failed" in refused.stderr
    assert box.sh(f"ls {DIR}/runs").returncode != 0


def test_a_server_that_dies_is_reported_with_its_last_words(box: Box) -> None:
    box.sh("printf '#!/bin/sh\\necho CUDA is gone; exit 3\\n' >/usr/local/bin/vllm")

    dead = box.script("start_vllm.sh")

    assert dead.returncode == 10
    assert "it ended with 3" in dead.stderr
    assert "CUDA is gone" in dead.stderr


def test_a_bus_error_points_at_shared_memory(box: Box) -> None:
    box.sh("printf '#!/bin/sh\\nsleep 1; kill -BUS $$\\n' >/usr/local/bin/vllm")

    dead = box.script("start_vllm.sh")

    assert "bus error (135); /dev/shm has 65536 KiB of 1024 KiB asked for" in dead.stderr


def test_a_server_that_is_not_ready_in_time_is_left_and_named(box: Box) -> None:
    box.sh(f"sed -i 's/^ready=.*/ready=2/' {DIR}/start_vllm.sh")

    late = box.script("start_vllm.sh", "-e", "STANDIN_SLOW=30")

    assert late.returncode == 10
    assert "not ready after 2 s" in late.stderr
    assert box.sh(f"kill -0 {late.stdout.strip()}").returncode == 0


_DRIPS = """#!/usr/bin/python3
import socket, time
listener = socket.create_server(("127.0.0.1", 8001))
while True:
    caller = listener.accept()[0]
    try:
        for byte in b"HTTP/1.1 200 OK\\r\\nX-A: " + b"a" * 10000:
            caller.send(bytes([byte]))
            time.sleep(1)
    except OSError:
        pass
"""


def test_a_health_that_never_ends_does_not_hold_up_a_start(box: Box) -> None:
    box.sh(f"sed -i 's/^ready=.*/ready=2/' {DIR}/start_vllm.sh")
    box.sh(f"cat >/usr/local/bin/vllm <<'E'\n{_DRIPS}E")

    late = box.sh(f"timeout 60 {DIR}/start_vllm.sh")

    assert late.returncode == 10
    assert "not ready after 2 s" in late.stderr


def test_a_start_without_waiting_returns_at_once(box: Box) -> None:
    begun = time.monotonic()

    started = box.script("start_vllm.sh --no-wait", "-e", "STANDIN_SLOW=60")

    assert started.returncode == 0, started.stderr
    assert time.monotonic() - begun < 20
    assert box.sh(f"kill -0 {started.stdout.strip()}").returncode == 0


def test_what_does_not_end_is_named_and_killed_only_when_told(box: Box) -> None:
    stubborn = "#!/bin/sh\\ntrap : TERM\\nwhile :; do sleep 1; done\\n"
    box.sh(f"printf '{stubborn}' >/usr/local/bin/vllm")
    pid = box.script("start_vllm.sh --no-wait").stdout.strip()

    asked = box.script("stop_vllm.sh --grace 2")
    lives = box.sh(f"kill -0 {pid}").returncode == 0
    killed = box.script("stop_vllm.sh --grace 1 --kill")

    assert asked.returncode == 6, asked.stderr
    assert pid in asked.stderr
    assert lives
    assert killed.returncode == 0, killed.stderr
    assert box.sh(f"kill -0 {pid}").returncode != 0


def test_a_service_is_started_in_an_image_s_container_from_outside(
    box: Box, tmp_path: Path
) -> None:
    manifest = dock.manifest("vendor:1")
    made = dock.bundle(tmp_path, meaning=manifest.meaning())
    options = {
        "launch": Launch.of_manifest(manifest.meaning()).to_json(),
        "scripts": {
            one.name: {"mode": f"{one.mode:04o}", "text": one.data.decode()}
            for one in scripts.on_target(manifest)
        },
        "bundle": {"name": made.path.name, "sha256": made.sha256},
    }

    started = Container(box.id).deliver(made, Request(verb=Verb.START, options=options))
    stopped = Container(box.id).deliver(made, Request(verb=Verb.STOP, options=options))

    assert started.exit == 0, started.error
    assert stopped.outcome == "stopped", stopped.error
    assert box.sh(f"ls {DIR}/*.pyz").stdout.split() == [f"{DIR}/{made.path.name}"]


_WRITES = (
    "openat",
    "open",
    "creat",
    "unlink",
    "unlinkat",
    "rename",
    "renameat2",
    "mkdir",
    "mkdirat",
    "chmod",
    "fchmodat",
    "chown",
    "fchownat",
    "link",
    "linkat",
    "symlink",
    "symlinkat",
    "truncate",
    "utimensat",
    "kill",
    "tgkill",
    "pidfd_send_signal",
)


def test_verify_writes_nothing_and_signals_nobody(box: Box) -> None:
    box.script("start_vllm.sh")
    calls = ",".join(_WRITES)
    trace = f"strace -ff -qq -s 256 -e signal=none -e trace={calls} -o /tmp/trace/of"
    seen = box.sh(f"mkdir /tmp/trace && {trace} {DIR}/verify.sh")

    assert seen.returncode == 0, seen.stderr
    lines = box.sh("cat /tmp/trace/*").stdout.splitlines()
    assert len(lines) > 100
    assert not [line for line in lines if _changes(line)]


def _changes(line: str) -> bool:
    """True for a call that succeeded in changing a file of the target, or sent a signal."""
    call = line.partition("(")[0]
    if " = -1 " in line or '"/tmp/dcu-bundle-' in line:  # the empty folder of the import probe
        return False
    if call.startswith("open"):
        harmless = '"/dev/null"' in line or '"/dev/tty"' in line or "/proc/" in line
        return ("O_WRONLY" in line or "O_RDWR" in line or "O_CREAT" in line) and not harmless
    if call in ("kill", "tgkill", "pidfd_send_signal"):
        return ", 0)" not in line  # signal 0 only asks
    return True


def test_a_read_only_root_can_be_verified_and_says_why_it_cannot_start(image: str) -> None:
    box = Box(image, "--read-only")
    try:
        seen = box.script("verify.sh")
        refused = box.script("start_vllm.sh")
    finally:
        box.remove()

    assert seen.returncode == 0, seen.stderr
    assert refused.returncode == 3
    assert f"cannot write below {DIR}" in refused.stderr


def test_a_bench_leaves_its_result_in_a_new_folder_each_time(box: Box) -> None:
    for _ in range(2):
        done = box.script("run_throughput.sh", "-e", "https_proxy=http://127.0.0.1:9")
        assert done.returncode == 0, done.stderr
        assert "4-8K  12.5000 tok/s" in done.stdout

    assert len(box.sh(f"ls {DIR}/bench").stdout.split()) == 2


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ('{"completed": 0, "failed": 3, "errors": ["x", "x", "x"]}', "0 of 3 requests completed"),
        (
            '{"completed": 3, "failed": 0, "errors": ["", "", ""], "output_lens": [0, 4, 4]}',
            "requests without an answer",
        ),
        ("{", "no result"),
    ],
    ids=["all failed", "silent errors", "cut off"],
)
def test_a_bench_that_only_looks_successful_fails(box: Box, result: str, why: str) -> None:
    done = box.script("run_throughput.sh", "-e", f"BENCH={result}")

    assert done.returncode == 10
    assert why in done.stderr


def test_another_dataset_than_the_locked_one_is_refused(box: Box) -> None:
    box.sh("echo x >>/srv/4-8K.jsonl")

    done = box.script("run_throughput.sh")

    assert done.returncode == 4
    assert "is not the locked one" in done.stderr


def test_a_profile_starts_records_and_ends_its_server(box: Box) -> None:
    done = box.script("profile.sh echo load")

    assert done.returncode == 0, done.stderr
    assert "7 kernel calls" in done.stderr
    said = [line.split() for line in box.sh("cat /tmp/hipprof.said").stdout.splitlines()]
    assert [words[1] for words in said] == ["--start", "--stop", "--flush", "--exit"]
    assert {words[2] for words in said} == {"/opt/tool/lib"}
    assert box.sh("ls /proc/*/exe -l 2>/dev/null | grep python").stdout == ""


def test_an_empty_profile_is_a_failure(box: Box) -> None:
    done = box.script("profile.sh echo load", "-e", "CALLS=0")

    assert done.returncode == 10
    assert "holds no kernel call" in done.stderr
