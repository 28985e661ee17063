"""Images built on a real engine: predicted ids, the same bytes anywhere, clean refusals."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.assembly import Built, Folders, Order, build
from deploy.carriers.container import ImageTarget
from deploy.carriers.engine import Engine, Store, open_engine
from deploy.errors import BundleError, Differs, Refused, StaleLock, Unfit
from deploy.image.base import Pin
from deploy.image.config import Base
from deploy.image.layer import Entry, Kind, read_back
from deploy.image.overlay import Extra
from tests.carriers import dock

pytestmark = [pytest.mark.docker, pytest.mark.slow]

TOP = Path(__file__).resolve().parents[2]
STORY = dock.own("story")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine() as found:
        yield found


@pytest.fixture(scope="module")
def vendor(engine: Engine) -> Iterator[str]:
    with dock.base_image(engine) as reference:
        yield reference


@pytest.fixture
def clean(engine: Engine) -> Iterator[None]:
    """Nothing of a build may be left but its image, which goes here."""
    before = _mine(engine)
    yield
    assert _mine(engine) == before
    engine.remove_image(str(STORY))


def _mine(engine: Engine) -> list[str]:
    return sorted(
        one["Id"]
        for one in engine._client.containers(
            all=True, filters={"name": f"dcu-bundle-{os.getpid()}-"}
        )
    )


def order(folder: Path, base: str, **options: Any) -> Order:
    values: dict[str, Any] = {
        "bundle": options.pop("bundle", None) or dock.bundle(folder),
        "base": base,
        "reference": STORY,
        "epoch": dock.EPOCH,
    }
    return Order(**{**values, **options})


def folders(folder: Path) -> Folders:
    return Folders(work=folder / "work", cache=folder / "cache")


def inside(engine: Engine, image: str, code: str) -> Any:
    """Run Python in a container of the image and return what it prints as JSON."""
    ended = engine.run(image, (dock.PYTHON, "-S", "-c", code, dock.SITE))
    assert ended.code == 0, ended.err
    return json.loads(ended.out)


_LIST = """
import hashlib, json, os, sys
found = {}
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        path = os.path.join(folder, name)
        with open(path, "rb") as file:
            found[os.path.relpath(path, sys.argv[1])] = hashlib.sha256(file.read()).hexdigest()
print(json.dumps(found))
"""


@pytest.mark.usefixtures("clean")
def test_an_image_holds_the_plan_and_verifies_inside(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    wanted = order(tmp_path, vendor)

    built = build(engine, wanted, folders(tmp_path))
    evidence = ImageTarget(str(STORY)).deliver(wanted.bundle, Request(verb=Verb.VERIFY))

    assert evidence.exit == 0, evidence.error
    assert evidence.tree == wanted.bundle.plan.tree
    assert built.id in (built.config, built.manifest)
    found = engine.inspect(str(STORY))
    assert found is not None
    assert found["RootFS"]["Layers"] == [*built.base, built.layer]


@pytest.mark.usefixtures("clean")
def test_stale_bytecode_goes_and_untouched_bytecode_stays(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    build(engine, order(tmp_path, vendor), folders(tmp_path))

    found = inside(engine, str(STORY), _LIST)

    before = inside(engine, vendor, _LIST)
    cache = "vllm/__pycache__/"
    assert cache + "envs.cpython-310.pyc" not in found
    assert cache + "old.cpython-311.pyc" not in found
    assert "vllm/old.py" not in found
    assert found[cache + "envs.cpython-311.pyc"] != before[cache + "envs.cpython-311.pyc"]
    assert found[cache + "__init__.cpython-311.pyc"] == before[cache + "__init__.cpython-311.pyc"]


@pytest.mark.usefixtures("clean")
def test_a_deploy_into_a_container_makes_the_same_files_as_the_image(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    wanted = order(tmp_path, vendor)
    build(engine, wanted, folders(tmp_path))
    with _running(vendor) as container:
        from deploy.carriers.container import Container

        evidence = Container(container).deliver(wanted.bundle, Request(verb=Verb.DEPLOY))
        assert evidence.exit == 0, evidence.error
        listed = engine.execute(container, (dock.PYTHON, "-S", "-c", _LIST, dock.SITE))

    deployed, built = json.loads(listed.out), inside(engine, str(STORY), _LIST)
    # The records differ, since an image keeps no originals: test_image_receipt.py.
    for found in (deployed, built):
        assert found.pop(".dcu-bundle/receipt.json")
    assert {k: v for k, v in deployed.items() if ".dcu-bundle" not in k} == built


@pytest.mark.usefixtures("clean")
def test_a_second_build_with_nothing_changed_does_nothing(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    wanted = order(tmp_path, vendor)
    first = build(engine, wanted, folders(tmp_path))
    events = _events(engine)

    second = build(engine, wanted, folders(tmp_path))

    assert second == dataclasses.replace(first, unchanged=True)
    assert _events(engine) == events


@pytest.mark.usefixtures("clean")
def test_an_image_that_was_removed_or_retagged_is_built_again(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    wanted = order(tmp_path, vendor)
    first = build(engine, wanted, folders(tmp_path))
    engine.tag(vendor, STORY.name, STORY.tag)

    second = build(engine, wanted, folders(tmp_path))

    assert second == first
    assert (engine.inspect(str(STORY)) or {})["Id"] == first.id


_BUILD = """
import json, sys
from pathlib import Path
from deploy.carriers.assembly import Folders, Order, build
from deploy.carriers.engine import open_engine
from deploy.image.archive import Reference
from tests.carriers import dock
story = Reference(sys.argv.pop(), "1")
folder, base, out = map(Path, sys.argv[1:])
order = Order(bundle=dock.bundle(folder), base=str(base), reference=story, epoch=1700000000)
with open_engine() as engine:
    built = build(engine, order, Folders(folder / "w", folder / "c"), output=out, fresh=True)
