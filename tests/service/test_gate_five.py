"""Gate 5 on real processes: a stand-in server, started by a script, held against its launch."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.agent import (
    counters,
    faults,
    health,
    interpreter,
    launch,
    machine,
    proc,
    serve,
    service,
)
from deploy.agent.launch import Launch, Run
from deploy.agent.service import Wanted

STANDIN = Path(__file__).parent / "standin" / "vllm"
PLAN = "a" * 64


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def soon(check: Callable[[], object], seconds: float = 15.0) -> None:
    limit = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < limit, "it did not come to be"
        time.sleep(0.05)


@dataclass
class Bench:
    """A site with one library, a launch folder, and whatever was started there."""

    folder: Path
    wanted: Wanted
    started: list[subprocess.Popen[bytes]] = dataclasses.field(default_factory=list)

    def start(self, *, record: bool = True, env: dict[str, str] | None = None, cwd: str = "",
              argv: tuple[str, ...] = (), python: tuple[str, ...] = (sys.executable,),
              ) -> subprocess.Popen[bytes]:  # fmt: skip
        locked = self.wanted.launch
        words = argv or locked.argv
        log = (self.folder / "serve.log").open("ab")
        child = subprocess.Popen(
            (*python, str(STANDIN), *words[1:]),
            cwd=cwd or locked.dir,
            env={"PATH": os.environ["PATH"], "STANDIN_LIBRARY": str(self.library)}
            | dict(locked.env) | (env or {}),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()
        self.started.append(child)
        if record:
            folder = launch.new_run(locked.dir, f"20260101T000000Z-{len(self.started)}")
            launch.record(self.run(child.pid, folder))
        listening = lambda: any(  # noqa: E731
            child.pid in heard.pids for heard in machine.snapshot(self.wanted.launch.port).listeners
        )
        soon(lambda: child.poll() is not None or (listening() and self.mapped(child.pid)))
        return child

    def run(self, pid: int, folder: str) -> Run:
        return Run(
            folder=folder, pid=pid, start=machine.start_of(pid), boot=machine.boot_id(),
            plan=PLAN, argv=self.wanted.launch.argv, port=self.wanted.launch.port, receipt="r1",
        )  # fmt: skip

    def mapped(self, pid: int) -> bool:
        seen = machine.snapshot()
        return any(
            str(self.library) in Path(f"/proc/{p.pid}/maps").read_text() for p in seen.family(pid)
        )

    @property
    def library(self) -> Path:
        return Path(self.wanted.site) / "vllm" / "_C.abi3.so"

    def seen(self, **options: Any) -> dict[str, Any]:
        """What is there of this test's processes; others on this machine may run servers too."""
        seen = service.observe(self.wanted, timeout=2, cards=False, **options)
        ours = {child.pid for child in self.started}
        seen["processes"] = [row for row in seen["processes"] if row["session"] in ours]
        return seen

    def found(self, **options: Any) -> list[str]:
        """What gate 5 says after a start: the kinds of its faults, warnings in brackets."""
        seen = self.seen(**options)
        found = faults.after_start(
            seen, self.wanted.launch, plan=PLAN, receipt="r1", asked=options.get("ask", True)
        )
        return sorted(f"({f.what})" if f.warning else f.what for f in found)

    def texts(self) -> str:
        seen = self.seen()
        found = faults.after_start(seen, self.wanted.launch, plan=PLAN, receipt="r1")
        return "\n".join(fault.text for fault in found)

    def before(self) -> list[str]:
        seen = self.seen(ask=False)
        return sorted(f.what for f in faults.before_start(seen) if not f.warning)


