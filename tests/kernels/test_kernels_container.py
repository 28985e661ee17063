"""Commands of a build in a real container that sees the folders of this machine."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.errors import BadValues, Unfit, Unreachable
from deploy.kernels import container
from deploy.kernels.container import Container, started
from deploy.kernels.runner import Local
from tests.kernels.mini_room import Checkout, Tools, request_for

IMAGE = "dcu-test/base:1"
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "SAID": "a b"}

pytestmark = [pytest.mark.docker]


def running() -> list[str]:
    argv = ("docker", "ps", "-q", "--filter", f"label={container.TEMPORARY}")
    argv += ("--filter", f"ancestor={IMAGE}")
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[tuple[Container, Path]]:
    with started(IMAGE, [tmp_path]) as found:
        yield found, tmp_path


def test_a_command_runs_with_its_own_environment_and_leaves_our_files(
    place: tuple[Container, Path],
) -> None:
    runner, folder = place
    log = folder / "log"
    argv = ("/bin/sh", "-c", 'echo "$SAID $HOME" "$1"; pwd; echo err >&2; touch made; exit 3', "sh",
            "two words")  # fmt: skip

    code = runner.run(argv, env=ENV, cwd=folder, log=log, seconds=30)

    assert code == 3
    assert sorted(log.read_text().splitlines()) == sorted(
        ["a b /tmp two words", str(folder), "err"]
    )
    assert (folder / "made").stat().st_uid == os.geteuid()
    assert runner.where == f"container:{IMAGE}"


def test_it_is_another_file_system_and_has_no_network(place: tuple[Container, Path]) -> None:
    runner, folder = place

    said = runner.ask(("/bin/sh", "-c", "ls /sys/class/net; test -e /work || echo apart"),
                      env=ENV, cwd=folder)  # fmt: skip

    assert said.split() == ["lo", "apart"]


def test_a_question_that_fails_says_what_it_printed(place: tuple[Container, Path]) -> None:
    runner, folder = place

    with pytest.raises(Unfit) as caught:
        runner.ask(("/bin/sh", "-c", "echo no such thing >&2; exit 1"), env=ENV, cwd=folder)

    assert caught.value.why == "no such thing"


def test_a_command_that_hangs_is_ended(place: tuple[Container, Path]) -> None:
    runner, folder = place

    with pytest.raises(BadValues, match="did not end within 1 s"):
        runner.run(("/bin/sleep", "60"), env=ENV, cwd=folder, log=folder / "log", seconds=1)


def test_a_container_that_is_removed_meanwhile_is_told(tmp_path: Path) -> None:
    with started(IMAGE, [tmp_path]) as runner:
        name = runner._container.id

        def remove() -> None:
            time.sleep(1)
            subprocess.run(("docker", "kill", name), capture_output=True, check=True)

        thread = threading.Thread(target=remove)
        thread.start()
        try:
            code = runner.run(("/bin/sleep", "30"), env=ENV, cwd=tmp_path, log=tmp_path / "log",
                              seconds=60)  # fmt: skip
        except (Unreachable, BadValues):
            code = -1
        thread.join()
    assert code != 0


def test_a_folder_that_was_made_for_it_and_stayed_empty_goes_with_it(tmp_path: Path) -> None:
    unused, used = tmp_path / "unused" / "build", tmp_path / "used" / "build"

    with started(IMAGE, [unused, used]) as runner:
        runner.ask(("/bin/touch", f"{used}/made"), env=ENV, cwd=used)
        assert unused.is_dir()

    assert sorted(tmp_path.rglob("*")) == [used.parent, used, used / "made"]


def test_where_no_container_starts_no_folder_is_left(tmp_path: Path) -> None:
    with (
        pytest.raises(Unreachable, match="there is no image"),
        started("dcu-test/none:1", [tmp_path / "new" / "build"]),
    ):
        pass

    assert list(tmp_path.iterdir()) == []


def test_the_container_is_gone_when_the_build_is_over_or_broken_off(tmp_path: Path) -> None:
    before = set(running())

    def broken_off() -> None:
        with started(IMAGE, [tmp_path]):
            assert set(running()) != before
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()

    assert set(running()) == before


def test_a_place_is_local_or_an_image_that_is_there(
    tools: Tools, checkout: Checkout, tmp_path: Path
) -> None:
    request = request_for(tools, checkout, tmp_path)
    with container.runner("local", request) as found:
        assert isinstance(found, Local)
    for text in ("container:", "host:x", "docker"):
        with pytest.raises(BadValues, match="no place to build"), container.runner(text, request):
            pass
    with (
        pytest.raises(Unreachable, match="no image") as caught,
        container.runner("container:dcu-test/none:7", request),
    ):
        pass
    assert "pull it" in caught.value.fix


def test_without_an_engine_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")

    with pytest.raises(Unreachable, match="no Docker engine"), started(IMAGE, [tmp_path]):
        pass
