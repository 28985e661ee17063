"""From a patch to a proven dispatch, on the real vLLM server, and what goes wrong on the way.

The tests of this file share one deployment and run in order: starting the server takes a while. The
second server on the port, the unpatched one and the one with other words are real ones, too.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from deploy import serving
from deploy.agent import health, launch
from deploy.agent.ops import OpsProbe
from deploy.agent.plan import Extension
from deploy.agent.tree import TreeReader
from deploy.agent.words import Exit, Verb
from deploy.gates import Gate, Visit
from deploy.service import markers
from deploy.submission import load
from tests.live.world import NAME, World, build

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.timeout(900)]

LIBRARY = "vllm/_C.abi3.so"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = build(tmp_path_factory.mktemp("live") / "world")
    yield made
    made.ask(Verb.STOP, kill=True, grace=30)


def gate(visit: Visit, number: int) -> Gate:
    assert visit.evidence is not None, visit.error
    return next(one for one in visit.gates if one.number == number)


def passed(visit: Visit, number: int) -> bool:
    found = gate(visit, number)
    assert found.verdict.value != "passed" or found.proofs, "a pass without a proof"
    return found.verdict.value == "passed" and not found.faults


def look(world: World, **options: Any) -> tuple[set[str], Visit]:
    """Look at the service; the kinds of faults that this look found."""
    visit = world.ask(Verb.SERVICE, expect="running", **options)
    assert visit.evidence is not None, visit.error
    faults = visit.evidence.raw["service"]["faults"]
    return {fault["what"] for fault in faults if not fault["warning"]}, visit


def text_of(visit: Visit) -> str:
    assert visit.evidence is not None
    return str(visit.evidence.raw["markers"]["answer"]["text"])


def served_name(port: int) -> str:
    """The model that whoever gets this connection serves."""
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        line.request("GET", "/v1/models")
        return str(json.load(line.getresponse())["data"][0]["id"])
    finally:
        line.close()


def texts(world: World) -> list[str]:
    """What the server that runs makes of three prompts, of one chunk to three."""
    # With a salt each of their own: a cached prefix would be computed in other chunks.
    prompts = ((900, 5), (5000, 6), (9000, 7))
    answers = [health.generate(world.port, "tiny", n, salt=s, output=32) for n, s in prompts]
    assert [answer["error"] for answer in answers] == ["", "", ""]
    return [str(answer["text"]) for answer in answers]


def test_the_unpatched_server_tells_what_its_texts_are(world: World) -> None:
    assert not (world.site / "vllm" / "dcu").exists()

    with world.server_by_hand():
        found = texts(world)

    assert len(set(found)) == 3
    (world.top / "base.json").write_text(json.dumps(found))


def test_a_patch_is_deployed_and_gate_1_passes(world: World) -> None:
    visit = world.deploy()

    assert visit.error is None
    assert passed(visit, 1), gate(visit, 1).faults
    assert (world.site / "vllm" / "dcu" / "diag.py").exists()


def test_the_patched_server_starts_and_gate_5_passes(world: World) -> None:
    before = world.ask(Verb.SERVICE, expect="clean")
    assert before.exit is Exit.OK, before

    visit = world.ask(Verb.START)

    assert visit.error is None
    assert passed(visit, 5), gate(visit, 5).faults
    assert visit.exit is Exit.OK


def test_a_real_request_takes_the_wanted_path_in_the_predicted_chunks(world: World) -> None:
    plan = serving.chunk_plan(load(NAME, world.layout), 9000)
    assert [chunk.q_len for chunk in plan] == [4096, 4096, 808]

    visit = world.prove(9000)

    assert passed(visit, 6), gate(visit, 6).faults
    assert any(proof.startswith("(4096, *)") for proof in gate(visit, 6).proofs)
    assert any(proof.startswith("(808, *)") for proof in gate(visit, 6).proofs)
    (world.top / "on.txt").write_text(text_of(visit))
    assert text_of(visit)


def test_a_window_without_a_request_proves_nothing(world: World) -> None:
    _, seen = look(world, ask=False)
    assert seen.evidence is not None
    place = seen.evidence.raw["service"]["log"]["place"]

    visit = world.ask(Verb.MARKERS, window=place)

    assert visit.evidence is not None
    scan = visit.evidence.raw["markers"]
    needed = serving.needed(load(NAME, world.layout), 9000)
    found = markers.judge(scan, needed, scan["pids"])
    assert not found.proven
    assert all("selected outside the window only" in fault for fault in found.faults)


def test_a_second_server_on_the_port_is_found_and_nothing_is_when_it_is_gone(world: World) -> None:
    # Both are real: each sets SO_REUSEPORT, and neither says a word about the other.
    with world.server_by_hand(instead={"tiny": "other"}) as pid:
        kinds, visit = look(world, ask=False)
        limit, names = time.monotonic() + 60, set[str]()
        while len(names) < 2:  # the kernel deals the connections out to both
            assert time.monotonic() < limit, names
            names.add(served_name(world.port))
    said = gate(visit, 5).faults

    assert kinds == {"api server", "engine core", "listener"}
    assert any(f"127.0.0.1:{world.port} by pid {pid}" in fault for fault in said), said
    kinds, visit = look(world)
    assert kinds == set()
    assert passed(visit, 5)


def test_a_library_replaced_under_the_server_is_found_and_nothing_is_when_it_is_back(
    world: World,
) -> None:
    path = world.site / LIBRARY
    kept = path.with_name("kept")
    os.link(path, kept)
    beside = path.with_name("new")
    beside.write_bytes(path.read_bytes())
    os.replace(beside, path)

    kinds, visit = look(world)
    os.replace(kept, path)

    assert kinds == {"mapped"}
    assert "another file lies there now" in "\n".join(gate(visit, 5).faults)
    assert look(world)[0] == set()


def test_a_deploy_under_a_running_server_is_refused_and_found_when_forced(world: World) -> None:
    module = world.site / "vllm" / "dcu" / "diag.py"
    original = module.read_bytes()
    module.unlink()

    refused = world.deploy()
    forced = world.deploy(force_running=True)
    kinds, _ = look(world)

    assert refused.exit is Exit.REFUSED
    assert forced.exit is Exit.OK, forced.error
    assert module.read_bytes() == original
    assert kinds == {"old process"}


def test_an_engine_whose_server_was_killed_is_found_kept_from_a_start_and_ended(
    world: World,
) -> None:
    run = launch.read_run(str(world.folder))
    assert run is not None
    os.kill(run.pid, signal.SIGKILL)
    limit = time.monotonic() + 30
    while run.alive:
        assert time.monotonic() < limit
        time.sleep(0.1)

    kinds, _ = look(world, ask=False)
    start = world.ask(Verb.START)
    ended = world.ask(Verb.STOP, grace=60)
    clean = world.ask(Verb.SERVICE, expect="clean")

    assert kinds == {"no server", "orphan"}
    assert start.exit is Exit.REFUSED
    assert "has lost its server" in start.error.why  # type: ignore[union-attr]
    assert ended.exit is Exit.OK, ended.error
    assert clean.exit is Exit.OK


def test_with_the_switch_off_nothing_is_selected_and_texts_are_the_unpatched_server_s(
    world: World,
) -> None:
    started = world.ask(Verb.START, off=True)
    assert started.exit is Exit.OK, started.error
    assert passed(started, 5), gate(started, 5).faults

    off = world.prove(9000, off=True)
    on = world.prove(9000, salt=1)
    found = texts(world)

    assert passed(off, 6), gate(off, 6).faults
    assert text_of(off) == (world.top / "on.txt").read_text()
    assert found == json.loads((world.top / "base.json").read_text())
    assert not passed(on, 6)
    assert "selected=False all" in "\n".join(gate(on, 6).faults)


def test_the_server_with_its_switch_off_is_not_the_locked_one(world: World) -> None:
    kinds, visit = look(world)

    assert kinds == {"environment"}
    assert "VLLM_DCU_CANDIDATE" in "\n".join(gate(visit, 5).faults)


def test_the_log_of_an_earlier_start_proves_nothing(world: World) -> None:
    runs = sorted(path for path in (world.folder / "runs").iterdir() if not path.is_symlink())
    earlier, current = runs[0] / "serve.log", (world.folder / "runs" / "current").resolve()
    aside = current / "aside"
    (current / "serve.log").rename(aside)
    (current / "serve.log").write_bytes(earlier.read_bytes())

    visit = world.ask(Verb.MARKERS, window={"device": 0, "inode": 0, "offset": 0})
    aside.rename(current / "serve.log")

    assert visit.evidence is not None
    scan = visit.evidence.raw["markers"]
    needed = serving.needed(load(NAME, world.layout), 9000)
    found = markers.judge(scan, needed, scan["pids"])
    assert scan["markers"]
    assert not found.proven
    assert all("which is not this service" in fault for fault in found.faults)


def test_a_server_with_other_words_another_model_and_a_proxy_is_found(world: World) -> None:
    world.ask(Verb.STOP, grace=60)
    locked = serving.launch_of(load(NAME, world.layout))
    other = world.top / "other-model"
    other.symlink_to(locked.model)
    proxy = {"http_proxy": "http://127.0.0.1:9", "VLLM_LOGGING_LEVEL": "INFO"}
    with world.server_by_hand(
        "--max-num-seqs", "7", instead={locked.model: str(other)}, **proxy
    ):  # fmt: skip
        kinds, visit = look(world, patience=120)

    said = "\n".join(gate(visit, 5).faults)
    assert kinds == {"record", "arguments", "environment", "model"}
    assert f"lacks {locked.model}; has {other} --max-num-seqs 7" in said
    assert "http_proxy=hidden is set and not locked" in said
    assert "VLLM_LOGGING_LEVEL=INFO is set and not locked" in said
    assert f"it serves {other}, locked is {locked.model}" in said


def test_an_extension_of_another_build_is_found_though_the_package_imports(world: World) -> None:
    path = world.site / LIBRARY
    right = path.read_bytes()
    source = "void nope(void); __attribute__((constructor)) void f(void) { nope(); }"
    other = path.with_name("other")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(other)],
        input=source, text=True, check=True, timeout=60,
    )  # fmt: skip
    try:
        assert ops_state(world) == "ok"
        os.replace(other, path)
        imported = world.import_package()
        state = ops_state(world)
    finally:
        path.write_bytes(right)

    assert "imported" in imported.stdout, imported.stderr
    assert state == "undefined symbol"


def ops_state(world: World) -> str:
    tree = TreeReader("/", str(world.site))
    extension = Extension(module="vllm._C", namespace="_C", ops={"silu_and_mul": ""})
    probe = OpsProbe(tree, (extension,), python=str(world.python))
    return str(probe.finish(120)[0]["state"])
