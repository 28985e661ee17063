"""What an engine can do to a call: be absent, old, slow, full, or left by a call that died."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import secrets
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import imaging
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.assembly import Folders, Order, build
from deploy.carriers.container import Container, ImageTarget, _evidence
from deploy.carriers.engine import TEMPORARY, Ended, Engine, open_engine
from deploy.errors import BadValues, BundleError, Exit, Refused, Unfit, Unreachable
from deploy.image.archive import Image, archive_size, stream
from deploy.image.base import Pin, new_index
from deploy.image.config import Added, Base, config_document
from deploy.image.layer import Entry
from deploy.image.overlay import Extra
from tests.carriers import dock
from tests.carriers.slow_socket import slow_socket
from tests.carriers.small_engine import small_engine

TOP = Path(__file__).resolve().parents[2]
FAULT = dock.own("fault")


def three_lines(error: BundleError) -> bool:
    return len(str(error).splitlines()) == 3


# --- absent and old -------------------------------------------------------------------------------


def test_no_engine_is_exit_5_in_three_lines(tmp_path: Path) -> None:
    with pytest.raises(Unreachable) as caught, open_engine(f"unix://{tmp_path}/none.sock"):
        pass

    assert caught.value.exit == Exit.UNREACHABLE
    assert three_lines(caught.value)
    assert "none.sock" in caught.value.what


@pytest.mark.parametrize(
    "where",
    ["tcp://[::1", "tcp://engine:abc", "tcp://127.0.0.1:99999", "http://[z]:1", "[", "npipe://x"],
)
def test_an_address_that_is_none_is_exit_5_in_three_lines(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", where)

    with pytest.raises(Unreachable) as caught, open_engine():
        pass

    assert three_lines(caught.value)
    assert where in caught.value.what


def test_certificates_that_are_not_there_are_exit_5(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path / "none"))

    with pytest.raises(Unreachable) as caught, open_engine():
        pass

    assert "certificate" in caught.value.why


class _Old(http.server.BaseHTTPRequestHandler):
    """An engine of long ago, as far as it is asked."""

    def do_GET(self) -> None:
        body = json.dumps({"ApiVersion": "1.12", "Version": "1.0"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_an_engine_that_is_too_old_is_refused_in_three_lines(tmp_path: Path) -> None:
    with socketserver.ThreadingUnixStreamServer(str(tmp_path / "old.sock"), _Old) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(Unreachable) as caught, open_engine(f"unix://{tmp_path}/old.sock"):
                pass
        finally:
            server.shutdown()

    assert three_lines(caught.value)
    assert "too old" in caught.value.what
    assert "1.24" in caught.value.why


# --- exit codes and names -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "exit_code"), [(None, Exit.NEEDS_PERSON), (1, Exit.NEEDS_PERSON), (126, Exit.UNFIT)]
)
def test_a_child_without_evidence_is_a_failure_whatever_its_code(
    code: int | None, exit_code: Exit
) -> None:
    with pytest.raises(BundleError) as caught:
        _evidence(Ended(code, b"", b"last words\n"), "container:c", "python3")

    assert caught.value.exit == exit_code
    assert "last words" in caught.value.why


def test_a_base_without_digests_is_called_not_reproducible() -> None:
    with pytest.raises(BadValues) as caught:
        Pin.parse({"reference": "vendor:1"})

    assert "tag without digest" in caught.value.why


@pytest.mark.parametrize(
    ("digests", "new"),
    [(["sha256:cccc"], True), (["sha256:aaaa", "sha256:cccc"], False), ([], False)],
)
def test_the_same_layers_below_another_index_are_noted(digests: list[str], new: bool) -> None:
    pin = Pin(
        reference="v:1",
        diff_ids=("d",),
        run_config="r",
        platform="linux/amd64",
        digest="sha256:aaaa",
    )

    assert new_index(pin, digests) is new


# --- on a real engine -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine() as found:
        yield found


@pytest.fixture(scope="module")
def vendor(engine: Engine) -> Iterator[str]:
    with dock.base_image(engine) as reference:
        yield reference


@pytest.fixture
def running(vendor: str) -> Iterator[str]:
    argv = ("docker", "run", "-d", "--network", "none", vendor, "sleep", "300")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    yield done.stdout.strip()
    argv = ("docker", "rm", "-f", done.stdout.strip())
    subprocess.run(argv, capture_output=True, timeout=60, check=True)


def order(folder: Path, base: str, *extras: Extra) -> Order:
    return Order(
        bundle=dock.bundle(folder), base=base, reference=FAULT, epoch=dock.EPOCH, extras=extras
    )


@pytest.mark.docker
def test_the_exit_code_of_a_child_is_read_after_its_stream(engine: Engine, running: str) -> None:
    assert engine.execute(running, ("sh", "-c", "echo x; exit 3")) == Ended(3, b"x\n", b"")


@pytest.mark.docker
def test_a_container_that_is_unknown_or_stopped_is_named_with_its_state(
    vendor: str, running: str, tmp_path: Path
) -> None:
    made = dock.bundle(tmp_path)
    subprocess.run(("docker", "pause", running), capture_output=True, timeout=30, check=True)

    with pytest.raises(Unreachable, match="there is no container not-there"):
        Container("not-there").deliver(made, Request(verb=Verb.VERIFY))
    with pytest.raises(Unreachable) as caught:
        Container(running).deliver(made, Request(verb=Verb.VERIFY))

    assert "its state is paused" in caught.value.why


@pytest.mark.docker
def test_a_container_without_the_interpreter_is_unfit(running: str, tmp_path: Path) -> None:
    made = dock.bundle(tmp_path, python="/opt/not/python3")

    for target in (Container(running), ImageTarget(dock.DEBIAN)):
        with pytest.raises(Unfit) as caught:
            target.deliver(made, Request(verb=Verb.VERIFY))
        assert "/opt/not/python3" in caught.value.what


@pytest.mark.docker
def test_an_image_cannot_be_deployed_to(tmp_path: Path) -> None:
    with pytest.raises(BadValues, match="will not deploy to image:"):
        ImageTarget(dock.DEBIAN).deliver(dock.bundle(tmp_path), Request(verb=Verb.DEPLOY))


@pytest.mark.docker
def test_a_slow_engine_is_asked_what_it_did_and_nothing_is_left(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    with (
        slow_socket(tmp_path, "/containers/create", 4) as slow,
        open_engine(slow, patience=1) as hasty,
        pytest.raises(Unreachable) as caught,
    ):
        build(hasty, order(tmp_path, vendor), Folders(tmp_path / "w", tmp_path / "c"))

    assert three_lines(caught.value)
    assert "asked again, it has done it" in caught.value.why
    assert _ours(engine) == []


@pytest.mark.docker
def test_a_load_that_outlasts_the_client_is_reported_with_the_engine_s_state(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    with (
        slow_socket(tmp_path, "/images/load", 4) as slow,
        open_engine(slow, patience=2) as hasty,
        pytest.raises(Unreachable) as caught,
    ):
        build(hasty, order(tmp_path, vendor), Folders(tmp_path / "w", tmp_path / "c"))
    engine.remove_image(str(FAULT))

    assert "asked again, it has done it" in caught.value.why
    assert not list((tmp_path / "w").glob(".layer*"))


def _ours(engine: Engine) -> list[str]:
    """Containers of this very process."""
    found = engine._client.containers(all=True, filters={"label": TEMPORARY})
    mine = f", {os.getpid()}, "
    return [one["Id"] for one in found if mine in one["Labels"][TEMPORARY]]


@pytest.mark.docker
@pytest.mark.slow
def test_a_full_disk_leaves_no_image(tmp_path: Path) -> None:
    tree = {k: v for k, v in dock.VENDOR.items() if not k.endswith("METADATA")}
    tree["vllm-0.18.1.dist-info/METADATA"] = b""
    big = tmp_path / "big"
    big.write_bytes(secrets.token_bytes(64 << 20))
    extra = Extra.file("/root/big", big, hashlib.sha256(big.read_bytes()).hexdigest())
    with (
        small_engine("48m") as small,
        open_engine(small) as engine,
        dock.base_image(engine, tree, on="") as base,
    ):
        with pytest.raises(Refused) as caught:
            build(engine, order(tmp_path, base, extra), Folders(tmp_path / "w", tmp_path / "c"))
        left = engine.inspect(str(FAULT))
        # What was written so far is gone again: the same engine takes a small image.
        build(engine, order(tmp_path, base), Folders(tmp_path / "w", tmp_path / "c"))

    assert caught.value.what == "the engine has no room for the image"
    assert three_lines(caught.value)
    assert left is None
    assert not list((tmp_path / "w").glob(".layer*"))


@pytest.mark.docker
def test_a_base_that_vanished_is_named(engine: Engine, tmp_path: Path) -> None:
    """The thin archive arrives at an engine that has no layer of its base."""
    base = Base(diff_ids=("sha256:" + "a" * 64,))
    from deploy.image.layer import write_layer

    path = tmp_path / "layer.tar"
    with path.open("wb") as out:
        layer = write_layer([Entry(path="x")], out, epoch=1)
    import dataclasses

    image = Image(
        reference=FAULT,
        base=base,
        layer=dataclasses.replace(layer, path=path),
        config=config_document(base, layer.diff_id, Added(note="n"), epoch=1),
    )

    with pytest.raises(Unfit) as caught:
        engine.load(stream(image), archive_size(image))

    assert "does not hold the base image" in caught.value.what
    assert engine.inspect(str(FAULT)) is None


_BUILD = """
import dataclasses, sys
from pathlib import Path
from deploy.carriers.assembly import Folders, Order, build
from deploy.carriers.engine import open_engine
from deploy.image.archive import Reference
from deploy.image.overlay import Extra
from tests.carriers.test_engine_faults import order
folder, base, big = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
with open_engine() as engine:
    extra = Extra.file("/root/big", big, "")
    wanted = dataclasses.replace(order(folder, base, extra), reference=Reference(sys.argv[4], "1"))
    build(engine, wanted, Folders(folder / "w", folder / "c"))