def base_python(given: dict[str, str]) -> interpreter.Interpreter:
    """The interpreter that runs the tests, as if started as the service is, in an environment."""
    found = interpreter.of_process(os.getpid(), (sys.executable,), {}, "/")
    assert found is not None
    return dataclasses.replace(found, environment=given)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    site, model, folder = tmp_path / "site", tmp_path / "model", tmp_path / "submission"
    for path in (site / "vllm", model, folder):
        path.mkdir(parents=True)
    library(site / "vllm" / "_C.abi3.so", 1)
    (model / "config.json").write_text("{}")
    port = free_port()
    argv = ("vllm", "serve", str(model), "--served-model-name", "m", "--port", str(port))
    locked = Launch(
        dir=str(folder), argv=argv, port=port, env={"VLLM_DCU_KERNEL_DIAG": "1"},
        model=str(model), served_name="m", files={"config.json": (2, "")},
    )  # fmt: skip
    sha = service._sha256(str(site / "vllm" / "_C.abi3.so"))
    made = Bench(
        folder,
        Wanted(
            launch=locked, site=str(site), package="vllm", plan=PLAN,
            libraries={"vllm/_C.abi3.so": sha}, receipt="r1",
            python=lambda: base_python(dict(os.environ)),
        ),
    )  # fmt: skip
    yield made
    for child in made.started:
        for process in machine.snapshot(also=(child.pid,)).family(child.pid):
            if child.pid in (process.pid, process.session):
                os.kill(process.pid, signal.SIGKILL)
        child.kill()
        child.wait()


def library(path: Path, value: int) -> None:
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)],
        input=f"int f(void){{return {value};}}", text=True, check=True, timeout=60,
    )  # fmt: skip


def test_a_clean_start_passes_before_and_after(bench: Bench) -> None:
    assert bench.before() == []

    bench.start()

    assert bench.found() == []


@pytest.mark.slow
def test_twenty_clean_starts_raise_no_alarm(bench: Bench) -> None:
    for _ in range(20):
        assert bench.before() == []
        bench.start()
        assert bench.found() == []
        run = launch.read_run(bench.wanted.launch.dir)
        assert run is not None
        assert {row["how"] for row in serve.end(run, lambda _: None)} == {"ended"}
        bench.started[-1].wait()


def test_a_running_server_is_not_clean(bench: Bench) -> None:
    bench.start()

    assert bench.before() == ["api server", "engine core", "listener"]


def test_an_engine_whose_server_was_killed_is_found_before_and_after(bench: Bench) -> None:
    child = bench.start()
    child.kill()
    child.wait()

    assert bench.before() == ["orphan"]
    assert bench.found() == ["no server", "orphan"]


def test_a_second_server_on_the_port_is_found(bench: Bench) -> None:
    bench.start()
    bench.start(record=False)

    assert set(bench.found(ask=False)) == {"api server", "engine core", "listener"}


def test_a_foreign_listener_on_the_port_is_found(bench: Bench) -> None:
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        foreign.bind(("127.0.0.1", bench.wanted.launch.port))
        foreign.listen()
        assert bench.before() == ["listener"]


def test_a_library_replaced_under_a_running_server_is_found(bench: Bench) -> None:
    bench.start()
    other = bench.library.with_name("new")
    other.write_bytes(bench.library.read_bytes())
    os.replace(other, bench.library)

    assert bench.found() == ["mapped"]
    assert "another file lies there now" in bench.texts()


def test_a_library_that_was_removed_under_a_running_server_is_found(bench: Bench) -> None:
    bench.start()
    bench.library.unlink()

    assert bench.found() == ["mapped", "mapped"]
    assert "has been deleted" in bench.texts()
    assert "is missing" in bench.texts()


def test_a_library_of_other_bytes_is_found_though_the_server_runs_it(bench: Bench) -> None:
    library(bench.library, 2)
    bench.start()

    assert bench.found() == ["mapped"]
    assert "is changed" in bench.texts()


def test_a_planned_library_that_nobody_loads_is_found(bench: Bench) -> None:
    bench.wanted = dataclasses.replace(
        bench.wanted,
        libraries={**(bench.wanted.libraries or {}), "vllm/_rocm_C.abi3.so": "0" * 64},
    )
    bench.start()

    assert bench.found() == ["mapped"]
    assert "vllm/_rocm_C.abi3.so is missing" in bench.texts()


def test_a_server_of_an_older_deploy_is_found(bench: Bench) -> None:
    bench.start()
    seen = bench.seen()

    other_plan = faults.after_start(seen, bench.wanted.launch, plan="b" * 64, receipt="r1")
    again = faults.after_start(seen, bench.wanted.launch, plan=PLAN, receipt="r2")

    assert [fault.what for fault in other_plan] == ["old process"]
    assert [fault.what for fault in again] == ["old process"]


