"""Start after start of the real server, each in another harmless world: no gate may cry wolf.

Each start goes the whole way by the operator's own tasks: verify, start, prove, stop, look again.
DCU_TEST_STARTS says how many starts there are (3 unless it is set; docs/serve.md tells of 20).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from deploy.agent import launch
from tests.live.world import World, build

STARTS = int(os.environ.get("DCU_TEST_STARTS") or 3)
STANDIN = Path(__file__).parents[1] / "service" / "standin" / "vllm"
GATES = {1: "passed", 2: "not applicable", 3: "not applicable", 4: "not applicable"}

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(300 + 180 * STARTS)]


@dataclass(frozen=True, kw_only=True)
class Weather:
    """What surrounds one start and must not matter. A variable that is None is not set."""

    what: str
    env: Mapping[str, str | None] = field(default_factory=dict)
    umask: int = 0o022
    cwd: str = "."  # below the world
    beside: Callable[[World], AbstractContextManager[object]] = lambda _: nullcontext()
    warns: frozenset[str] = frozenset()  # kinds of warnings that it rightly raises


@contextmanager
def running(*argvs: tuple[str, ...]) -> Iterator[None]:
    """Keep programs running that are none of the service's."""
    with ExitStack() as stack:
        for argv in argvs:
            child = stack.enter_context(
                subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
            stack.callback(child.kill)
        time.sleep(0.5)
        yield


def strays(world: World) -> AbstractContextManager[None]:
    """Programs that a search by name would take for the server."""
    log = world.folder / "vllm serve.log"
    log.touch()
    sleep = "import time; time.sleep(900)  # vllm serve VLLM::EngineCore"
    return running(
        (sys.executable, "-c", sleep),
        ("tail", "-f", str(log)),
        ("sh", "-c", "sleep 900; echo vllm serve; echo VLLM::EngineCore"),
        ("bash", "-c", "exec -a 'pip install vllm-0.18.1.whl' sleep 900"),
    )


def web_server(world: World) -> AbstractContextManager[None]:
    """A server on another port, which is no model's."""
    argv = (sys.executable, "-m", "http.server", str(world.port - 1), "--bind", "127.0.0.1")
    return running(argv)


def another_container(world: World) -> AbstractContextManager[None]:
    """Somebody else's vLLM, on another port and in namespaces of its own."""
    inner = (sys.executable, str(STANDIN), "serve", "m", "--port", str(world.port - 2))
    return running(("unshare", "--pid", "--mount", "--fork", "--kill-child", *inner))


@contextmanager
def open_files(world: World) -> Iterator[None]:
    """Readers of what the service maps and serves: a checksum program, a pager, a backup."""
    library, model = world.site / "vllm" / "_C.abi3.so", world.folder / "submission.tar"
    model.touch()
    with library.open("rb"), model.open("rb"), running(("tail", "-f", str(library))):
        yield


@contextmanager
def many_runs(world: World) -> Iterator[None]:
    """The folders of two hundred earlier starts, one of them torn."""
    for number in range(200):
        folder = world.folder / "runs" / f"20200101T000000Z-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.json").write_text("{" if number == 7 else "{}")
    yield


@contextmanager
def looked_at(world: World) -> Iterator[None]:
    """Somebody who asks for the status all the time."""
    script = 'cd "$1"; while :; do "$2" -m invoke serve.status -n live -t local:/ --no-ask; done'
    with running(("setsid", "sh", "-c", script, "sh", str(world.top), sys.executable)):
        yield