"""


def _building(folder: Path, vendor: str, big: Path) -> subprocess.Popen[bytes]:
    argv = (sys.executable, "-c", _BUILD, str(folder), vendor, str(big), FAULT.name)
    env = {**os.environ, "PYTHONPATH": str(TOP)}
    return subprocess.Popen(argv, env=env, cwd=TOP, stderr=subprocess.PIPE)


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.0, 0.4, 0.8])
def test_an_interrupt_leaves_no_container_image_or_file(
    engine: Engine, vendor: str, tmp_path: Path, delay: float
) -> None:
    big = tmp_path / "big"
    big.write_bytes(bytes(200 << 20))
    build_ = _building(tmp_path, vendor, big)
    _until(lambda: list((tmp_path / "w").glob(".layer*")) or build_.poll() is not None)
    time.sleep(delay)

    build_.send_signal(signal.SIGINT)
    _, said = build_.communicate(timeout=60)

    mark = f", {build_.pid}, "
    found = engine._client.containers(all=True, filters={"label": TEMPORARY})
    assert not [one for one in found if mark in one["Labels"][TEMPORARY]]
    assert not list((tmp_path / "w").glob(".*"))
    if build_.returncode == 0:  # it was faster; then the image is whole
        engine.remove_image(str(FAULT))
    else:
        assert b"KeyboardInterrupt" in said
    assert engine.inspect(str(FAULT)) is None


def _until(condition: object, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.docker
def test_gc_removes_what_a_killed_call_left_and_leaves_the_living_alone(
    engine: Engine, vendor: str
) -> None:
    code = (
        "import sys, time\nfrom deploy.carriers.engine import open_engine\n"
        "with open_engine() as e, e.still(sys.argv[1]) as still:\n"
        "    print(still._container, flush=True); time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": str(TOP)}
    argv = (sys.executable, "-c", code, vendor)
    dead = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True)
    assert dead.stdout is not None
    with dead.stdout as out:
        left = out.readline().strip()
        dead.kill()
        dead.wait()
    with engine.still(vendor) as mine:
        meant = imaging.gc()
        there = engine.inspect_container(left)
        rows = imaging.gc(yes=True)
        alive = engine.inspect_container(mine._container)

    assert there is not None
    assert {"kind": "container", "id": there["Id"], "kept": "", "removed": False} in meant
    assert engine.inspect_container(left) is None
    assert [row["kind"] for row in rows if row["kind"] == "container" and row["removed"]]
    assert alive is not None


@pytest.mark.docker
def test_gc_removes_images_that_a_later_build_took_the_name_of(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    folders = Folders(tmp_path / "w", tmp_path / "c")
    first = build(engine, order(tmp_path, vendor), folders)
    second = build(engine, order(tmp_path, vendor, Extra.held("/root/x", b"x")), folders)

    meant = imaging.gc()
    assert engine.inspect(first.id) is not None
    imaging.gc(yes=True)

    assert {"kind": "image", "id": first.id, "kept": "", "removed": False} in meant
    assert engine.inspect(first.id) is None
    assert engine.inspect(str(FAULT)) is not None
    assert (engine.inspect(str(FAULT)) or {})["Id"] == second.id
    engine.remove_image(str(FAULT))


@pytest.mark.docker
def test_an_interrupted_deploy_in_a_container_is_undone_or_finished(
    running: str, tmp_path: Path
) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.carriers import dock\n"
        "from deploy.agent.words import Verb\nfrom deploy.carriers import Request\n"
        "from deploy.carriers.container import Container\n"
        "made = dock.bundle(Path(sys.argv[2]))\nprint('go', flush=True)\n"
        "found = Container(sys.argv[1]).deliver(made, Request(verb=Verb.DEPLOY))\n"
        "print(found.outcome, int(found.exit), flush=True)"
    )
    env = {**os.environ, "PYTHONPATH": str(TOP)}
    argv = (sys.executable, "-c", code, running, str(tmp_path))
    call = subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert call.stdout is not None
    call.stdout.readline()
    time.sleep(0.25)

    call.send_signal(signal.SIGINT)
    out, _ = call.communicate(timeout=60)
    left = subprocess.run(
        ("docker", "exec", running, "sh", "-c", "ls -l /proc/*/exe 2>/dev/null | grep python"),
        capture_output=True,
        timeout=30,
        check=False,
    )
    again = Container(running).deliver(dock.bundle(tmp_path), Request(verb=Verb.DEPLOY))

    assert left.stdout == b""
    assert again.exit == 0, again.error
    assert out.split()[-1:] in (["0"], ["130"], []), out
