"""Twenty hosts at once, some of them down, hanging or unfit: the others do not notice."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy import fleet
from deploy.agent.words import BundleError, Exit, Verb
from deploy.carriers import Request
from deploy.carriers.ssh import Ssh
from deploy.carriers.ssh_config import load
from deploy.errors import worst
from deploy.evidence import Evidence
from tests.agent.target import BASE_FILES, NEW_FILES, Target
from tests.carriers.remote import Remote
from tests.carriers.sshd import Sshd, free_port

pytestmark = [pytest.mark.sshd, pytest.mark.slow]

DOWN, HANGS, OTHER_BASE, OTHER_PYTHON = ("h01", "h02", "h03"), "h04", "h05", "h06"
ALL = [f"h{i:02}" for i in range(1, 21)]


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Sshd]:
    """A server behind which there is no Python but an old one."""
    bare = tmp_path / "old-bin"
    bare.mkdir()
    for tool in ("sh", "head"):
        (bare / tool).symlink_to(str(shutil.which(tool)))
    (bare / "python3").write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2\nexit 93\n')
    (bare / "python3").chmod(0o755)
    sshd = Sshd(tmp_path / "old", f"SetEnv SHLVL=5 PATH={bare}").start()
    yield sshd
    sshd.stop()


def test_three_down_one_hanging_and_two_unfit_do_not_hold_up_fourteen(
    tmp_path: Path, silent: int, old: Sshd
) -> None:
    remote = Remote(tmp_path, "SetEnv SHLVL=5", "MaxStartups 100").start()
    (tmp_path / "old" / "user.pub").write_bytes((remote.sshd.folder / "user.pub").read_bytes())
    ports = {**dict.fromkeys(DOWN, free_port()), HANGS: silent, OTHER_PYTHON: old.port}
    config = tmp_path / "ssh_config"
    config.write_text("".join(remote.sshd.config_of(name, port=ports.get(name, 0)) for name in ALL))
    targets = []
    for name in ALL:
        Target(tmp_path / name).make(BASE_FILES)
        host = replace(remote.host, ssh=name, root=str(tmp_path / name), state_dir="")
        pin = old.fingerprint if name == OTHER_PYTHON else remote.sshd.fingerprint
        targets.append(
            Ssh(alias=name, host=host, pins={name: {pin: "pinned"}}, config=load([config]),
                limits=remote.limits)
        )  # fmt: skip
    Target(tmp_path / OTHER_BASE).write(
        "pack-1.0.dist-info/METADATA", b"Name: pack\nVersion: 2.0\n"
    )
    (tmp_path / OTHER_BASE / "usr/lib/python3/dist-packages/pack-1.0.dist-info").rename(
        tmp_path / OTHER_BASE / "usr/lib/python3/dist-packages/pack-2.0.dist-info"
    )
    bundle = remote.bundle()

    def work(target: Ssh, tell: fleet.Tell) -> list[Evidence]:
        requests = [Request(verb=Verb.DEPLOY), Request(verb=Verb.VERIFY)]
        return target.deliver_in_turn(bundle, requests, tell=tell)

    start = time.monotonic()
    try:
        results = fleet.each(targets, work, name=lambda target: target.alias)
    finally:
        remote.stop()

    found = dict(zip(ALL, (code(result) for result in results), strict=True))
    bad = {*DOWN, HANGS, OTHER_BASE, OTHER_PYTHON}
    assert {name: found[name] for name in DOWN} == dict.fromkeys(DOWN, Exit.UNREACHABLE)
    assert found[HANGS] == Exit.UNREACHABLE
    assert found[OTHER_BASE] == Exit.UNFIT
    assert found[OTHER_PYTHON] == Exit.UNFIT, results[5]
    assert {name for name in ALL if found[name] == Exit.OK} == set(ALL) - bad
    assert worst(found.values()) == Exit.UNREACHABLE
    assert time.monotonic() - start < 60
    for name in ALL:
        assert (content(tmp_path / name) == NEW_FILES["pack/core.py"]) == (name not in bad)


def code(result: Any) -> Exit:
    return result.exit if isinstance(result, BundleError) else result[-1].exit


def content(root: Path) -> bytes:
    return (root / "usr/lib/python3/dist-packages/pack/core.py").read_bytes()


def test_blobs_for_many_hosts_do_not_fill_the_operators_memory(tmp_path: Path) -> None:
    """Eight hosts of 24 MB each in a process of its own, whose peak is then looked at."""
    remote = Remote(tmp_path, "SetEnv SHLVL=5", "MaxStartups 100").start()
    big = {**NEW_FILES, "pack/big.so": bytes(range(256)) * (24 << 12)}
    bundle = remote.bundle(big)
    config = tmp_path / "ssh_config"
    names = [f"h{i}" for i in range(8)]
    config.write_text("".join(remote.sshd.config_of(name) for name in names))
    for name in names:
        Target(tmp_path / name).make(BASE_FILES)
    script = rf"""
import re, sys
from pathlib import Path
from deploy import bundle, fleet
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.ssh import Ssh
from deploy.carriers.ssh_config import load
from deploy.inventory import Host
made = bundle.read(Path({str(bundle.path)!r}))
def target(name):
    host = Host(ssh=name, root={str(tmp_path)!r} + "/" + name)
    pins = {{name: {{{remote.sshd.fingerprint!r}: "pinned"}}}}
    return Ssh(alias=name, host=host, pins=pins, config=load([Path({str(config)!r})]))
def work(one, tell):
    return one.deliver_in_turn(made, [Request(verb=Verb.DEPLOY)], tell=tell)
results = fleet.each([target(n) for n in {names!r}], work, name=lambda one: one.alias)
assert [int(r[0].exit) for r in results] == [0] * 8
# Of this program alone: ru_maxrss would also hold the peak of the process that started it.
print(int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024)
"""
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=200, check=False
        )
    finally:
        remote.stop()

    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 150_000_000