def test_a_server_without_a_record_is_no_service_of_ours(bench: Bench) -> None:
    bench.start(record=False)

    assert bench.found() == ["record"]


def test_its_age_only_warns_and_only_where_there_is_no_record(bench: Bench) -> None:
    bench.wanted = dataclasses.replace(bench.wanted, deployed=time.time() + 60)
    bench.start(record=False)
    assert bench.found() == ["(age)", "record"]

    child = bench.started[0]
    launch.record(bench.run(child.pid, launch.new_run(bench.wanted.launch.dir, "x")))

    assert bench.found() == []


def test_a_record_of_another_process_with_the_same_pid_is_not_believed(bench: Bench) -> None:
    child = bench.start(record=False)
    run = bench.run(child.pid, launch.new_run(bench.wanted.launch.dir, "x"))
    launch.record(dataclasses.replace(run, start=run.start - 1))

    assert bench.found() == ["record"]
    assert "gone" in bench.texts()


def test_a_record_of_another_boot_is_not_believed(bench: Bench) -> None:
    child = bench.start(record=False)
    run = bench.run(child.pid, launch.new_run(bench.wanted.launch.dir, "x"))
    launch.record(dataclasses.replace(run, boot="other"))

    assert bench.found() == ["record"]
    assert serve.end(dataclasses.replace(run, boot="other"), lambda _: None) == []
    assert child.poll() is None


def test_other_arguments_are_found_and_named(bench: Bench) -> None:
    bench.start(argv=(*bench.wanted.launch.argv, "--max-num-seqs", "7"))

    assert bench.found() == ["arguments"]
    assert "has --max-num-seqs 7" in bench.texts()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("http_proxy", "http://user:secret@127.0.0.1:3128", "environment"),
        ("HTTPS_PROXY", "http://127.0.0.1:3128", "environment"),
        ("VLLM_ROCM_USE_AITER", "1", "environment"),
        ("VLLM_DCU_KERNEL_DIAG", "0", "environment"),
        ("TRITON_CACHE_DIR", "/somewhere", "environment"),
        ("PYTHONPATH", "/usr/local/", "(environment)"),
    ],
)
def test_a_variable_that_is_not_as_locked_is_found(
    bench: Bench, name: str, value: str, kind: str
) -> None:
    bench.start(env={name: value})

    assert bench.found() == [kind]
    assert name in bench.texts()
    assert "secret" not in bench.texts()


@pytest.mark.parametrize("host", ["127.0.0.2", "0.0.0.0", "::1"])
def test_a_server_is_asked_where_it_listens(bench: Bench, host: str) -> None:
    locked = bench.wanted.launch
    argv = (*locked.argv, "--host", host)
    bench.wanted = dataclasses.replace(bench.wanted, launch=dataclasses.replace(locked, argv=argv))
    bench.start()

    answered = health.wait(locked.port, "m", 10, lambda: True)
    sent = health.generate(locked.port, "m", 5000)

    assert bench.found() == []
    assert [(one.probe, one.error) for one in answered][-1] == ("generation", "")
    assert (sent["error"], sent["prompt_tokens"]) == ("", 5000)
    assert counters.fetch(locked.port) == {"vllm:num_preemptions": 2.0}


def test_a_server_that_counts_other_tokens_has_not_answered_what_was_asked(bench: Bench) -> None:
    bench.start(env={"STANDIN_COUNTS": "3"})

    sent = health.generate(bench.wanted.launch.port, "m", 5000)

    assert sent["error"] == "it counted 3 tokens of the prompt, sent were 5000"


STEERING = {
    "PYTHONOPTIMIZE": "2",
    "PYTHONEXECUTABLE": sys.executable,
    "PYTHONPLATLIBDIR": "lib",
    "LD_PRELOAD": "/lib/x86_64-linux-gnu/libm.so.6",
    "LD_LIBRARY_PATH": "/tmp/evil",
    "HSA_OVERRIDE_GFX_VERSION": "9.0.6",
    "HIP_VISIBLE_DEVICES": "3",
    "ROCBLAS_TENSILE_LIBPATH": "/tmp/x",
    "PYTORCH_TUNABLEOP_ENABLED": "1",
}


