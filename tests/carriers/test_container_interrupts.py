"""^C at every moment of a task that uses an engine: nothing of it is left, and it can be run again.

The moments are not guessed: a moment is an event of the engine that belongs to the task, or a line
that the task says. One run counts them, then each is interrupted once.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.carriers.engine import NAME, TEMPORARY, Engine, open_engine
from tests.carriers import dock
from tests.carriers.test_image_story import story

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

TOP = Path(__file__).resolve().parents[2]
IMAGE = str(dock.own("interrupted"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine() as found:
        yield found


@pytest.fixture(scope="module")
def top(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkout of this product with a locked submission on a base that the engine holds."""
    folder = tmp_path_factory.mktemp("interrupts") / "top"
    with dock.base_image(engine) as base:
        story(folder, base)
        for name in ("deploy", "docker", "kernels"):
            shutil.copytree(TOP / name, folder / name, ignore=shutil.ignore_patterns("*.pyc"))
        shutil.copy(TOP / "tasks.py", folder)
        done = Task(folder, "lock").run()
        assert done.code == 0, done.lines
        yield folder


class Task:
    """One call of a task in a process of its own, which is interrupted at its n-th moment."""

    def __init__(self, top: Path, *words: str, of: str = "") -> None:
        self._top, self._words, self._of = top, (*words, "-n", "story"), of
        self.temporary = top.parent / "tmp"
        self.moments: list[str] = []
        self.lines: list[str] = []
        self.code = 0
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def run(self, at: int = 0) -> Task:
        shutil.rmtree(self.temporary, ignore_errors=True)
        self.temporary.mkdir()
        env = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        argv = (sys.executable, "-m", "invoke", *self._words)
        with open_engine() as engine, self._watching(engine, at):
            self._process = subprocess.Popen(
                argv,
                cwd=self._top,
                env=env,
                stdout=subprocess.DEVNULL,  # a report that is being printed is no moment
                stderr=subprocess.PIPE,
                text=True,
            )
            with self._process as process:
                assert process.stderr is not None
                for line in process.stderr:
                    self.lines.append(line)
                    self._moment(f"line: {line}", at)
                self.code = process.wait(60)
        return self

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @contextlib.contextmanager
    def _watching(self, engine: Engine, at: int) -> Iterator[None]:
        events = engine._client.events(decode=True)
        watch = threading.Thread(target=self._watch, args=(events, at))
        watch.start()
        try:
            yield
        finally:
            events.close()
            watch.join()

    def _watch(self, events: Any, at: int) -> None:
        for event in events:
            if self._is_ours(event["Actor"]) and event["Action"] != "archive-path":
                self._moment(f"{event['Type']} {event['Action'].partition(':')[0]}", at)

    def _is_ours(self, actor: dict[str, Any]) -> bool:
        said = actor.get("Attributes") or {}
        ours = self._process is not None and f", {self.pid}, " in said.get(TEMPORARY, "")
        return ours or actor["ID"] == self._of or said.get(NAME) == "story"  # an image's labels

    def _moment(self, name: str, at: int) -> None:
        with self._lock:
            self.moments.append(name)
            if len(self.moments) == at:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGINT)


def left_over(engine: Engine, task: Task, top: Path) -> list[str]:
    """Containers, temporary files and half-written files of a call that has ended."""
    found = engine._client.containers(all=True, filters={"label": TEMPORARY})
    mine = [one["Id"] for one in found if f", {task.pid}, " in one["Labels"][TEMPORARY]]
    hidden = [str(path) for path in (top / "out").rglob(".*") if ".git" not in path.parts]
    return [*mine, *hidden, *map(str, task.temporary.iterdir())]


