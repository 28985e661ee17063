"""A terminal that dropped is not a dead service: `serve.status --follow` finds it again.

The terminals are real: each is a session of its own that is hung up while its task waits. The
server is the stand-in, which does not listen before the test lets it.
"""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from deploy.agent import launch
from deploy.agent.words import Exit
from tests.service.ground import Checkout, behind_sshd, local_place
from tests.service.test_service_verbs import own_processes

pytestmark = pytest.mark.slow

ENGINE, READY = "engine is up", "Application startup complete"


def drop_while(argv: list[str], shown: str, env: Mapping[str, str]) -> int:
    """Run a task in a terminal, hang up once it has `shown` this; return how it ended."""
    pid, terminal = pty.fork()
    if not pid:
        os.execvpe(argv[0], argv, {**os.environ, **env})
    said, limit = b"", time.monotonic() + 60
    while shown.encode() not in said:
        assert time.monotonic() < limit, said.decode()
        if select.select([terminal], [], [], 1)[0]:
            said += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def follow(argv: list[str], env: Mapping[str, str], then: Callable[[], object]) -> tuple[int, str]:
    """Follow, do `then` when the first lines were shown; return exit code and all that was said."""
    with subprocess.Popen(
        argv, env={**os.environ, **env}, text=True, stdout=subprocess.DEVNULL, stdin=-3,
        stderr=subprocess.PIPE,
    ) as following:  # fmt: skip
        assert following.stderr is not None
        said = ""
        for line in following.stderr:
            if ENGINE in line and ENGINE not in said:
                then()
            said += line
    return following.returncode, said


def tell_the_story(
    checkout: Checkout, to: str, env: Mapping[str, str], release: Callable[[], object]
) -> None:
    checkout.done("deploy", "-t", to, env=env)
    start = checkout.argv("serve.start", "-t", to)
    status = checkout.argv("serve.status", "--follow", "-t", to)

    started = drop_while(start, "waiting up to", env)
    looked = drop_while(status, ENGINE, env)
    code, said = follow(status, env, then=release)
    again, seen = checkout.inv("serve.status", "--expect", "running", "-t", to, env=env)

    assert {started, looked} == {-signal.SIGHUP}
    assert code == Exit.OK, said
    # It was shown what the log gained meanwhile, each line once.
    assert said.count(ENGINE) == said.count(READY) == 1
    assert said.index(ENGINE) < said.index(READY)
    assert (again, seen["evidence"]["service"]["faults"]) == (Exit.OK, [])


def test_a_dropped_terminal_s_service_is_found_and_followed_again(tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    with own_processes() as inside:
        places = local_place(tmp_path / "place")
        variables = {"STANDIN_UNTIL": str(waits)}
        checkout = Checkout(tmp_path / "checkout", variables, inside, **places)

        tell_the_story(checkout, "local:/", {}, waits.touch)


def test_a_start_by_hand_survives_its_terminal(tmp_path: Path) -> None:
    waits = tmp_path / "waits"
    with own_processes() as inside:
        places = local_place(tmp_path / "place")
        checkout = Checkout(tmp_path / "checkout", {"STANDIN_UNTIL": str(waits)}, inside, **places)
        checkout.done("deploy", "-t", "local:/")
        [bundle] = checkout.layout.out.glob("mine-*.pyz")
        uploaded = shutil.copy(bundle, places["folder"])
        agent = (str(places["python"]), "-I", "-S", uploaded)
        subprocess.run([*inside, *agent, "scripts", "--root", "/"], check=True, timeout=60)

        script = [*inside, "sh", f"{places['folder']}/start_vllm.sh"]
        started = drop_while(script, "start: pid", {})
        status = checkout.argv("serve.status", "--follow", "-t", "local:/")
        code, said = follow(status, {}, then=waits.touch)

    assert started == -signal.SIGHUP
    assert code == Exit.OK, said
    assert said.count(READY) == 1


def test_a_follower_is_told_that_the_service_has_ended(tmp_path: Path) -> None:
    with own_processes() as inside:
        places = local_place(tmp_path / "place")
        variables = {"STANDIN_UNTIL": str(tmp_path / "never")}
        checkout = Checkout(tmp_path / "checkout", variables, inside, **places)
        checkout.done("deploy", "-t", "local:/")
        drop_while(checkout.argv("serve.start", "-t", "local:/"), "waiting up to", {})
        run = launch.read_run(str(places["folder"]))
        assert run is not None
        end = ["sh", "-c", f"kill -9 {run.pid}; pkill -9 -s {run.pid}"]

        argv = checkout.argv("serve.status", "--expect", "running", "--follow", "-t", "local:/")
        code, said = follow(argv, {}, then=lambda: subprocess.run([*inside, *end], check=True))

    assert code == Exit.DIFFERS
    assert READY not in said


@pytest.mark.docker
@pytest.mark.sshd
def test_a_dropped_terminal_s_service_is_found_over_ssh_too(tmp_path: Path, image: str) -> None:
    checkout = Checkout(tmp_path / "checkout", {"STANDIN_UNTIL": "/waits"})
    with behind_sshd(image, tmp_path / "home") as (box, env):
        tell_the_story(checkout, "ssh:box", env, lambda: box.sh("touch /waits"))
