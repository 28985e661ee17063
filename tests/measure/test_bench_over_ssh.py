"""A run that was asked for over a real sshd, by an agent that never lay on the target."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.carriers.sshd as sshds
from deploy.agent.launch import Launch
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.evidence import Evidence
from deploy.measure import record
from tests.carriers.remote import Remote
from tests.measure.room import STANDIN, Target, child_of, inputs, make

pytestmark = [pytest.mark.sshd, pytest.mark.slow]


class Far:
    """The room behind sshd, which runs in the room's own namespace of processes."""

    def __init__(self, room: Target, remote: Remote) -> None:
        self.room, self.remote = room, remote

    def ask(self, **options: Any) -> Evidence:
        site, python, folder = (self.room.overrides[i] for i in (1, 3, 5))
        data = self.room.folder / "8-16K.jsonl"
        manifest = inputs(self.room.folder, self.room.port, data)["manifest"]
        launch = Launch.of_manifest(manifest)
        request = Request(
            verb=Verb.MEASURE, site=site, python=python, launch_dir=folder,
            options={"manifest": manifest, "launch": launch.to_json(), **options},
        )  # fmt: skip
        carrier = self.remote.carrier()
        [said] = carrier.deliver_in_turn(self.room.bundle, [request], tell=lambda _: None)
        assert said.error is None, str(said.error)
        return said


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    inside = tmp_path / "sshd-inside"
    inside.write_text(
        f'#!/bin/sh\nexec unshare --pid --fork --kill-child --mount-proc {sshds.SSHD} "$@"\n'
    )
    inside.chmod(0o755)
    monkeypatch.setattr(sshds, "SSHD", str(inside))
    path = f"SetEnv PATH={STANDIN}:{os.environ['PATH']}"
    remote = Remote(tmp_path / "far", path, root="/").start()
    keeper = child_of(remote.sshd.pid, "sshd")
    room = make(tmp_path / "room", ("nsenter", "-p", "-m", "-t", str(keeper)))
    yield Far(room, remote)
    assert remote.sshd._process is not None
    remote.sshd._process.kill()  # it hands no milder signal on to what it has unshared
    remote.stop()


def test_a_run_outlives_the_connection_that_asked_for_it(far: Far) -> None:
    far.room.start(STANDIN_SLOW="1")

    started = far.ask(act="start", kind="bench")

    # The connection is closed by now, and most of the ten requests are still to be sent.
    stamp = started.raw["measure"]["stamp"]
    now = far.ask(act="status", kind="bench", stamp=stamp).raw["measure"]
    assert (now["stamp"], now["state"]) == (stamp, "running")
    limit = time.monotonic() + 60
    while True:
        found = far.ask(act="status", kind="bench", stamp=stamp, record=True).raw["measure"]
        if found["state"] != "running":
            break
        assert time.monotonic() < limit, found
        time.sleep(0.3)
    assert found["state"] == "done", found
    run = record.parse(found["record"])
    assert record.faults(run, run.buckets["8-16K"]) == ()
    assert not list(far.room.folder.rglob("*.pyz"))
