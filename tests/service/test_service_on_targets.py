"""A service in a container, from deploy to stop: through the engine, and through the box's sshd.

Every step is a task as an operator types it; the server is the stand-in.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.words import Exit
from tests.carriers.boxes import docker
from tests.service.ground import Checkout, Machine, behind_sshd, machine

pytestmark = [pytest.mark.docker, pytest.mark.slow]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout")


def verdicts(target: dict[str, Any]) -> dict[int, str]:
    return {gate["gate"]: gate["verdict"] for gate in target["gates"]}


def faults(target: dict[str, Any]) -> dict[str, str]:
    """What a look found, warnings too: kind -> text."""
    return {row["what"]: row["text"] for row in target["evidence"]["service"]["faults"]}


def tell_the_story(checkout: Checkout, to: str, env: dict[str, str]) -> None:
    def inv(*words: str) -> tuple[int, dict[str, Any]]:
        return checkout.inv(*words, "-t", to, env=env)

    code, clean = inv("serve.status", "--expect", "clean")
    assert (code, faults(clean)) == (Exit.OK, {})
    code, deployed = inv("deploy")
    assert (code, verdicts(deployed)[1]) == (Exit.OK, "passed"), deployed["error"]

    code, started = inv("serve.start")
    assert (code, verdicts(started)[5]) == (Exit.OK, "passed"), started
    assert faults(started) == {}
    code, again = inv("serve.start")
    assert code == Exit.REFUSED
    assert "an API server runs" in again["error"]["why"]

    code, seen = inv("serve.status", "--expect", "running")
    assert (code, verdicts(seen)[5], faults(seen)) == (Exit.OK, "passed", {})
    code, proven = inv("serve.prove", "--prompt", "9000")
    assert (code, verdicts(proven)[6]) == (Exit.OK, "passed"), proven
    assert [proof.split(" ", 2)[1] for proof in proven["gates"][-1]["proofs"]] == ["*)", "*)"]

    code, stopped = inv("serve.stop")
    assert (code, stopped["evidence"]["outcome"]) == (Exit.OK, "stopped")
    code, clean = inv("serve.status", "--expect", "clean")
    assert (code, faults(clean), clean["evidence"]["service"]["processes"]) == (Exit.OK, {}, [])


def test_a_service_is_started_proven_and_stopped_in_a_container(
    checkout: Checkout, image: str
) -> None:
    with machine(image) as box:
        tell_the_story(checkout, box.to, {})


@pytest.mark.sshd
def test_a_service_is_started_proven_and_stopped_over_the_sshd_of_a_container(
    checkout: Checkout, image: str, tmp_path: Path
) -> None:
    with behind_sshd(image, tmp_path / "home") as (_, env):
        tell_the_story(checkout, "ssh:box", env)


def served_by_hand(box: Machine, port: int) -> None:
    """Start somebody's server, which nothing of ours knows of."""
    words = f"/usr/local/bin/vllm serve /srv/model --port {port}"
    docker("exec", "-d", box.id, "sh", "-c", f"exec setsid {words} >/log 2>&1 </dev/null")
    limit = time.monotonic() + 20
    while "startup complete" not in box.sh("cat /log 2>/dev/null; true"):
        assert time.monotonic() < limit
        time.sleep(0.1)


def test_a_server_of_another_container_is_told_apart_and_left_alone(
    checkout: Checkout, image: str
) -> None:
    with machine(image) as other, machine(image, "--pid", f"container:{other.id}") as box:
        served_by_hand(other, 8002)
        checkout.done("deploy", "-t", box.to)

        code, started = checkout.inv("serve.start", "-t", box.to)
        rows = started["evidence"]["service"]["processes"]
        stopped = checkout.inv("serve.stop", "--kill", "-t", box.to)[0]
        left = other.sh("ps -eo args=").count("vllm serve")

    assert (code, verdicts(started)[5]) == (Exit.OK, "passed"), started
    assert set(faults(started)) == {"other container"}
    assert f"({other.id[:12]})" in faults(started)["other container"]
    places = {(row["role"], row["container"]) for row in rows}
    assert places == {
        (role, place)
        for role in ("api server", "engine core")
        for place in ("", other.id[:12])
    }  # fmt: skip
    assert (stopped, left) == (Exit.OK, 1)


@pytest.mark.parametrize("cgroups", ["host", "private"])
def test_a_server_of_the_host_is_none_of_the_containers(
    checkout: Checkout, image: str, cgroups: str
) -> None:
    titled = ("bash", "-c", "exec -a VLLM::EngineCore sleep 60")
    with (
        subprocess.Popen(titled) as engine,
        machine(image, "--pid", "host", "--cgroupns", cgroups) as box,
    ):
        _, seen = checkout.inv("serve.status", "--no-ask", "-t", box.to)
        engine.kill()

    rows = {row["pid"]: row for row in seen["evidence"]["service"]["processes"]}
    assert rows[engine.pid]["container"] == "elsewhere"


def test_a_listener_of_another_container_on_the_service_s_port_is_a_fault(
    checkout: Checkout, image: str
) -> None:
    with machine(image) as other:
        shared = ("--pid", f"container:{other.id}", "--network", f"container:{other.id}")
        with machine(image, *shared) as box:
            served_by_hand(other, 8001)
            checkout.done("deploy", "-t", box.to)
            code, started = checkout.inv("serve.start", "-t", box.to)

    assert code == Exit.REFUSED
    assert "the port is taken: 127.0.0.1:8001 by pid" in started["error"]["why"]
