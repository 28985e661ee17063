"""What breaks on the way or over there: after it a target is old or new, never half, and we say so.

The faults are real: connections cut or stalled by a relay, processes killed, file systems that are
full. The next call must mend whatever was left.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.agent.words import Exit, Verb
from deploy.carriers.ssh_line import Limits, connect
from deploy.errors import BundleError, Unreachable
from tests.agent.target import BASE_FILES, NEW_FILES, difference
from tests.carriers.relay import Relay
from tests.carriers.remote import QUICK, Remote

pytestmark = pytest.mark.sshd

BIG = random.Random(7).randbytes(3 << 20)
FILES = {**NEW_FILES, "pack/big.so": BIG}


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Remote]:
    made = Remote(tmp_path, f"SetEnv SHLVL=5 {_of(tmp_path)}").start()
    yield made
    made.stop()


def _of(folder: Path) -> str:
    """What the agents behind one test's sshd carry in their environment."""
    return f"DCU_TEST_OF={folder}"


def is_new(remote: Remote) -> bool:
    return remote.is_new() and (remote.target.top / "pack/big.so").read_bytes() == BIG


def is_base(remote: Remote) -> bool:
    return remote.is_base() and not remote.target.exists("pack/big.so")


def make_base(remote: Remote) -> None:
    for folder in (remote.target.root, remote.state, remote.folder / "memory"):
        shutil.rmtree(folder, ignore_errors=True)
    remote.target.make(BASE_FILES)


def agents(remote: Remote) -> list[int]:
    """The agents that this test's sshd started: the loader of a job is in their argv."""
    mark, found = _of(remote.folder).encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv = (path / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(b"import sys,zlib,") for word in argv) and mark in (
                (path / "environ").read_bytes().split(b"\0")
            ):
                found.append(int(path.name))
    return found


