"""On an engine that keeps images in containerd: the same bytes; the id is the manifest's."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import flow, imaging
from deploy.agent.words import Verb
from deploy.bundle import file_sha256
from deploy.carriers import Request
from deploy.carriers.assembly import Folders, Order, build
from deploy.carriers.container import ImageTarget
from deploy.carriers.engine import Engine, Store, open_engine
from deploy.image.archive import Image, Reference, archive_size, descriptors, stream
from deploy.image.config import Added, Base, config_document
from deploy.image.layer import Layer
from tests.carriers import dock
from tests.carriers.newer_engine import ROOT, newer_engine
from tests.carriers.test_image_story import checkout, story

pytestmark = [pytest.mark.docker, pytest.mark.slow]

IMAGE = dock.own("containerd")
VENDOR = "registry.example/vendor:1"


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with newer_engine(tmp_path_factory.mktemp("newer") / "engine") as url:
        with open_engine(url) as engine:
            load_debian(engine)
        yield url


@pytest.fixture(autouse=True)
def spoken_to(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", where)


@pytest.fixture(scope="module")
def engine(where: str) -> Iterator[Engine]:
    with open_engine(where) as found:
        yield found


@pytest.fixture(scope="module")
def vendor(where: str) -> str:
    """A vendor's image whose own layer the engine keeps compressed, as what is pulled is kept."""
    tree = io.BytesIO()
    with tarfile.open(fileobj=tree, mode="w") as tar:
        for path, data in dock.VENDOR.items():
            info = tarfile.TarInfo(f"{dock.SITE.lstrip('/')}/{path}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        folder = tarfile.TarInfo("root/submission")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(folder)
    box = docker(where, "create", dock.DEBIAN, "-")
    docker(where, "cp", "-", f"{box}:/", stdin=tree.getvalue())
    docker(where, "commit", box, VENDOR)
    docker(where, "rm", box)
    return VENDOR


def load_debian(engine: Engine) -> None:
    """What the classic engine has imported, without its slow save."""
    tree = ROOT.with_name("base-1.tar")
    digest = "sha256:" + file_sha256(tree)
    layer = Layer(diff_id=digest, size=tree.stat().st_size, entries=0, path=tree)
    nothing = Base(diff_ids=())
    config = config_document(nothing, digest, Added(note="Debian"), epoch=dock.EPOCH)
    reference = Reference.parse(dock.DEBIAN)
    image = Image(reference=reference, base=nothing, layer=layer, config=config)
    engine.load(stream(image), archive_size(image))


def docker(url: str, *words: str, stdin: bytes = b"") -> str:
    argv = ("docker", "-H", url, *words)
    env = {**os.environ, "DOCKER_BUILDKIT": "0"}
    done = subprocess.run(argv, input=stdin, capture_output=True, timeout=240, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode().strip()


def saved_names(engine: Engine, image: str) -> tuple[set[str], list[str]]:
    """What is in a saved image, and the blobs that its manifest names."""
    names, blobs = set(), {}
    with engine.saving(image) as saved, tarfile.open(fileobj=saved, mode="r|") as tar:
        for member in tar:
            names.add(member.name)
            if member.isreg() and member.size < 100_000:
                blobs[member.name] = (tar.extractfile(member) or io.BytesIO()).read()
    [top] = json.loads(blobs["index.json"])["manifests"]
    manifest = json.loads(blobs[_blob(top["digest"])])
    return names, [_blob(row["digest"]) for row in (manifest["config"], *manifest["layers"])]


def _blob(digest: str) -> str:
    return "blobs/sha256/" + digest.removeprefix("sha256:")


def test_an_image_on_a_named_base_has_the_predicted_manifest_and_dangles_nowhere(
    where: str, engine: Engine, vendor: str, tmp_path: Path
) -> None:
    made = dock.bundle(tmp_path)
    order = Order(bundle=made, base=vendor, reference=IMAGE, epoch=dock.EPOCH)
    read: list[int] = []

    built = build(
        engine,
        order,
        Folders(tmp_path / "w", tmp_path / "c"),
        looking=lambda done, _: read.append(done),
    )
    asked = len(read)
    again = build(engine, order, Folders(tmp_path / "w2", tmp_path / "c"))
    verified = ImageTarget(str(IMAGE)).deliver(made, Request(verb=Verb.VERIFY))

    assert engine.store is Store.CONTAINERD
    assert built.id == built.manifest == again.id
    assert asked > 0  # what the base is kept in was learned once,
    assert len(read) == asked  # and then known
    assert verified.exit == 0, verified.error
    names, wanted = saved_names(engine, str(IMAGE))
    assert len(wanted) == 1 + len(built.base) + 1
    assert set(wanted) <= names
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(f"FROM {IMAGE}\nRUN test -e {dock.SITE}/vllm/envs.py\n")
    docker(where, "build", "--network", "none", "-t", f"{IMAGE.name}:2", str(context))


def test_both_kinds_of_store_hold_the_same_layer(
    engine: Engine, vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dock.bundle(tmp_path)
    order = Order(bundle=made, base=vendor, reference=IMAGE, epoch=dock.EPOCH)
    here = build(engine, order, Folders(tmp_path / "w", tmp_path / "c"))

    monkeypatch.delenv("DOCKER_HOST")
    with open_engine() as old, dock.base_image(old) as base:
        order = Order(bundle=made, base=base, reference=IMAGE, epoch=dock.EPOCH)
        there = build(old, order, Folders(tmp_path / "w2", tmp_path / "c2"))
        old.remove_image(str(IMAGE))

    assert here.layer == there.layer


def test_the_lock_s_base_is_pinned_built_upon_and_reproduced(vendor: str, tmp_path: Path) -> None:
    layout = story(tmp_path, vendor)
    pinned = flow.lock("story", layout)[0]

    built = imaging.build_image("story", layout, tag=str(IMAGE))
    again = imaging.build_image("story", layout, tag=str(IMAGE))
    reproduced, links = imaging.reproduce("story", layout, tag=str(IMAGE))

    assert pinned.expect["base_image"]["diff_ids"] == list(built.base)
    assert built.id == built.manifest
    assert again.unchanged
    assert reproduced == built
    assert {row["link"] for row in links} >= {"image id", "tree inside"}


def test_a_wheel_s_image_has_the_locked_manifest_as_its_id(tmp_path: Path) -> None:
    layout = checkout(tmp_path / "top")
    want = flow.lock("tiny", layout)[0].expect["image"]

    built = imaging.build_image("tiny", layout, tag=str(IMAGE))

    assert built.id == want["manifest"]


def test_a_saved_image_of_another_base_tells_nothing(engine: Engine, vendor: str) -> None:
    base = Base.from_inspect(engine.inspect(vendor) or {})

    with engine.saving(vendor) as saved:
        found = descriptors(saved, base.diff_ids)
    with engine.saving(vendor) as saved:
        other = descriptors(saved, (*base.diff_ids, base.diff_ids[0]))

    assert [one.digest in base.diff_ids for one in found] == [True, False]
    assert ".tar" in found[0].media_type
    assert found[1].media_type.endswith("gzip")
    assert other == ()