@pytest.mark.parametrize("name", STEERING)
def test_what_steers_code_may_come_from_the_services_own_environment_alone(
    bench: Bench, name: str
) -> None:
    bench.start(env={name: STEERING[name]})
    bench.wanted = dataclasses.replace(bench.wanted, first=os.getpid())

    assert bench.found() == ["environment"]
    assert f"{name}={STEERING[name]} comes not from launch.env" in bench.texts()
    given = base_python({name: STEERING[name]})  # env_script, or the container, sets it
    bench.wanted = dataclasses.replace(bench.wanted, python=lambda: given)
    assert bench.found() == []
    unknown = dataclasses.replace(given, environment=None)
    bench.wanted = dataclasses.replace(bench.wanted, python=lambda: unknown)
    assert bench.found() == ["(environment)"]
    other = base_python({})
    bench.wanted = dataclasses.replace(bench.wanted, python=lambda: other)
    assert bench.found() == ["environment"]
    bench.wanted = dataclasses.replace(bench.wanted, first=2**31 - 1)  # that nobody may look at
    assert bench.found() == ["(environment)"]


def test_a_script_sourced_twice_adds_nothing_new(bench: Bench) -> None:
    bench.start(env={"LD_LIBRARY_PATH": "/opt/dtk/lib:/opt/dtk/lib:", "LD_PRELOAD": "",
                     "PYTHONHASHSEED": "7", "PYTHONDONTWRITEBYTECODE": "1"})  # fmt: skip
    given = base_python({"LD_LIBRARY_PATH": "/opt/dtk/lib:"})
    bench.wanted = dataclasses.replace(bench.wanted, python=lambda: given)

    assert bench.found() == []


def test_a_locked_variable_that_is_not_set_is_found(bench: Bench) -> None:
    locked = dataclasses.replace(bench.wanted.launch, env={"VLLM_A": "1"})
    bench.start()
    bench.wanted = dataclasses.replace(bench.wanted, launch=locked)

    assert bench.found() == ["environment", "environment"]
    assert "VLLM_A is locked and not set" in bench.texts()


def test_a_path_that_leads_to_another_package_of_that_name_is_found(bench: Bench) -> None:
    (bench.folder / "checkout" / "vllm").mkdir(parents=True)
    bench.start(env={"PYTHONPATH": "checkout"})

    assert bench.found() == ["environment"]


@pytest.mark.parametrize("reaped", [True, False])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_server_that_ends_while_it_is_looked_at_is_no_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, moment: str, *, reaped: bool
) -> None:
    server = bench.start()
    look = os.readlink

    def end_first(path: Any, **options: Any) -> str:
        found = look(path, **options)
        if path != f"/proc/{server.pid}/cwd":
            return found
        os.killpg(server.pid, signal.SIGKILL)
        ended = os.WEXITED | (0 if reaped else os.WNOWAIT)
        os.waitid(os.P_PID, server.pid, ended)
        return found if moment == "after" else look(path, **options)

    monkeypatch.setattr(os, "readlink", end_first)
    seen = bench.seen(ask=False)

    assert seen["server"] is None
    assert seen["run"]["state"] == "gone"