def sweep(
    engine: Engine, top: Path, make: Callable[[], Task], between: Callable[[Task], None]
) -> list[int]:
    """Interrupt at each moment in turn; return the exit codes. `between` looks, and cleans up."""
    whole = make().run()
    assert whole.code == 0, whole.lines
    between(whole)
    codes = []
    for at in itertools.count(1):
        task = make().run(at)
        if len(task.moments) < at:
            break  # it was over before: every moment has been met
        # At its very end an interpreter is ended by the signal itself: 130, too, for a shell.
        assert task.code in (0, 130, -signal.SIGINT), (task.moments[-3:], "".join(task.lines[-25:]))
        assert left_over(engine, task, top) == [], task.moments
        between(task)
        codes.append(task.code)
    assert len(codes) >= len(whole.moments) // 2, (whole.moments, codes)
    return codes


def test_an_interrupted_build_image_leaves_no_image_and_no_file(engine: Engine, top: Path) -> None:
    record = top / "out/story/image/image.json"

    def between(task: Task) -> None:
        there = engine.inspect(IMAGE) is not None
        # What comes after the record is too late: the image is whole, and known.
        assert there is (task.code == 0 or record.exists()), (task.moments, task.lines)
        record.unlink(missing_ok=True)
        if there:
            engine.remove_image(IMAGE)

    codes = sweep(engine, top, lambda: Task(top, "build-image", "--fresh", "--tag", IMAGE), between)

    assert 130 in codes


def test_an_interrupted_build_gives_the_older_image_its_name_back(
    engine: Engine, top: Path
) -> None:
    name, _, tag = IMAGE.partition(":")
    before = (engine.inspect(dock.DEBIAN) or {})["Id"]

    record = top / "out/story/image/image.json"

    def between(task: Task) -> None:
        found = (engine.inspect(IMAGE) or {}).get("Id")
        assert (found == before) is not record.exists(), (task.moments, task.lines)
        record.unlink(missing_ok=True)
        if found != before:
            engine.remove_image(IMAGE)
        engine.tag(before, name, tag)

    engine.tag(before, name, tag)
    try:
        # Once the image is there, and the call not yet over.
        task = Task(top, "build-image", "--fresh", "--tag", IMAGE).run()
        assert task.code == 0
        between(task)
        loaded = next(n for n, moment in enumerate(task.moments, 1) if "image" in moment)
        for at in range(loaded, len(task.moments) + 1):
            again = Task(top, "build-image", "--fresh", "--tag", IMAGE).run(at)
            assert left_over(engine, again, top) == []
            between(again)
    finally:
        engine.remove_image(IMAGE)


def test_an_interrupted_verify_of_an_image_leaves_no_container(engine: Engine, top: Path) -> None:
    assert Task(top, "build-image", "--tag", IMAGE).run().code == 0
    try:
        codes = sweep(
            engine, top, lambda: Task(top, "verify", "-t", f"image:{IMAGE}"), lambda _: None
        )
    finally:
        engine.remove_image(IMAGE)

    assert 130 in codes


def test_an_interrupted_deploy_into_a_container_is_undone_or_finished(
    engine: Engine, top: Path
) -> None:
    base = (top / "manifests/story.yaml").read_text().partition("image: ")[2].split()[0]
    argv = ("docker", "run", "-d", "--network", "none", base, "sleep", "900")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    container = done.stdout.strip()

    def between(task: Task) -> None:
        ours = "grep -lz DCU_BUNDLE_CALL /proc/[0-9]*/environ 2>/dev/null; true"
        assert _sh(container, ours) == "", (task.moments, task.lines)
        find = f"find {dock.SITE} -name '.dcu-bundle-*' -o -name journal -o -name lock"
        assert _sh(container, find) == "", (task.moments, task.lines)
        # Whatever was reached, a later call can undo it.
        assert Task(top, "restore", "-t", f"container:{container}").run().code == 0

    try:
        codes = sweep(
            engine,
            top,
            lambda: Task(top, "deploy", "-t", f"container:{container}", of=container),
            between,
        )
    finally:
        subprocess.run(("docker", "rm", "-f", container), capture_output=True, check=True)

    assert 130 in codes


def _sh(container: str, script: str) -> str:
    argv = ("docker", "exec", container, "sh", "-c", script)
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
