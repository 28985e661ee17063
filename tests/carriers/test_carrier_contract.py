"""One contract over the carriers: same bundle, same tree, same evidence but for the incidental."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.words import Verb
from deploy.bundle import Bundle
from deploy.carriers import Request
from deploy.carriers.assembly import Folders, Order, build
from deploy.carriers.container import Container, ImageTarget
from deploy.carriers.engine import Engine, open_engine
from deploy.carriers.local import Local, lay_root
from deploy.evidence import Evidence
from tests.carriers import dock

pytestmark = [pytest.mark.docker, pytest.mark.slow]

STORY = dock.own("contract")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine() as found:
        yield found


@pytest.fixture(scope="module")
def vendor(engine: Engine) -> Iterator[str]:
    with dock.base_image(engine) as reference:
        yield reference


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return dock.bundle(tmp_path_factory.mktemp("bundle"))


@pytest.fixture
def running(vendor: str) -> Iterator[str]:
    argv = ("docker", "run", "-d", "--network", "none", vendor, "sleep", "300")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    yield done.stdout.strip()
    argv = ("docker", "rm", "-f", done.stdout.strip())
    subprocess.run(argv, capture_output=True, timeout=60, check=True)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The vendor's tree as a folder of this machine, with a stand-in interpreter."""

    def fill(site: Path) -> None:
        for path, data in dock.VENDOR.items():
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_bytes(data)

    lay_root(
        tmp_path / "root",
        python=dock.PYTHON,
        site=dock.SITE,
        fill=fill,
        launch_dir="/root/submission",
    )
    return tmp_path / "root"


def shown(evidence: Evidence) -> dict[str, Any]:
    """The part in which equal targets are equal."""
    return {k: v for k, v in evidence.raw.items() if k != "incidental"}


def test_a_check_says_the_same_of_an_image_and_its_container(
    made: Bundle, vendor: str, running: str
) -> None:
    request = Request(verb=Verb.CHECK)

    image, container = (
        target.deliver(made, request) for target in (ImageTarget(vendor), Container(running))
    )

    assert shown(image) == shown(container)
    assert image.outcome == "would change"


def test_a_built_image_and_its_container_verify_alike(
    engine: Engine, made: Bundle, vendor: str, tmp_path: Path
) -> None:
    order = Order(bundle=made, base=vendor, reference=STORY, epoch=dock.EPOCH)
    build(engine, order, Folders(tmp_path / "w", tmp_path / "c"))
    argv = ("docker", "run", "-d", "--network", "none", str(STORY), "sleep", "300")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    container = done.stdout.strip()
    try:
        request = Request(verb=Verb.VERIFY, recompile=True)
        inside = Container(container).deliver(made, request)
        image = ImageTarget(str(STORY)).deliver(made, request)
    finally:
        subprocess.run(
            ("docker", "rm", "-f", container), capture_output=True, timeout=60, check=True
        )
        engine.remove_image(str(STORY))

    assert inside.exit == 0, inside.error
    assert shown(inside) == shown(image)


def test_a_deploy_reaches_the_same_tree_in_a_folder_and_in_a_container(
    made: Bundle, running: str, root: Path
) -> None:
    targets = (Local(root), Container(running))
    deployed = [target.deliver(made, Request(verb=Verb.DEPLOY)) for target in targets]
    verified = [target.deliver(made, Request(verb=Verb.VERIFY)) for target in targets]
    again = [target.deliver(made, Request(verb=Verb.DEPLOY)) for target in targets]

    for one in (*deployed, *verified, *again):
        assert one.exit == 0, one.error
    assert {one.tree for one in verified} == {made.plan.tree}
    assert {one.outcome for one in again} == {"nothing to do"}
    own = ("plan", "payload", "inputs", "tree", "agent", "verb", "met", "outcome", "error")
    first, second = ({key: one.raw[key] for key in own} for one in verified)
    assert first == second
    assert [row["state"] for row in verified[0].files] == [
        row["state"] for row in verified[1].files
    ]


def test_a_restore_brings_the_vendor_s_bytes_back_into_a_container(
    engine: Engine, made: Bundle, running: str
) -> None:
    target = Container(running)
    target.deliver(made, Request(verb=Verb.DEPLOY))

    restored = target.deliver(made, Request(verb=Verb.RESTORE))

    assert restored.exit == 0, restored.error
    found = engine.execute(
        running, ("cat", f"{dock.SITE}/vllm/envs.py", f"{dock.SITE}/vllm/old.py")
    )
    assert found.out == dock.VENDOR["vllm/envs.py"] + dock.VENDOR["vllm/old.py"]
    assert target.deliver(made, Request(verb=Verb.CHECK)).outcome == "would change"


def test_a_byte_changed_in_a_container_is_named(engine: Engine, made: Bundle, running: str) -> None:
    target = Container(running)
    target.deliver(made, Request(verb=Verb.DEPLOY))
    engine.execute(running, ("sed", "-i", "s/1/2/", f"{dock.SITE}/vllm/envs.py"))

    verified = target.deliver(made, Request(verb=Verb.VERIFY))

    assert verified.exit == 10
    assert [row["path"] for row in verified.faults] == ["vllm/envs.py"]


def test_a_read_only_container_can_be_verified(made: Bundle, vendor: str) -> None:
    argv = ("docker", "run", "-d", "--read-only", "--network", "none", vendor, "sleep", "300")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    container = done.stdout.strip()
    try:
        seen = Container(container).deliver(made, Request(verb=Verb.VERIFY))
        refused = Container(container).deliver(made, Request(verb=Verb.DEPLOY))
    finally:
        subprocess.run(
            ("docker", "rm", "-f", container), capture_output=True, timeout=60, check=True
        )

    assert seen.outcome == "differs"
    assert refused.exit == 3, refused.error