def test_a_live_server_that_may_not_be_looked_at_is_still_a_fault(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = bench.start()
    look = os.readlink

    def refuse(path: Any, **options: Any) -> str:
        if path == f"/proc/{server.pid}/cwd":
            raise PermissionError(13, "Permission denied", path)
        return look(path, **options)

    monkeypatch.setattr(os, "readlink", refuse)

    with pytest.raises(proc.CannotTell, match="working folder") as caught:
        bench.seen(ask=False)
    assert ("or as root" in caught.value.fix) == bool(os.geteuid())


def test_another_working_folder_is_found(bench: Bench, tmp_path: Path) -> None:
    bench.start(cwd=str(tmp_path))

    assert bench.found() == ["folder"]


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Another venv of the very interpreter that runs the tests: one file, two sites."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv"


def test_a_venv_of_the_same_interpreter_is_another_interpreter(bench: Bench, venv: Path) -> None:
    bench.start(python=(str(venv / "bin" / "python3"),))

    assert bench.found() == ["interpreter"]
    assert f"of {venv}, base.python is " in bench.texts()


def test_another_file_is_another_interpreter(bench: Bench, tmp_path: Path) -> None:
    copy = tmp_path / "python3"
    shutil.copy(os.path.realpath(sys.executable), copy)
    home = {"PYTHONHOME": sys.base_prefix, "LD_LIBRARY_PATH": f"{sys.base_prefix}/lib"}
    # As the copy is: they differ in their file alone.
    plain = dataclasses.replace(base_python(home), venv="")
    bench.wanted = dataclasses.replace(bench.wanted, python=lambda: plain)
    bench.start(python=(str(copy),), env=home)

    assert bench.found() == ["environment", "interpreter"]
    assert f"it runs {copy}, " in bench.texts()


@pytest.mark.parametrize("name", ["bin/python", "bin/python3", "linked/bin/python", "bare"])
def test_every_name_of_a_venvs_interpreter_is_that_interpreter(
    bench: Bench, venv: Path, name: str
) -> None:
    (venv / "linked").symlink_to(venv)
    program, path = ("python3", f"/nowhere:{venv}/bin") if name == "bare" else (venv / name, "")
    env = {"PATH": f"{path}:{os.environ['PATH']}"}
    argv = (str(venv / "bin" / "python"), "-c", "input()")
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as base:
        found = interpreter.of_process(base.pid, argv, {}, "/")
        base.communicate(b"\n")
    bench.wanted = dataclasses.replace(bench.wanted, python=lambda: found)
    bench.start(python=("/usr/bin/env", str(program)), env=env)

    assert found is not None
    assert found.venv == str(venv)
    assert bench.found() == []


def test_an_interpreter_that_cannot_be_told_only_warns(bench: Bench) -> None:
    bench.wanted = dataclasses.replace(bench.wanted, python=lambda: None)
    bench.start()

    assert bench.found() == ["(interpreter)"]


def test_options_of_the_interpreter_that_are_not_locked_are_found(
    bench: Bench, tmp_path: Path
) -> None:
    bench.start(python=(sys.executable, "-u", "-X", f"pycache_prefix={tmp_path}", "-sO"))

    assert bench.found() == ["interpreter"]
    assert f"has -X pycache_prefix={tmp_path} -sO: it may run other bytecode" in bench.texts()


def test_harmless_and_locked_options_of_the_interpreter_are_no_fault(bench: Bench) -> None:
    argv = ("/usr/bin/python3", "-O", *bench.wanted.launch.argv)
    locked = dataclasses.replace(bench.wanted.launch, argv=argv)
    bench.start(python=(sys.executable, "-u", "-sB", "-O"))
    bench.wanted = dataclasses.replace(bench.wanted, launch=locked)

    assert bench.found() == []


def test_health_alone_is_not_readiness(bench: Bench) -> None:
    bench.start(env={"STANDIN_BROKEN": "1"})

    assert bench.found() == ["answer"]
    assert "generation: no answer: timed out" in bench.texts()


def test_a_proxy_of_the_environment_does_not_stand_between(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    bench.start()

    assert bench.found() == []


def test_another_model_is_found(bench: Bench, tmp_path: Path) -> None:
    argv = ("vllm", "serve", str(tmp_path), *bench.wanted.launch.argv[3:])
    bench.start(argv=argv)

    assert bench.found() == ["arguments", "model"]


def test_another_served_name_is_found(bench: Bench) -> None:
    bench.start()
    locked = dataclasses.replace(bench.wanted.launch, served_name="other")
    bench.wanted = dataclasses.replace(bench.wanted, launch=locked)

    assert bench.found() == ["answer"]
    assert "models: it serves m, not other" in bench.texts()


@pytest.mark.parametrize(
    ("size", "sha256", "state"),
    [(2, "", "ok"), (3, "", "changed"), (None, "0" * 64, "changed"), (2, "0" * 64, "changed")],
)
def test_the_models_files_are_held_against_the_lock(
    bench: Bench, size: int | None, sha256: str, state: str
) -> None:
    locked = dataclasses.replace(bench.wanted.launch, files={"config.json": (size, sha256)})

    assert [row["state"] for row in service._model(locked, full=False)] == [state]


def test_a_large_model_file_is_hashed_only_when_asked(bench: Bench) -> None:
    shard = Path(bench.wanted.launch.model) / "model.safetensors"
    with shard.open("wb") as file:
        file.truncate((16 << 20) + 1)
    wrong = {"model.safetensors": (shard.stat().st_size, "0" * 64)}
    locked = dataclasses.replace(bench.wanted.launch, files=wrong)

    assert [row["state"] for row in service._model(locked, full=False)] == ["size only"]
    assert [row["state"] for row in service._model(locked, full=True)] == ["changed"]


def test_stopping_ends_the_server_and_its_engine_and_nothing_else(bench: Bench) -> None:
    child = bench.start()
    run = launch.read_run(bench.wanted.launch.dir)
    assert run is not None
    bystander = subprocess.Popen(["bash", "-c", "exec -a VLLM::EngineCore sleep 60"])

    ended = serve.end(run, lambda _: None)
    child.wait()

    assert [(row["role"], row["how"]) for row in ended] == [
        ("api server", "ended"),
        ("engine core", "ended"),
    ]
    assert bystander.poll() is None
    bystander.kill()
    bystander.wait()


def test_stopping_ends_an_engine_that_lost_its_server(bench: Bench) -> None:
    child = bench.start()
    run = launch.read_run(bench.wanted.launch.dir)
    assert run is not None
    child.kill()
    child.wait()

    ended = serve.end(run, lambda _: None)

    assert [row["role"] for row in ended] == ["engine core"]
    assert bench.before() == []


def test_a_stranger_who_was_given_the_recorded_pid_is_left_alone(bench: Bench) -> None:
    child = bench.start(record=False)
    run = bench.run(child.pid, launch.new_run(bench.wanted.launch.dir, "x"))
    earlier = dataclasses.replace(run, start=run.start - 1)

    assert {p.role.value for p in run.members()} == {"api server", "engine core"}
    assert earlier.members() == ()
    assert serve.end(earlier, lambda _: None, grace=0.5) == []
    assert bench.before() == ["api server", "engine core", "listener"]


def test_what_does_not_end_by_itself_is_ended(bench: Bench) -> None:
    child = bench.start()
    run = launch.read_run(bench.wanted.launch.dir)
    assert run is not None
    os.kill(child.pid, signal.SIGSTOP)  # a process that hangs: it takes no SIGTERM

    ended = serve.end(run, lambda _: None, grace=0.5)
    child.wait()

    assert {row["how"] for row in ended} == {"killed"}
    assert bench.before() == []


def test_a_record_that_cannot_be_read_is_an_error_and_no_record_is_none(bench: Bench) -> None:
    folder = launch.new_run(bench.wanted.launch.dir, "x")
    assert launch.read_run(bench.wanted.launch.dir) is None
    launch.record(bench.run(os.getpid(), folder))
    assert launch.read_run(bench.wanted.launch.dir) is not None

    Path(folder, "run.json").write_text('{"schema":"run/1"')

    with pytest.raises(launch.NoRecord, match="cannot be read"):
        launch.read_run(bench.wanted.launch.dir)


@pytest.mark.parametrize(
    ("argv", "meant"),
    [
        (("/usr/bin/python3", "/usr/local/bin/vllm", "serve", "m"), ("vllm", "serve", "m")),
        (("python3", "-u", "-X", "dev", "vllm", "serve"), ("vllm", "serve")),
        (("vllm", "serve", "m"), ("vllm", "serve", "m")),
        (("python3", "-m", "vllm.x", "--port", "1"), ("-m", "vllm.x", "--port", "1")),
        ((), ()),
    ],
)
def test_a_command_line_is_compared_as_it_was_meant(
    argv: tuple[str, ...], meant: tuple[str, ...]
) -> None:
    assert launch.words(argv) == meant
