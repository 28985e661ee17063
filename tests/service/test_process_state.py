"""What runs is told from /proc alone; every process here is a real one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from deploy.agent import machine, maps, ports
from deploy.agent.roles import Role, role_of

_API = ("python3", "-m", "vllm.entrypoints.openai.api_server")


@contextmanager
def running(*argv: str, **options: object) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, **options) as child:  # type: ignore[call-overload]
        try:
            yield child
        finally:
            child.kill()


def titled(title: str) -> tuple[str, ...]:
    """A process that has given itself a title, as EngineCore does; it does nothing."""
    return ("bash", "-c", f"exec -a '{title}' sleep 60")


def soon(check: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until `check` is true; fail when it is not in time."""
    limit = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < limit, "it did not come to be"
        time.sleep(0.02)


def seen(pid: int) -> machine.Process | None:
    return machine.snapshot().at(pid)


def test_an_engine_is_found_by_its_title_and_marked_an_orphan() -> None:
    with running(*titled("VLLM::EngineCore")) as child:
        soon(lambda: seen(child.pid))

        engine = seen(child.pid)

    assert engine is not None
    assert engine.role is Role.ENGINE
    assert engine.orphan
    assert engine.start > 0
    assert engine.memory > 0


def test_an_engine_below_its_server_is_no_orphan_and_dies_into_one_when_the_server_is_killed(
    tmp_path: Path,
) -> None:
    # The server is adopted by nobody special: the engine's new parent is whoever reaps here.
    server = tmp_path / "vllm"
    server.write_text(
        "import subprocess, time\n"
        "c = subprocess.Popen(['bash', '-c', 'exec -a VLLM::EngineCore sleep 60'])\n"
        "print(c.pid, flush=True)\ntime.sleep(60)\n"
    )
    with running(sys.executable, str(server), "serve", "m") as api:
        assert api.stdout is not None
        engine = int(api.stdout.readline())
        soon(lambda: (p := seen(engine)) and p.role is Role.ENGINE)
        before = machine.snapshot()
        api.kill()
        api.wait()
        soon(lambda: not os.path.exists(f"/proc/{api.pid}"))
        after = machine.snapshot()
        os.kill(engine, 9)

    assert before.at(api.pid) is not None
    assert before.at(api.pid).role is Role.SERVER  # type: ignore[union-attr]
    assert not before.at(engine).orphan  # type: ignore[union-attr]
    assert after.at(engine).orphan  # type: ignore[union-attr]


def test_an_engine_adopted_by_another_process_than_init_is_an_orphan_too() -> None:
    keeper = textwrap.dedent("""
        import ctypes, subprocess, time
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # adopt orphans, as an init of a container does
        subprocess.run(['sh', '-c', 'bash -c "exec -a VLLM::EngineCore sleep 60" & echo $!'])
        time.sleep(60)
    """)
    with running(sys.executable, "-c", keeper) as parent:
        assert parent.stdout is not None
        engine = int(parent.stdout.readline())
        soon(lambda: (p := seen(engine)) and p.parent == parent.pid)

        found = seen(engine)
        os.kill(engine, 9)

    assert found is not None
    assert found.orphan


def test_only_the_server_counts_and_not_who_has_its_name_among_the_arguments(
    tmp_path: Path,
) -> None:
    log = tmp_path / "vllm_serve.log"
    log.touch()
    with ExitStack() as stack:
        start = lambda *argv: stack.enter_context(running(*argv))  # noqa: E731
        tail = start("tail", "-f", str(log))
        pip = start(*titled("pip install vllm-0.18.1.whl"))
        server = start(*titled("python3 -m vllm.entrypoints.openai.api_server"))
        shell = start("sh", "-c", "sleep 60; echo VLLM::EngineCore vllm serve")
        soon(lambda: seen(server.pid))

        found = machine.snapshot()

    assert found.at(server.pid).role is Role.SERVER  # type: ignore[union-attr]
    assert [found.at(other.pid) for other in (tail, pip, shell)] == [None, None, None]


