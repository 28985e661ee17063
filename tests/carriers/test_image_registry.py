"""A base image from a registry: pinned and pulled by digest, moved tags noticed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import flow, imaging
from deploy.carriers.engine import Engine, open_engine
from deploy.errors import StaleLock, Unfit, Unreachable
from deploy.layout import Layout
from tests.carriers import dock
from tests.carriers.small_registry import small_registry
from tests.carriers.test_image_story import story

pytestmark = [pytest.mark.docker, pytest.mark.slow]

IMAGE = str(dock.own("pulled"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine() as found:
        yield found


@pytest.fixture
def vendor(engine: Engine, tmp_path: Path) -> Iterator[str]:
    """A vendor's image by its name in a registry; the engine has pulled it."""
    with (
        small_registry(tmp_path / "registry") as host,
        dock.base_image(engine, _SMALL, on="") as base,
    ):
        name = f"{host}/vendor:1"
        engine.tag(base, f"{host}/vendor", "1")
        _docker("push", name)
        yield name
        engine.remove_image(name)


# Without a Python, so that little has to be pushed and pulled.
_SMALL = {**dock.VENDOR, "vllm-0.18.1.dist-info/METADATA": b""}


def _docker(*words: str) -> str:
    argv = ("docker", *words)
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def locked(folder: Path, vendor: str) -> tuple[Layout, str]:
    """A checkout on the vendor's image, locked, and the digest that the lock has."""
    layout = story(folder / "top", vendor)
    return layout, flow.lock("story", layout)[0].expect["base_image"]["digest"]


def _forget(engine: Engine, vendor: str, digest: str) -> None:
    name = vendor.rpartition(":")[0]
    for reference in (vendor, f"{name}@{digest}"):
        engine.remove_image(reference)


def test_the_lock_has_the_registry_s_digest(vendor: str, tmp_path: Path) -> None:
    _, digest = locked(tmp_path, vendor)

    shown = _docker("image", "inspect", "--format", "{{index .RepoDigests 0}}", vendor)
    assert shown.endswith("@" + digest)


def test_a_missing_base_is_pulled_by_its_locked_digest_when_asked(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    layout, digest = locked(tmp_path, vendor)
    _forget(engine, vendor, digest)

    with pytest.raises(Unfit):
        imaging.build_image("story", layout, tag=IMAGE)
    built = imaging.build_image("story", layout, tag=IMAGE, pull=True)
    engine.remove_image(IMAGE)

    name = vendor.rpartition(":")[0]
    pulled = engine.inspect(f"{name}@{digest}")
    assert pulled is not None
    assert pulled["RootFS"]["Layers"] == list(built.base)
    engine.remove_image(f"{name}@{digest}")


def test_a_tag_that_moved_in_the_registry_does_not_matter_to_a_pull_by_digest(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    layout, digest = locked(tmp_path, vendor)
    name, _, tag = vendor.rpartition(":")
    with dock.base_image(engine, {**_SMALL, "vllm/envs.py": b"X = 9\n"}, on="") as other:
        engine.tag(other, name, tag)
        _docker("push", vendor)

        # (a) the tag is here, and leads to another image: refused, both named
        _forget_digest(engine, name, digest)
        with pytest.raises(StaleLock) as caught:
            imaging.build_image("story", layout, tag=IMAGE)
        # and with leave to pull, the locked one is taken whatever the tag says
        built = imaging.build_image("story", layout, tag=IMAGE, pull=True)
        engine.remove_image(IMAGE)
        engine.remove_image(f"{name}@{digest}")

    assert "layer 1 is sha256:" in caught.value.why
    assert f"the lock pins {digest}" in caught.value.why
    assert "the lock pins sha256:" in caught.value.why
    assert built.reference == IMAGE


def _forget_digest(engine: Engine, name: str, digest: str) -> None:
    engine.remove_image(f"{name}@{digest}")


def test_a_digest_in_the_manifest_is_a_part_of_the_inputs_and_is_what_is_pulled(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    _, digest = locked(tmp_path / "by tag", vendor)
    layout = story(tmp_path / "by digest" / "top", f"{vendor}@{digest}")
    pinned = flow.lock("story", layout)[0]
    _forget(engine, vendor, digest)

    built = imaging.build_image("story", layout, tag=IMAGE, pull=True)
    engine.remove_image(IMAGE)

    engine.remove_image(f"{vendor.rpartition(':')[0]}@{digest}")
    assert pinned.inputs["manifest"]["base"]["image"] == f"{vendor}@{digest}"
    assert pinned.expect["base_image"]["digest"] == digest
    assert pinned.expect["base_image"]["diff_ids"] == list(built.base)


def test_a_digest_that_the_registry_does_not_have_is_unreachable(
    engine: Engine, vendor: str
) -> None:
    name = vendor.rpartition(":")[0]

    with pytest.raises(Unreachable) as caught:
        engine.pull(f"{name}@sha256:{'0' * 64}")

    assert len(str(caught.value).splitlines()) == 3
