"""The real server, measured without markers, and its twin from the same lock that prints them.

The tests of this file share one deployment and run in order: starting the server takes a while.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from deploy import reporting
from deploy.agent.words import Exit, Verb
from deploy.errors import BadValues
from deploy.gates import Gate, Visit
from tests.live.world import NAME, World, build

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = build(tmp_path_factory.mktemp("twin") / "world", twin=True)
    yield made
    made.ask(Verb.STOP, kill=True, grace=30)


def gate(visit: Visit, number: int) -> Gate:
    assert visit.evidence is not None, visit.error
    return next(one for one in visit.gates if one.number == number)


def reported(world: World) -> dict[int, dict[str, Any]]:
    found, _ = reporting.write(NAME, layout=world.layout, to="local:/")
    return {row["gate"]: row for row in found["gates"]}


def test_the_measured_server_is_as_locked_and_prints_no_markers(world: World) -> None:
    assert world.deploy().error is None
    started = world.ask(Verb.START)
    assert started.error is None
    assert gate(started, 5).verdict.value == "passed", gate(started, 5).faults

    with pytest.raises(BadValues, match="is proven on a twin"):
        world.prove(9000)
    taken_for_the_twin = world.prove(9000, twin=True)

    assert gate(taken_for_the_twin, 6).verdict.value == "failed"
    assert "is the diag variable set?" in "\n".join(gate(taken_for_the_twin, 6).faults)
    assert world.ask(Verb.STOP, grace=60).exit is Exit.OK


def test_its_twin_proves_the_dispatch_and_says_that_it_is_one(world: World) -> None:
    started = world.ask(Verb.START, twin=True)
    assert started.error is None
    assert gate(started, 5).verdict.value == "passed", gate(started, 5).faults

    proven = world.prove(9000, twin=True)

    assert gate(proven, 6).verdict.value == "passed", gate(proven, 6).faults
    assert "on a twin of the measured process" in gate(proven, 6).reason
    shapes = [proof.partition(" bfloat16")[0] for proof in gate(proven, 6).proofs]
    assert {"(4096, *)", "(808, *)"} <= set(shapes)


def test_the_report_shows_the_measured_server_s_gate_5_and_the_twin_s_gate_6(world: World) -> None:
    assert world.verify().exit is Exit.OK

    rows = reported(world)

    assert [rows[n]["verdict"] for n in (1, 5, 6)] == ["passed"] * 3
    assert "twin" in rows[6]["reason"]
    kept = json.loads((world.layout.out_of(NAME) / "serve-local--.json").read_text())["kinds"]
    assert kept["measured"]["run"] != kept["twin"]["run"]
    assert rows[5] == kept["measured"]["gates"]["5"]
    assert rows[6] == kept["twin"]["gates"]["6"]


def test_the_twin_is_not_taken_for_the_measured_server(world: World) -> None:
    seen = world.ask(Verb.SERVICE, expect="running")

    assert seen.exit is Exit.DIFFERS
    assert gate(seen, 5).faults == ("VLLM_DCU_KERNEL_DIAG=1 is set and not locked in launch.env",)