def test_the_caller_and_its_ancestors_are_left_out() -> None:
    # The caller's own command line says `vllm serve`; so does its parent's.
    code = (
        "import os; from deploy.agent import machine; ours = {os.getpid(), os.getppid()}\n"
        "print([p.pid for p in machine.snapshot().processes if p.pid in ours])"
    )
    wrapped = ["bash", "-c", 'exec -a vllm "$0" -c "$1" serve', sys.executable, code]
    done = subprocess.run(wrapped, capture_output=True, text=True, timeout=30, check=True)

    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("argv", "role"),
    [
        (("/usr/bin/python3", "/usr/local/bin/vllm", "serve", "m"), Role.SERVER),
        (
            ("python3.11", "-u", "-X", "dev", "-m", "vllm.entrypoints.cli.main", "serve"),
            Role.SERVER,
        ),
        (_API, Role.SERVER),
        (("VLLM::APIServer_1",), Role.SERVER),
        (("VLLM::EngineCore_DP3",), Role.ENGINE),
        (("MINE::EngineCore",), Role.ENGINE),
        (("VLLM::Worker_TP0",), Role.WORKER),
        (("VLLM::DPCoordinator",), Role.COORDINATOR),
        (("python3", "/usr/local/bin/vllm", "bench", "serve"), Role.BENCH),
        (("/opt/dtk/lib/rocblas/benchmark_tool/rocblas-bench", "-f", "gemm"), Role.BENCH),
        (("/opt/dtk/bin/hipprof", "--hip-trace", "python3", "x.py"), Role.PROFILER),
        (("python3", "-c", "from multiprocessing.spawn import spawn_main; x()"), Role.SPAWNED),
        (("bash", "-c", "vllm serve m"), Role.OTHER),
        (("python3", "edit.py", "vllm", "serve"), Role.OTHER),
        (("python3", "/usr/local/bin/vllm", "--version"), Role.OTHER),
        (("less", "VLLM::EngineCore"), Role.OTHER),
        (("python3", "-c"), Role.OTHER),
        (("python3",), Role.OTHER),
        (("",), Role.OTHER),
        ((), Role.OTHER),
    ],
)
def test_a_command_line_stands_for_one_role(argv: tuple[str, ...], role: Role) -> None:
    assert role_of(argv) is role


def test_a_zombie_engine_is_told_by_the_name_that_is_left() -> None:
    assert role_of((), "VLLM::EngineCor") is Role.ENGINE
    assert role_of((), "VLLM::Worker_TP") is Role.WORKER
    assert role_of((), "kworker/0:1") is Role.OTHER


def test_a_dead_child_of_a_server_is_listed_as_a_zombie(tmp_path: Path) -> None:
    server = tmp_path / "vllm"
    server.write_text(
        "import os, time\npid = os.fork()\nif not pid: os._exit(0)\n"
        "print(pid, flush=True)\ntime.sleep(60)\n"
    )
    with running(sys.executable, str(server), "serve") as api:
        assert api.stdout is not None
        child = int(api.stdout.readline())
        soon(lambda: (p := seen(child)) and p.zombie)

        found = machine.snapshot()

    assert found.at(child).parent == api.pid  # type: ignore[union-attr]


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_two_servers_on_one_port_are_two_listeners(family: socket.AddressFamily) -> None:
    with ExitStack() as stack:
        port = 0
        for _ in range(2):
            heard = stack.enter_context(socket.socket(family))
            heard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            heard.bind(("127.0.0.1" if family == socket.AF_INET else "::1", port))
            heard.listen()
            port = heard.getsockname()[1]

        found = machine.snapshot(port)

    assert len(found.listeners) == 2
    assert all(listener.pids == (os.getpid(),) for listener in found.listeners)


def test_a_listener_is_named_with_its_pid_without_any_tool(tmp_path: Path) -> None:
    code = (
        "import socket,time\ns=socket.socket(); s.bind(('127.0.0.1',0)); s.listen()\n"
        "print(s.getsockname()[1], flush=True); time.sleep(60)"
    )
    with running(sys.executable, "-c", code) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        # A connection *to* the port from elsewhere is not one that listens on it.
        with socket.create_connection(("127.0.0.1", port)):
            found = machine.snapshot(port)
        longer = machine.snapshot(port + 10000) if port < 55000 else None

    assert [(a.address, a.port, a.pids) for a in found.listeners] == [
        ("127.0.0.1", port, (child.pid,))
    ]
    assert found.at(child.pid) is not None
    assert longer is None or longer.listeners == ()


def test_a_port_that_is_bound_but_does_not_listen_yet_is_held() -> None:
    with socket.socket() as early:
        early.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        early.bind(("127.0.0.1", 0))
        port = early.getsockname()[1]

        assert machine.snapshot(port).listeners == ()
        assert ports.bound(port)
    assert not ports.bound(port)


def test_a_connection_that_is_still_closing_does_not_hold_the_port() -> None:
    with socket.socket() as heard:
        heard.bind(("127.0.0.1", 0))
        heard.listen()
        port = heard.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = heard.accept()
        served.close()  # this side closes first, so it is the one that waits
        client.recv(1)
        client.close()

    assert not ports.bound(port)


def test_a_process_of_another_pid_namespace_is_told_apart() -> None:
    argv = (
        "unshare",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        *titled("VLLM::EngineCore"),
    )
    with running(*argv) as outer:

        def inside() -> list[machine.Process]:
            every = machine.snapshot()  # others may run engines on this machine, too
            ours = (p for p in every.of(Role.ENGINE) if outer.pid in every.ancestors(p.pid))
            return [p for p in ours if p.container]

        soon(inside)
        found = inside()
        outer.terminate()

    assert [p.container for p in found] == ["elsewhere"]