print(json.dumps(built.to_json()))
"""


@pytest.mark.usefixtures("clean")
def test_two_checkouts_on_unlike_machines_make_the_same_archive(
    vendor: str, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshot"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TOP / "deploy", snapshot / "deploy", ignore=ignore)
    (snapshot / "tests/carriers").mkdir(parents=True)
    shutil.copy(TOP / "tests/carriers/dock.py", snapshot / "tests/carriers")
    archives, answers = set(), set()
    for number, (zone, umask, locale) in enumerate(
        (("UTC", 0o77, "C"), ("Asia/Tokyo", 0, "C.UTF-8"))
    ):
        checkout = tmp_path / f"checkout {number}"
        shutil.copytree(snapshot, checkout)
        out = tmp_path / f"{number}.tar"
        env = {**os.environ, "TZ": zone, "LC_ALL": locale, "PYTHONHASHSEED": str(number)}
        done = subprocess.run(
            (sys.executable, "-c", _BUILD, tmp_path / f"made {number}", vendor, out, STORY.name),
            cwd=checkout,
            env={**env, "USER": f"user{number}", "PYTHONPATH": str(checkout)},
            umask=umask,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        archives.add(out.read_bytes())
        answers.add(done.stdout)
    assert len(archives) == len(answers) == 1


@pytest.mark.usefixtures("clean")
def test_what_else_is_handed_in_lies_in_the_image_with_its_mode(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    script = Extra.held("/root/submission/start.sh", b"#!/bin/sh\n", 0o755)

    build(engine, order(tmp_path, vendor, extras=(script,)), folders(tmp_path))

    code = "import json, os; s = os.stat('/root/submission/start.sh'); print(json.dumps(s.st_mode))"
    assert inside(engine, str(STORY), code) & 0o7777 == 0o755
    code = "import json, os; print(json.dumps(os.stat('/root').st_mode & 0o7777))"
    assert inside(engine, str(STORY), code) == 0o700  # the base's, not a default


@pytest.mark.usefixtures("clean")
def test_a_linked_folder_of_the_base_stays_a_link(engine: Engine, tmp_path: Path) -> None:
    link = Entry(path="srv/site", kind=Kind.LINK, link="../usr/local/lib/python3.11/dist-packages")
    with dock.base_image(engine, entries=(link,)) as base:
        made = dock.bundle(tmp_path, site="/srv/site")

        build(engine, order(tmp_path, base, bundle=made), folders(tmp_path))

        code = (
            "import json, os; print(json.dumps([os.path.islink('/srv/site'), os.listdir('/srv')]))"
        )
        assert inside(engine, str(STORY), code) == [True, ["site"]]
        found = inside(engine, str(STORY), _LIST)
        assert "vllm/layers/added.py" in found
        engine.remove_image(str(STORY))  # before its base goes


@pytest.mark.usefixtures("clean")
def test_an_image_without_python_gets_whiteouts_and_no_bytecode(
    engine: Engine, tmp_path: Path
) -> None:
    tree = {**dock.VENDOR, "vllm-0.18.1.dist-info/METADATA": b"Version: 0.18.1\n"}
    with dock.base_image(engine, tree, on="") as base:
        archive = tmp_path / "image.tar"

        build(engine, order(tmp_path, base), folders(tmp_path), output=archive)

        names = [row[0].rpartition("dist-packages/")[2] for row in _own_layer(archive)]
        engine.remove_image(str(STORY))
    assert "vllm/__pycache__/.wh.envs.cpython-311.pyc" in names
    assert "vllm/.wh.old.py" in names
    assert not [name for name in names if name.endswith(".pyc") and ".wh." not in name]


def _own_layer(archive: Path) -> list[tuple[str, str, int, int, str, str]]:
    with tarfile.open(archive) as tar:
        saved = json.load(tar.extractfile("manifest.json") or io.BytesIO())
        layer = tar.extractfile(saved[0]["Layers"][-1])
        assert layer is not None
        return read_back(layer)


# --- refusals: nothing is loaded, and three lines say why -----------------------------------------


def _refused(engine: Engine, wanted: Order, tmp_path: Path, kind: type[BundleError]) -> BundleError:
    with pytest.raises(kind) as caught:
        build(engine, wanted, folders(tmp_path))
    assert engine.inspect(str(STORY)) is None
    assert not list((tmp_path / "work").glob(".layer*"))
    assert len(str(caught.value).splitlines()) == 3
    return caught.value


@pytest.mark.usefixtures("clean")
def test_a_base_with_a_hand_edited_file_is_refused_with_all_digests(
    engine: Engine, tmp_path: Path
) -> None:
    edited = {**dock.VENDOR, "vllm/envs.py": b"X = 9  # by hand\n", "vllm/old.py": b"?"}
    with dock.base_image(engine, edited) as base:
        error = _refused(engine, order(tmp_path, base), tmp_path, Refused)

    for text in ("vllm/envs.py", "vllm/old.py", "assumed", "promised", "found"):
        assert text in error.why


@pytest.mark.usefixtures("clean")
def test_a_base_with_another_version_is_refused_with_what_it_has(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    made = dock.bundle(tmp_path, requires={"vllm": "0.19.0", "torch": "2.10.0"})

    error = _refused(engine, order(tmp_path, vendor, bundle=made), tmp_path, Unfit)

    assert "vllm 0.19.0, torch 2.10.0" in error.why
    assert "vllm-0.18.1+das.dtk2604" in error.why


@pytest.mark.usefixtures("clean")
def test_an_absent_base_is_refused(engine: Engine, tmp_path: Path) -> None:
    error = _refused(engine, order(tmp_path, "dcu-test/nowhere:1"), tmp_path, Unfit)

    assert "dcu-test/nowhere:1" in error.what


@pytest.mark.usefixtures("clean")
def test_a_moved_tag_is_refused_with_both_layers(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    base = Base.from_inspect(engine.inspect(dock.DEBIAN) or {})
    pin = Pin.of("dcu-test/vendor:1", base)

    error = _refused(engine, order(tmp_path, vendor, pin=pin), tmp_path, StaleLock)

    assert "it has 2 layers, the lock pins 1" in error.why


@pytest.mark.usefixtures("clean")
def test_a_base_with_another_environment_is_refused(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    base = Base.from_inspect(engine.inspect(vendor) or {})
    changed = dataclasses.replace(base, config={**base.config, "Env": ["PATH=/evil"]})

    error = _refused(
        engine, order(tmp_path, vendor, pin=Pin.of(vendor, changed)), tmp_path, StaleLock
    )

    assert "run config" in error.why


@pytest.mark.usefixtures("clean")
def test_a_base_of_another_platform_is_refused(engine: Engine, vendor: str, tmp_path: Path) -> None:
    base = Base.from_inspect(engine.inspect(vendor) or {})
    pin = Pin.of(vendor, dataclasses.replace(base, architecture="arm64"))

    error = _refused(engine, order(tmp_path, vendor, pin=pin), tmp_path, Unfit)

    assert (error.what, error.exit) == ("the base image is for linux/amd64", 3)


@pytest.mark.usefixtures("clean")
def test_a_module_that_does_not_compile_is_refused_with_its_line(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    made = dock.bundle(tmp_path, {"vllm/envs.py": b"X = 1\ndef (:\n"})

    with pytest.raises(BundleError) as caught:
        build(engine, order(tmp_path, vendor, bundle=made), folders(tmp_path))

    assert "vllm/envs.py: SyntaxError, line 2" in caught.value.why
    assert engine.inspect(str(STORY)) is None


class _OtherId(Engine):
    """The real engine, but for the id it shows: a store that changes what it loads."""

    def inspect(self, reference: str) -> dict[str, Any] | None:
        found = super().inspect(reference)
        if found is not None and reference == str(STORY):
            found["Id"] = "sha256:" + "0" * 64
        return found


@pytest.mark.usefixtures("clean")
def test_an_image_with_another_id_than_predicted_is_removed_again(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    with pytest.raises(Differs, match="another image"):
        build(_OtherId(engine._client), order(tmp_path, vendor), folders(tmp_path))

    assert engine.inspect(str(STORY)) is None


class _Content(Engine):
    """The real engine, but that it says its images lie in containerd."""

    @property
    def store(self) -> Store:
        return Store.CONTAINERD


@pytest.mark.usefixtures("clean")
def test_a_content_store_is_refused_where_the_base_s_blobs_are_not_known(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    with pytest.raises(Unfit) as caught:
        build(_Content(engine._client), order(tmp_path, vendor), folders(tmp_path))

    assert "does not tell in which blobs the base is" in caught.value.what
    assert engine.inspect(str(STORY)) is None


def test_the_tests_engine_is_of_the_classic_kind(engine: Engine) -> None:
    assert engine.store is Store.CLASSIC


# --- odd bases ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(
    "config",
    [
        {"User": "nobody"},
        {"Entrypoint": ["/bin/false"], "Cmd": ["x"]},
        {"WorkingDir": "/not/there"},
        {"Env": ["PYTHONHASHSEED=7", "PYTHONPATH=/opt/evil", "PATH=/nowhere"]},
    ],
    ids=[
        "a user who is not root",
        "an entrypoint that fails",
        "no folder",
        "a hostile environment",
    ],
)
def test_what_the_base_runs_as_changes_no_byte_of_the_layer(
    engine: Engine, vendor: str, tmp_path: Path, config: dict[str, Any]
) -> None:
    shadow = Entry(path="opt/evil/json.py", data=b"raise SystemExit('shadowed')\n")
    plain = build(engine, order(tmp_path, vendor), folders(tmp_path / "plain"))
    with dock.base_image(engine, config=config, entries=(shadow,)) as base:
        odd = build(engine, order(tmp_path, base), folders(tmp_path / "odd"))
        found = engine.inspect(str(STORY)) or {}
        engine.remove_image(str(STORY))

    assert odd.layer == plain.layer
    for key, value in config.items():
        assert found["Config"][key] == value


# --- small tools ----------------------------------------------------------------------------------


class _running:  # noqa: N801 - reads as a phrase
    """A container of an image, removed at the end."""

    def __init__(self, image: str, *options: str) -> None:
        argv = ("docker", "run", "-d", "--network", "none", *options, image, "sleep", "300")
        self.id = subprocess.run(
            argv, capture_output=True, text=True, check=True, timeout=60
        ).stdout.strip()

    def __enter__(self) -> str:
        return self.id

    def __exit__(self, *_: object) -> None:
        subprocess.run(("docker", "rm", "-f", self.id), capture_output=True, check=True, timeout=60)


def _events(engine: Engine) -> str:
    """When the image was loaded or tagged last; the engine's own note, to the nanosecond."""
    return str((engine.inspect(str(STORY)) or {})["Metadata"]["LastTagTime"])


def test_a_built_image_says_all_its_ids(tmp_path: Path) -> None:
    built = Built(
        reference="r:1", id="i", layer="l", config="c", content="k", base=("b",), run_config="r"
    )

    assert built.to_json()["schema"] == "image/1"
    assert set(built.expect) == {"layer", "config", "manifest", "content", "run_config"}