PROXIES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy")
CONTAINER = frozenset({"other container"})
WEATHERS = (
    Weather(what="nothing"),
    Weather(what="umask 077, another TZ", umask=0o077, env={"TZ": "Asia/Shanghai"}),
    Weather(what="no HOME, LC_ALL=C, stray programs named like it", beside=strays,
            env={"HOME": None, "LANG": None, "LC_ALL": "C"}),
    Weather(what="a vLLM of another container", beside=another_container, warns=CONTAINER),
    Weather(what="a web server on another port", beside=web_server),
    Weather(what="proxies where it is started", env=dict.fromkeys(PROXIES, "http://127.0.0.1:9")),
    Weather(what="umask 000, a TZ 14 h ahead", umask=0, env={"TZ": "Pacific/Kiritimati"}),
    Weather(what="a HOME that is not there", env={"HOME": "/nonexistent"}),
    Weather(what="started from a folder 测试 with a blank", cwd="某个 folder"),
    Weather(what="a locale that is not installed", env={"LC_ALL": "zh_CN.GB18030"}),
    Weather(what="200 folders of earlier starts, one torn", beside=many_runs),
    Weather(what="its library and folder held open", beside=open_files),
    Weather(what="Python's variables", env={"PYTHONHASHSEED": "7", "PYTHONUNBUFFERED": "1",
                                            "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUTF8": "1"}),
    Weather(what="TZ half an hour off, LANG=C.UTF-8", env={"TZ": "Asia/Kolkata",
                                                           "LANG": "C.UTF-8"}),
    Weather(what="a status asked for all the time", beside=looked_at),
    Weather(what="a poor terminal", env={"TERM": "dumb", "COLUMNS": "20", "LINES": "5"}),
    Weather(what="an empty HOME with a blank", env={"HOME": "{top}/某个 folder"}),
    Weather(what="TMPDIR elsewhere", env={"TMPDIR": "{top}/某个 folder"}),
    Weather(what="umask 027, strays and a vLLM of another container", umask=0o027,
            beside=lambda world: _both(strays(world), another_container(world)), warns=CONTAINER),
    Weather(what="thread counts and a debugger's variables", env={
        "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "MALLOC_ARENA_MAX": "2"}),
)  # fmt: skip


@contextmanager
def _both(*some: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for one in some:
            stack.enter_context(one)
        yield


@dataclass(kw_only=True)
class Told:
    """What one start was judged, for the table."""

    what: str
    gates: dict[int, str] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)  # faults and unexpected warnings
    exits: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        wanted = {**GATES, 5: "passed", 6: "passed"}
        return self.gates == wanted and not self.said and not any(self.exits)

    def row(self, number: int) -> str:
        gates = " ".join(f"{number}:{verdict}" for number, verdict in sorted(self.gates.items()))
        said = "; ".join(self.said) or "silent"
        return f"{number:3d}  {self.seconds:5.0f} s  {self.what:<55} {gates}  {said}"


class Caller:
    """An operator in some weather."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world, self.weather = world, weather
        self.told = Told(what=weather.what)
        self.warned: set[str] = set()
        changed = {name: value and value.format(top=world.top) for name, value in
                   weather.env.items()}  # fmt: skip
        self.env = {k: v for k, v in {**os.environ, **changed}.items() if v is not None}

    def ask(self, *words: str) -> dict[str, Any]:
        folder = self.world.top / self.weather.cwd
        code, said = self.world.inv(*words, cwd=folder, env=self.env, umask=self.weather.umask)
        self.told.exits.append(code)
        if "targets" not in said:
            self.told.said.append(said["error"]["what"])
            return {}
        [target] = said["targets"]
        if target["error"]:
            self.told.said += [target["error"]["what"], target["error"]["why"]]
        for gate in target["gates"]:
            self.told.said += gate["faults"]
        service = (target["evidence"] or {}).get("service") or {}
        faults = service.get("faults", ())
        self.told.said += [f["text"] for f in faults if f["what"] not in self.weather.warns]
        self.warned |= {fault["what"] for fault in faults}
        return dict(target)

    def judge(self, *words: str, gates: tuple[int, ...]) -> None:
        for gate in self.ask(*words).get("gates", ()):
            if gate["gate"] in gates:
                self.told.gates[gate["gate"]] = gate["verdict"]


def whole_way(world: World, weather: Weather, number: int) -> Told:
    caller = Caller(world, weather)
    prompt = 3000 + 977 * number  # one chunk to six, and a tail of another length each time
    began = time.monotonic()
    with weather.beside(world):
        caller.judge("verify", gates=(1, 2, 3, 4))
        caller.judge("serve.start", gates=(5,))
        caller.ask("serve.status", "--expect", "running")
        caller.judge("serve.prove", "--prompt", str(prompt), "--salt", str(number), gates=(6,))
        caller.ask("serve.stop")
        caller.ask("serve.status", "--expect", "clean")
    caller.told.said += [f"no warning: {what}" for what in weather.warns - caller.warned]
    caller.told.seconds = time.monotonic() - began
    return caller.told


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    # Letters beyond ASCII in every path, and a blank in those of checkout, site and cache (the
    # launch folder is said in a Dockerfile, which has no quoting for one).
    top = tmp_path_factory.mktemp("starts")
    made = build(top / "一 world", top / "提交")
    (made.top / "某个 folder").mkdir()
    yield made
    if launch.read_run(str(made.folder)):
        made.inv("serve.stop", "--kill", "--grace", "30")


def test_no_start_in_harmless_weather_raises_an_alarm(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.deploy().error is None
    told: list[Told] = []
    for number in range(STARTS):
        told.append(whole_way(world, WEATHERS[number % len(WEATHERS)], number))
        with capsys.disabled():
            print(told[-1].row(len(told)), flush=True)

    assert [one for one in told if not one.clean] == []
