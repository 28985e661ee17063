"""A service that the kernel really ends for want of memory, beside one that somebody else ended.

The kernel's log is the whole machine's; only the cgroup and the time tell whose a line is.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.agent import oom
from deploy.agent.words import Exit
from tests.service.ground import Checkout, Machine, local_place, machine
from tests.service.test_service_verbs import own_processes

pytestmark = pytest.mark.slow

LIMIT = 192  # MiB: the tasks run in the same cgroup
GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture(autouse=True)
def _kernel_log() -> None:
    if error := oom.look(0.0)["error"]:
        pytest.skip(f"no kill can be seen here: {error}")


@contextmanager
def memory_group(name: str) -> Iterator[Path]:
    """A cgroup with little memory, of either version."""
    old = (GROUPS / "memory").is_dir()
    group = (GROUPS / "memory" if old else GROUPS) / name
    try:
        group.mkdir()
        limit = "memory.limit_in_bytes" if old else "memory.max"
        (group / limit).write_text(str(LIMIT << 20))
    except OSError as err:
        pytest.skip(f"no cgroup with a limit of memory can be made here: {err.strerror}")
    try:
        yield group
    finally:
        soon(lambda: not (group / "cgroup.procs").read_text())
        group.rmdir()


def soon(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 60
    while not true():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.1)


def end_of(checkout: Checkout, to: str) -> str:
    """What a look says of a server that runs no more."""
    code, seen = checkout.inv("serve.status", "--expect", "running", "--no-ask", "-t", to)
    assert code == Exit.DIFFERS
    faults = seen["evidence"]["service"]["faults"]
    return str(next(row["text"] for row in faults if row["what"] == "no server"))


class Hungry:
    """A service on this machine in a cgroup of its own; it takes memory when told to."""

    def __init__(self, top: Path, group: Path, inside: tuple[str, ...]) -> None:
        enter = ("sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh")
        self.hunger = top / "hunger"
        variables = {"STANDIN_HUNGRY": str(self.hunger)}
        place = local_place(top / "place")
        self.checkout = Checkout(top / "checkout", variables, (*inside, *enter), **place)
        self.inside = inside

    def start(self) -> int:
        self.checkout.done("deploy", "-t", "local:/")
        started = self.checkout.done("serve.start", "-t", "local:/")
        return int(started["evidence"]["service"]["server"]["pid"])

    def among(self, script: str) -> bool:
        return not subprocess.run([*self.inside, "sh", "-c", script], check=False).returncode

    def gone(self, pid: int) -> None:
        # Nobody reaps in the test's namespace: what has ended stays as a zombie.
        soon(lambda: not self.among(f"ps -o stat= -s {pid} | grep -q '^[^Z]'"))


def test_a_kill_is_the_service_s_by_cgroup_and_by_time(tmp_path: Path) -> None:
    names = [f"dcu-test-{os.getpid()}-{n}" for n in "ab"]
    with (
        memory_group(names[0]) as one,
        memory_group(names[1]) as two,
        own_processes() as here,
        own_processes() as there,
    ):
        starved, ended = Hungry(tmp_path / "a", one, here), Hungry(tmp_path / "b", two, there)
        pids = starved.start(), ended.start()
        starved.hunger.touch()
        starved.gone(pids[0])
        ended.among(f"pkill -9 -s {pids[1]}")
        ended.gone(pids[1])
        said = end_of(starved.checkout, "local:/"), end_of(ended.checkout, "local:/")

        starved.hunger.unlink()
        pid = starved.start()
        starved.among(f"pkill -9 -s {pid}")
        starved.gone(pid)
        later = end_of(starved.checkout, "local:/")

    assert "the kernel ended VLLM::EngineCor for want of memory" in said[0]
    assert "memory" not in said[1]
    assert "memory" not in later


@pytest.mark.docker
def test_a_machine_that_runs_containers_is_none_of_them(image: str) -> None:
    before = oom.here()
    # An engine of old does so by itself: the host sees a mount below the container's folder.
    with machine(image, "--ipc", "shareable"):
        assert oom.here() == before


@pytest.mark.docker
@pytest.mark.parametrize("cgroups", ["host", "private"])
def test_a_kill_is_told_inside_the_container_in_which_it_was(
    tmp_path: Path, image: str, cgroups: str
) -> None:
    sight = ("--device", "/dev/kmsg", "--cap-add", "SYSLOG", "--memory", f"{LIMIT}m")
    sight += ("--cgroupns", cgroups)
    checkout = Checkout(tmp_path / "checkout", {"STANDIN_HUNGRY": "/hunger"})
    with machine(image, *sight) as one, machine(image, *sight) as two:
        for box in (one, two):
            checkout.done("deploy", "-t", box.to)
            checkout.done("serve.start", "-t", box.to)
        one.sh("touch /hunger")
        nothing_serves(one)
        two.sh("pkill -9 -f '[v]llm|[V]LLM'")
        nothing_serves(two)
        said = end_of(checkout, one.to), end_of(checkout, two.to)

        one.sh("rm /hunger")
        checkout.done("serve.start", "-t", one.to)
        one.sh("pkill -9 -f '[v]llm|[V]LLM'")
        nothing_serves(one)
        later = end_of(checkout, one.to)

    assert "the kernel ended VLLM::EngineCor for want of memory" in said[0]
    assert "memory" not in said[1]
    assert "memory" not in later


@pytest.mark.docker
def test_where_the_kernel_s_log_is_closed_that_is_said(tmp_path: Path, image: str) -> None:
    checkout = Checkout(tmp_path / "checkout", {"STANDIN_HUNGRY": "/hunger"})
    with machine(image, "--memory", f"{LIMIT}m") as box:
        checkout.done("deploy", "-t", box.to)
        checkout.done("serve.start", "-t", box.to)
        box.sh("touch /hunger")
        nothing_serves(box)

        said = end_of(checkout, box.to)

    assert "whether memory ran out cannot be told (the kernel's log: " in said


def nothing_serves(box: Machine) -> None:
    soon(lambda: "VLLM" not in (said := box.sh("ps -eo args=")) and "vllm" not in said)
