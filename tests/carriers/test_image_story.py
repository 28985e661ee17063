"""From a manifest to an image, by the flow: locked ids, archives without an engine, a real base."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import flow, imaging
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.engine import Engine, open_engine
from deploy.errors import BadValues, BundleError, Differs, StaleLock, Unfit
from deploy.layout import HERE, Layout
from deploy.lock import Lock, read_lock, write_lock
from tests.carriers import dock
from tests.carriers.small_engine import small_engine

IMAGE = str(dock.own("flow"))


def checkout(top: Path) -> Layout:
    layout = Layout(top)
    (top / "manifests").mkdir(parents=True)
    shutil.copy(HERE.manifest("tiny"), layout.manifest("tiny"))
    shutil.copytree(HERE.series("tiny"), layout.series("tiny"))
    return layout


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DOCKER_HOST leads nowhere."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nowhere.sock")


@pytest.mark.usefixtures("no_engine")
def test_two_checkouts_lock_the_same_image_without_an_engine(tmp_path: Path) -> None:
    locked = [flow.lock("tiny", checkout(tmp_path / name))[0] for name in ("a", "b ö")]

    images = [one.expect["image"] for one in locked]
    assert images[0] == images[1]
    assert set(images[0]) == {"layer", "config", "manifest", "content", "run_config"}
    assert all(images[0].values())


@pytest.mark.usefixtures("no_engine")
def test_a_whole_archive_is_written_without_an_engine(tmp_path: Path) -> None:
    layout = checkout(tmp_path / "top")
    want = flow.lock("tiny", layout)[0].expect["image"]

    built = imaging.build_image("tiny", layout, output=f"oci:{tmp_path}/tiny.tar")

    assert built.expect == want
    with tarfile.open(tmp_path / "tiny.tar") as tar:
        names = set(tar.getnames())
        index = json.load(tar.extractfile("index.json") or open(os.devnull))  # noqa: SIM115
    assert index["manifests"][0]["digest"] == want["manifest"]
    for digest in (want["layer"], want["config"], want["manifest"], *built.base):
        assert "blobs/sha256/" + digest.removeprefix("sha256:") in names
    assert not list(layout.out_of("tiny").glob("image/.*"))


@pytest.mark.usefixtures("no_engine")
def test_without_an_engine_an_image_cannot_be_loaded(tmp_path: Path) -> None:
    layout = checkout(tmp_path / "top")
    flow.lock("tiny", layout)

    with pytest.raises(BundleError) as caught:
        imaging.build_image("tiny", layout)

    assert caught.value.exit == 5


@pytest.mark.usefixtures("no_engine")
@pytest.mark.parametrize("rung", ["layer", "config", "manifest", "content", "run_config"])
def test_every_rung_that_differs_from_the_lock_is_named(tmp_path: Path, rung: str) -> None:
    layout = checkout(tmp_path / "top")
    pinned = flow.lock("tiny", layout)[0]
    _spoil(layout, pinned, rung)

    with pytest.raises(Differs) as caught:
        imaging.build_image("tiny", layout, output=f"oci:{tmp_path}/tiny.tar")

    assert caught.value.what.endswith(f": {rung}")
    assert not (tmp_path / "tiny.tar").exists()


def _spoil(layout: Layout, pinned: Lock, rung: str) -> None:
    image = {**pinned.expect["image"], rung: "sha256:" + "0" * 64}
    write_lock(layout.lock("tiny"), Lock(pinned.inputs, {**pinned.expect, "image": image}))


@pytest.mark.usefixtures("no_engine")
def test_a_kind_of_archive_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    layout = checkout(tmp_path / "top")
    flow.lock("tiny", layout)

    with pytest.raises(BadValues, match="cannot write to zip:x"):
        imaging.build_image("tiny", layout, output="zip:x")


@pytest.mark.usefixtures("no_engine")
def test_render_writes_what_a_person_runs_beside_the_bundle(tmp_path: Path) -> None:
    layout = checkout(tmp_path / "top")
    flow.lock("tiny", layout)

    paths = imaging.render("tiny", layout)
    times = [path.stat().st_mtime_ns for path in paths[:-1]]
    again = imaging.render("tiny", layout)

    assert {path.name for path in paths} == {
        "ENVIRONMENT.md",
        "start_vllm.sh",
        "stop_vllm.sh",
        "verify.sh",
        "bundle.pyz",
    }
    assert [path.stat().st_mtime_ns for path in again[:-1]] == times  # what is right stays


# --- on a real engine -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine() as found:
        yield found


@pytest.mark.docker
@pytest.mark.slow
def test_a_built_image_has_the_locked_ids_and_is_reproduced(engine: Engine, tmp_path: Path) -> None:
    layout = checkout(tmp_path / "top")
    want = flow.lock("tiny", layout)[0].expect
    try:
        built = imaging.build_image("tiny", layout, tag=IMAGE)
        again = imaging.build_image("tiny", layout, tag=IMAGE)
        reproduced, links = imaging.reproduce("tiny", layout, tag=IMAGE)
        removed = [row["id"] for row in imaging.gc(yes=True)]
        kept = engine.inspect(IMAGE)
    finally:
        engine.remove_image(IMAGE)

    assert built.expect == want["image"]
    assert built.id == want["image"]["config"]
    assert again.unchanged
    assert reproduced == built
    assert kept is not None
    assert kept["Id"] not in removed
    assert removed  # the base, which was made here
    assert links[-1] == {"link": "tree inside", "locked": want["tree"], "found": want["tree"]}


@pytest.mark.docker
def test_an_image_other_than_the_locked_one_is_not_loaded(engine: Engine, tmp_path: Path) -> None:
    layout = checkout(tmp_path / "top")
    _spoil(layout, flow.lock("tiny", layout)[0], "layer")

    with pytest.raises(Differs):
        imaging.build_image("tiny", layout, tag=IMAGE)

    assert engine.inspect(IMAGE) is None


_STORY = """\
schema: 1
name: story
base:
  image: {image}
  python: {python}
  site: {site}
  requires: {{vllm: 0.18.1}}