def test_whoever_holds_a_device_file_is_listed_bench_tools_included() -> None:
    # No card is here: /dev/null's numbers under a card's name, in a mount namespace of its own.
    code = (
        "from deploy.agent import machine\n"
        "print(*[(p.pid, *p.devices) for p in machine.snapshot().processes if p.devices])"
    )
    script = (
        "set -e; mkdir -p /dev/dri; mount -t tmpfs none /dev/dri; mknod /dev/dri/renderD128 c 1 3\n"
        'sleep 60 < /dev/dri/renderD128 & "$0" -c "$1"; echo $!; kill $!'
    )
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", script, sys.executable, code],
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    holder, pid = done.stdout.split("\n")[:2]

    assert holder == f"({pid}, '/dev/dri/renderD128')"


def test_the_files_of_a_maps_text_keep_their_whole_name_and_only_the_gone_are_gone(
    tmp_path: Path,
) -> None:
    odd = tmp_path / "x.so (deleted)"
    odd.write_text("a file of that very name")
    text = (
        "7f00-7f01 r-xp 00000000 08:01 101 /sp/vllm/_rocm_C.abi3.so\n"
        "7f02-7f03 r-xp 00000000 08:01 102 /d ir/y.so\n"
        "7f04-7f05 r-xp 00000000 08:01 103 /sp/vllm/t.so (deleted)\n"
        f"7f06-7f07 r-xp 00000000 08:01 {odd.stat().st_ino} {odd}\n"
        "7f08-7f09 rwxp 00000000 00:01 105 /memfd:JITCode (deleted)\n"
        "7f0a-7f0b rw-s 00000000 00:01 106 /SYSV00000000 (deleted)\n"
        "7f0c-7f0d rw-s 00000000 00:05 107 /dev/zero\n"
        "7f12-7f13 r-xp 00000000 00:19 108 /dev/shm/_rocm_C.abi3.so\n"
        "7f0e-7f0f rw-p 00000000 00:00 0 \n"
        "7f10-7f11 rw-p 00000000 00:00 0 [heap]\n"
    )

    found = {m.path: m.deleted for m in maps.parse(text)}

    assert found == {
        "/sp/vllm/_rocm_C.abi3.so": False,
        "/d ir/y.so": False,
        "/sp/vllm/t.so": True,
        str(odd): False,
        "/dev/shm/_rocm_C.abi3.so": False,
    }


def test_a_recorded_maps_text_names_the_stale_library_and_its_inode() -> None:
    text = (Path(__file__).parent / "fixtures" / "proc_maps_deleted.txt").read_text()
    site = "/usr/local/lib/python3.10/dist-packages/vllm/"

    assert maps.parse(text)[1:] == (
        maps.Mapped(f"{site}_rocm_C.abi3.so", "fd:01", 2361187, deleted=True),
        maps.Mapped(f"{site}_C.abi3.so", "fd:01", 2361150),
    )


def test_a_gone_library_and_one_of_that_very_name_are_told_apart_in_a_live_process(
    tmp_path: Path,
) -> None:
    named, gone = tmp_path / "x.so (deleted)", tmp_path / "t.so"
    compile_library(named, 1)
    compile_library(gone, 2)
    code = (
        f"import ctypes,sys\nfor n in {[str(named), str(gone)]!r}: ctypes.CDLL(n)\n"
        "print(1, flush=True); sys.stdin.read()"
    )
    with running(sys.executable, "-c", code, stdin=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        gone.unlink()
        found = {m.path: m.deleted for m in maps.of(child.pid) if m.path.startswith(str(tmp_path))}

    assert found == {str(named): False, str(gone): True}


def test_a_library_replaced_under_a_running_process_shows_as_gone(tmp_path: Path) -> None:
    library = tmp_path / "t.so"
    compile_library(library, 1)
    code = (
        f"import ctypes,sys; ctypes.CDLL({str(library)!r}); print(1, flush=True); sys.stdin.read()"
    )
    with running(sys.executable, "-c", code, stdin=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        before = [m for m in maps.of(child.pid) if m.path == str(library)]
        same = maps.identities([str(library)])[str(library)]
        compile_library(tmp_path / "n.so", 2)
        os.replace(tmp_path / "n.so", library)
        after = [m for m in maps.of(child.pid) if m.path == str(library)]
        now = maps.identities([str(library)])[str(library)]

    assert [(m.device, m.inode) for m in before] == [same]
    assert not before[0].deleted
    assert after[0].deleted
    assert (after[0].device, after[0].inode) != now


def compile_library(path: Path, value: int) -> None:
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)],
        input=f"int f(void){{return {value};}}", text=True, check=True, timeout=60,
    )  # fmt: skip


def test_a_process_that_is_gone_has_no_start_and_no_mappings() -> None:
    child = subprocess.Popen(["true"])
    child.wait()

    assert machine.start_of(child.pid) == 0
    assert maps.of(child.pid) == ()


def test_what_may_not_be_looked_at_is_no_answer(tmp_path: Path) -> None:
    code = (
        "import os; from deploy.agent import machine, maps, proc\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "print(machine.snapshot().hidden > 0)\n"
        "try: maps.of(1)\nexcept proc.CannotTell as err: print(err.what)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )

    assert done.stdout.split("\n")[:2] == ["True", "cannot tell the mappings of process 1"]