def await_no_agent(remote: Remote, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while agents(remote):
        assert time.monotonic() < end, "an agent outlived its line"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_line_cut_after_any_number_of_bytes_leaves_old_or_new(remote: Remote) -> None:
    bundle = remote.bundle(FILES)
    with Relay(remote.sshd.port) as relay:
        remote.port = relay.port
        remote.deploy(bundle)
        whole = relay.up
    steps = [0, 900, 1800, 2600, 3400, 20_000, 60_000, 500_000, whole // 2]
    steps += [whole - 1500, whole - 120, whole - 1]
    seen = set()

    for count in steps:
        make_base(remote)
        with Relay(remote.sshd.port, cut_after=count) as relay:
            remote.port = relay.port
            try:
                said = remote.deploy(bundle)
                assert is_new(remote), count
                assert said[-1].exit == Exit.OK
            except Unreachable as err:
                seen.add(err.what)
        await_no_agent(remote)
        assert is_base(remote) or is_new(remote), count
        remote.port = remote.sshd.port
        assert remote.deploy(bundle)[-1].exit == Exit.OK, count
        assert is_new(remote), count

    assert any("drops connections" in what for what in seen)
    assert any("not known" in what for what in seen)


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_line_cut_after_any_number_of_bytes_that_came_back_is_told_truly(
    remote: Remote,
) -> None:
    bundle = remote.bundle(FILES)
    with Relay(remote.sshd.port) as relay:
        remote.port = relay.port
        remote.deploy(bundle)
        whole = relay.down
    lost = 0

    for count in [1500, 2500, *(whole - back for back in range(0, 7000, 700))]:
        make_base(remote)
        with Relay(remote.sshd.port, cut_down_after=count) as relay:
            remote.port = relay.port
            try:
                assert remote.deploy(bundle)[-1].exit == Exit.OK
                assert is_new(remote), count
            except Unreachable:
                lost += 1
        await_no_agent(remote)
        assert is_base(remote) or is_new(remote), count
        remote.port = remote.sshd.port
        assert remote.deploy(bundle)[-1].exit == Exit.OK, count

    assert lost > 5


@pytest.mark.parametrize("word", ["sending", "committed"])
def test_the_commit_point_decides_what_a_lost_line_leads_to(remote: Remote, word: str) -> None:
    bundle = remote.bundle(FILES)

    with Relay(remote.sshd.port) as relay:
        remote.port = relay.port
        remote.lines = Acting(word, relay.cut)
        with pytest.raises(Unreachable, match="not known"):
            remote.deploy(bundle)
    await_no_agent(remote)

    assert is_new(remote) if word == "committed" else is_base(remote)
    remote.port, remote.lines = remote.sshd.port, []
    said = remote.deploy(bundle)
    assert said[0].outcome == ("verified" if word == "committed" else "deployed")
    assert said[-1].exit == Exit.OK


class Acting(list[str]):
    """A list of progress lines that does something when one begins with a word."""

    def __init__(self, word: str, act: Callable[[], object]) -> None:
        super().__init__()
        self._word, self._act = word, act

    def append(self, line: str) -> None:
        super().append(line)
        if line.startswith(self._word):
            self._act()


@pytest.mark.slow
@pytest.mark.parametrize("word", ["", "sending", "committed"])
def test_a_dead_network_is_noticed_and_nothing_hangs(remote: Remote, word: str) -> None:
    bundle = remote.bundle(FILES)
    remote.limits = QUICK

    with Relay(remote.sshd.port) as relay:
        remote.port = relay.port
        remote.lines = Acting(word, relay.stall)
        if not word:
            relay.stall()
        start = time.monotonic()
        with pytest.raises(Unreachable) as caught:
            remote.deploy(bundle)
        took = time.monotonic() - start

    assert took < 30  # what is promised; 5 s for each phase that can hang
    if word:
        assert "nothing moved" in caught.value.why
    await_no_agent(remote)
    assert is_new(remote) if word == "committed" else is_base(remote)


@pytest.mark.slow
def test_with_the_usual_limits_a_dead_network_is_noticed_within_30_s(remote: Remote) -> None:
    remote.limits = Limits()
    with Relay(remote.sshd.port) as relay:
        remote.port = relay.port
        remote.lines = Acting("sending", relay.stall)
        start = time.monotonic()
        with pytest.raises(Unreachable):
            remote.deploy(remote.bundle(FILES))

    assert time.monotonic() - start < 30


def test_a_line_that_dies_while_it_sends_holds_no_lock(remote: Remote) -> None:
    bundle = remote.bundle(FILES)
    remote.limits = replace(remote.limits, silence=2)

    with Relay(remote.sshd.port) as relay:
        remote.port = relay.port
        remote.lines = Acting("sending", relay.stall)
        with pytest.raises(Unreachable):
            remote.deploy(bundle)
        assert agents(remote), "the agent still waits at the other end of the dead line"

        remote.port, remote.lines = remote.sshd.port, []
        assert remote.deploy(bundle)[-1].exit == Exit.OK
    await_no_agent(remote)


@pytest.mark.parametrize("word", ["sending", "committed"])
def test_a_killed_agent_is_told_and_the_next_call_mends(remote: Remote, word: str) -> None:
    bundle = remote.bundle(FILES)
    remote.lines = Acting(word, lambda: [os.kill(pid, signal.SIGKILL) for pid in agents(remote)])

    with pytest.raises(BundleError) as caught:
        remote.deploy(bundle)

    assert caught.value.exit == Exit.UNREACHABLE
    await_no_agent(remote)
    remote.lines = []
    assert remote.deploy(bundle)[-1].exit == Exit.OK
    assert is_new(remote)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    argv = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_in_the_site_changes_nothing(remote: Remote) -> None:
    shutil.rmtree(remote.target.root)
    with small_disk(remote.target.root, "2m"):
        remote.target.make(BASE_FILES)
        before = remote.target.snapshot()

        said = remote.deploy(remote.bundle(FILES))

        assert [found.exit for found in said] == [Exit.REFUSED]
        assert difference(before, remote.target.snapshot()) == {}


def test_a_full_store_is_done_without(remote: Remote) -> None:
    with small_disk(remote.state, "1m"):
        said = remote.deploy(remote.bundle(FILES))

        assert [found.exit for found in said] == [Exit.OK, Exit.OK]
        assert is_new(remote)
        assert not list(remote.state.rglob("*.part"))


@pytest.mark.parametrize("clock", ["-20y", "+20y"])
def test_a_clock_that_is_off_by_years_does_not_matter(tmp_path: Path, clock: str) -> None:
    libraries = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if not libraries:
        pytest.skip("apt-get install faketime")
    remote = Remote(tmp_path, f"SetEnv SHLVL=5 LD_PRELOAD={libraries[0]} FAKETIME={clock}").start()
    try:
        bundle = remote.bundle(FILES)
        said = remote.deploy(bundle)
        again = remote.ask(Verb.VERIFY, bundle)
    finally:
        remote.stop()

    year = int(said[0].raw["incidental"]["time"][:4])
    assert abs(year - time.gmtime().tm_year) > 15
    assert again.exit == Exit.OK


def test_what_a_command_said_is_read_though_it_ended_before_it_was_fed(remote: Remote) -> None:
    ssh = remote.carrier()
    with connect(ssh.host.ssh, config=ssh.config, pins=ssh.pins, label=ssh.alias) as line:
        # More than any window holds: it can only be sent to somebody who reads.
        stream = line.start("echo spoken; echo why >&2; exit 3", bytes(16 << 20))
        heard = stream.receive()
        status = stream.finish()

    assert (heard, stream.said, status) == (b"spoken\n", "why", 3)