source: {{git: repo, base: {base}, head: {head}, package: vllm}}
overlay: {{include: ["vllm/**"]}}
launch: {{dir: /root/submission, port: 8001, container: {{shm_size: 1M}}}}
"""


def story(top: Path, image: str, edits: dict[str, bytes | None] = dock.EDITS) -> Layout:
    """A checkout whose submission is a repository, to stand on `image`."""
    repo = top / "repo"
    repo.mkdir(parents=True)
    _git(repo, "init", "-q")
    sources = {k: v for k, v in dock.VENDOR.items() if ".dist-info" not in k and ".pyc" not in k}
    base = _commit(repo, sources)
    head = _commit(repo, edits)
    (top / "manifests").mkdir()
    values = {"image": image, "python": dock.PYTHON, "site": dock.SITE, "base": base, "head": head}
    (top / "manifests/story.yaml").write_text(_STORY.format(**values))
    return Layout(top)


def _git(repo: Path, *words: str) -> str:
    argv = ("git", "-C", str(repo), "-c", "user.name=t", "-c", "user.email=t@example.invalid")
    done = subprocess.run((*argv, *words), capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def _commit(repo: Path, files: dict[str, bytes] | dict[str, bytes | None]) -> str:
    for name, data in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        if data is None:
            (repo / name).unlink()
        else:
            (repo / name).write_bytes(data)
    _git(repo, "add", "-A")
    _git(repo, "commit", "-q", "-m", "a change")
    return _git(repo, "rev-parse", "HEAD")


@pytest.fixture
def vendor(engine: Engine) -> Iterator[str]:
    with dock.base_image(engine) as reference:
        yield reference


@pytest.mark.docker
@pytest.mark.slow
def test_a_submission_stands_on_the_base_image_that_the_lock_pins(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    layout = story(tmp_path, vendor)
    pinned = flow.lock("story", layout)[0]
    try:
        built = imaging.build_image("story", layout, tag=IMAGE)
        [visit] = flow.run("story", f"image:{IMAGE}", Request(verb=Verb.VERIFY), layout)
        reproduced, links = imaging.reproduce("story", layout, tag=IMAGE)
        engine.remove_image(IMAGE)
    finally:
        engine.remove_image(IMAGE)

    assert pinned.expect["base_image"]["diff_ids"] == list(built.base)
    assert pinned.expect["image"] == built.expect
    assert visit.exit == 0, visit
    assert reproduced == built
    assert {"image layer", "image config", "image content"} <= {row["link"] for row in links}


@pytest.mark.docker
@pytest.mark.slow
def test_a_file_that_became_a_folder_is_gone_from_the_tree_inside(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    turned = {"vllm/configs/a.json": None, "vllm/configs/a.json/part.json": b"{}\n"}
    layout = story(tmp_path, vendor, turned)
    flow.lock("story", layout)
    try:
        imaging.build_image("story", layout, tag=IMAGE)
        _, links = imaging.reproduce("story", layout, tag=IMAGE)
    finally:
        engine.remove_image(IMAGE)

    assert links[-1]["link"] == "tree inside"
    assert links[-1]["locked"] == links[-1]["found"]


@pytest.mark.docker
@pytest.mark.slow
def test_a_lock_made_where_no_engine_answers_keeps_the_pin_of_the_one_before(
    vendor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = story(tmp_path, vendor)
    before = flow.lock("story", layout)[0].expect

    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    again = flow.lock("story", layout)[0].expect
    assert (again["base_image"], again["image"]) == (before["base_image"], before["image"])
    manifest = layout.manifest("story")
    manifest.write_text(manifest.read_text().replace(vendor, "dcu-test/another:1"))
    assert "base_image" not in flow.lock("story", layout)[0].expect


@pytest.mark.docker
def test_a_name_that_no_image_can_have_is_a_fault_of_the_manifest(tmp_path: Path) -> None:
    layout = story(tmp_path, "REGISTRY/dcu/vllm:0.18.1")

    with pytest.raises(BadValues, match=r"REGISTRY/dcu/vllm:0\.18\.1 is no name of an image"):
        flow.lock("story", layout)


@pytest.mark.docker
@pytest.mark.slow
def test_the_dockerfile_of_a_submission_is_built_by_one_flag(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    layout = story(tmp_path, vendor)
    flow.lock("story", layout)
    try:
        built = imaging.build_dockerfile("story", layout, tag=IMAGE)
        [visit] = flow.run("story", f"image:{IMAGE}", Request(verb=Verb.VERIFY), layout)
    finally:
        engine.remove_image(IMAGE)

    assert visit.exit == 0, visit
    assert len(built.base) == 3  # the base's two, and what was copied


@pytest.mark.docker
def test_a_tag_that_moved_since_the_lock_is_refused(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    layout = story(tmp_path, vendor)
    flow.lock("story", layout)
    name, _, tag = vendor.partition(":")
    kept = (engine.inspect(vendor) or {})["Id"]
    engine.tag(dock.DEBIAN, name, tag)
    try:
        with pytest.raises(StaleLock) as caught:
            imaging.build_image("story", layout, tag=IMAGE)
    finally:
        engine.tag(kept, name, tag)

    assert "is not the base image that was locked" in caught.value.what
    assert engine.inspect(IMAGE) is None


@pytest.mark.docker
def test_a_base_that_was_not_there_at_the_lock_is_not_reproducible(
    vendor: str, tmp_path: Path
) -> None:
    layout = story(tmp_path, "dcu-test/nowhere:1")
    assert "base_image" not in flow.lock("story", layout)[0].expect

    with pytest.raises(BadValues) as caught:
        imaging.build_image("story", layout, tag=IMAGE)

    assert "a tag without digest" in caught.value.what


@pytest.mark.docker
def test_a_base_that_is_gone_since_the_lock_is_named(engine: Engine, tmp_path: Path) -> None:
    with dock.base_image(engine) as base:
        layout = story(tmp_path, base)
        flow.lock("story", layout)

    with pytest.raises(Unfit) as caught:
        imaging.build_image("story", layout, tag=IMAGE)

    assert base in caught.value.what


@pytest.mark.docker
@pytest.mark.slow
def test_an_archive_with_its_base_loads_into_an_engine_that_holds_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    tree = {**dock.VENDOR, "vllm-0.18.1.dist-info/METADATA": b""}
    archive = tmp_path / "whole.tar"
    with dock.base_image(engine, tree, on="") as base:
        layout = story(tmp_path / "top", base)
        flow.lock("story", layout)
        built = imaging.build_image("story", layout, tag=IMAGE, output=f"oci:{archive}")
        loaded = engine.inspect(IMAGE)
    with small_engine("64m") as url, open_engine(url) as other:
        data = archive.read_bytes()
        other.load(iter([data]), len(data))
        found = other.inspect(IMAGE) or {}

    assert loaded is None
    assert found["Id"] == built.config
    assert found["RootFS"]["Layers"] == [*built.base, built.layer]


def test_the_lock_of_the_demo_pins_its_image() -> None:
    image = read_lock(HERE.lock("demo")).expect.get("image") or {}

    assert set(image) == {"layer", "config", "manifest", "content", "run_config"}
