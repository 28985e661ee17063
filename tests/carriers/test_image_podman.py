"""podman and buildah: they take the same archive, show the same id, and build the Dockerfile."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import scripts
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.assembly import Folders, Order, build, handed_in
from deploy.carriers.container import Container, ImageTarget
from deploy.carriers.engine import Engine, Store, open_engine
from deploy.image.config import Base
from tests.carriers import dock
from tests.carriers.newer_engine import ROOT
from tests.carriers.pods import Pods, pods

pytestmark = [pytest.mark.docker, pytest.mark.slow]

IMAGE = dock.own("pods")


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    with pods(tmp_path_factory.mktemp("pods") / "p") as found:
        found.run("podman", "import", "-q", str(ROOT.with_name("base-1.tar")), dock.DEBIAN)
        yield found


@pytest.fixture
def engine(podman: Pods, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setenv("DOCKER_HOST", podman.url)
    with open_engine() as found:
        yield found


@pytest.fixture
def vendor(engine: Engine) -> Iterator[str]:
    with dock.base_image(engine, config={"Entrypoint": ["/init"]}) as reference:
        yield reference


def order(folder: Path, base: str) -> Order:
    manifest = dock.manifest(base)
    made = dock.bundle(folder, meaning=manifest.meaning())
    extras = handed_in(made, scripts.on_target(manifest))
    return Order(bundle=made, base=base, reference=IMAGE, epoch=dock.EPOCH, extras=extras)


def test_podman_shows_the_predicted_id_and_the_image_verifies_inside(
    podman: Pods, engine: Engine, vendor: str, tmp_path: Path
) -> None:
    wanted = order(tmp_path, vendor)

    built = build(engine, wanted, Folders(tmp_path / "w", tmp_path / "c"))
    verified = ImageTarget(str(IMAGE)).deliver(wanted.bundle, Request(verb=Verb.VERIFY))
    engine.remove_image(str(IMAGE))

    assert engine.store is Store.CLASSIC
    assert built.id == built.config
    assert verified.exit == 0, verified.error
    assert podman.run("podman", "ps", "-aq") == ""


def test_podman_loads_a_thin_archive_by_hand(
    podman: Pods, engine: Engine, vendor: str, tmp_path: Path
) -> None:
    archive = tmp_path / "thin.tar"
    wanted = order(tmp_path, vendor)
    built = build(engine, wanted, Folders(tmp_path / "w", tmp_path / "c"), output=archive)
    engine.remove_image(str(IMAGE))

    podman.run("buildah", "pull", "--quiet", f"oci-archive:{archive}")

    assert built.id.removeprefix("sha256:") in podman.run("podman", "images", "-q", "--no-trunc")
    engine.remove_image(built.id)


def test_buildah_builds_the_rendered_dockerfile_to_the_same_tree_and_run_config(
    podman: Pods, engine: Engine, vendor: str, tmp_path: Path
) -> None:
    wanted = order(tmp_path, vendor)
    build(engine, wanted, Folders(tmp_path / "w", tmp_path / "c"))
    context = tmp_path / "context"
    context.mkdir()
    for one in scripts.files(dock.manifest(vendor)):
        (context / one.name).write_bytes(one.data)
    (context / "bundle.pyz").write_bytes(wanted.bundle.path.read_bytes())

    other = f"{IMAGE.name}:2"
    podman.run("buildah", "bud", "--network", "none", "-t", other, str(context))

    request = Request(verb=Verb.VERIFY, recompile=True)
    trees = [ImageTarget(str(name)).deliver(wanted.bundle, request) for name in (IMAGE, other)]
    found = [Base.from_inspect(engine.inspect(str(name)) or {}) for name in (IMAGE, other)]
    for name in (IMAGE, other):
        engine.remove_image(str(name))
    assert [one.exit for one in trees] == [0, 0], [one.error for one in trees]
    assert trees[0].tree == trees[1].tree == wanted.bundle.plan.tree
    assert found[0].run_config == found[1].run_config


def test_a_container_of_podman_is_deployed_to(
    podman: Pods, engine: Engine, vendor: str, tmp_path: Path
) -> None:
    run = ("podman", "run", "-d", "--network", "none", "--entrypoint", json.dumps(["sleep", "300"]))
    container = podman.run(*run, vendor)
    made = order(tmp_path, vendor).bundle
    try:
        deployed = Container(container).deliver(made, Request(verb=Verb.DEPLOY))
        verified = Container(container).deliver(made, Request(verb=Verb.VERIFY))
    finally:
        podman.run("podman", "rm", "-f", "-t", "0", container)

    assert deployed.exit == 0, deployed.error
    assert verified.exit == 0, verified.error
