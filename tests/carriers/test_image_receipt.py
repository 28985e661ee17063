"""What an image knows of itself: its receipt, and the bundle beside its scripts."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.receipt import RECEIPT
from deploy.agent.words import Verb
from deploy.carriers import Request
from deploy.carriers.assembly import CARRIED_TWICE, Folders, Order, build, handed_in
from deploy.carriers.container import Container
from deploy.carriers.engine import Engine, open_engine
from deploy.errors import Refused
from deploy.image.layer import Entry, Kind
from tests.carriers import dock

pytestmark = [pytest.mark.docker, pytest.mark.slow]

STORY = dock.own("receipt")
SO = "vllm/_rocm_C.abi3.so"
# A kernel is the only content that is too big to be carried twice.
EDITS: dict[str, bytes | None] = {
    **dock.EDITS,
    "vllm/layers/added.py": b"Y = 1\n",
    "vllm/lone/only.py": None,  # the last file of its folder
    "vllm/fresh/deep/new.py": b"Z = 1\n",
    SO: b"\x7fELF" * (CARRIED_TWICE // 4 + 1),
}
TREE = {**dock.VENDOR, "vllm/lone/only.py": b"Q = 1\n", SO: b"vendor"}
# An old pyc beside it: the folder is empty only when that goes, too.
TREE["vllm/lone/__pycache__/only.cpython-311.pyc"] = b"stale"


# A file that becomes a folder, a folder that becomes a file, and a link that becomes a folder.
TURNED: dict[str, bytes | None] = {
    "vllm/was_file": None,
    "vllm/was_file/new.py": b"A = 1\n",
    "vllm/was_folder/a.py": None,
    "vllm/was_folder/deep/b.json": None,
    "vllm/was_folder": b"now a file",
    "vllm/was_link": None,
    "vllm/was_link/utils.py": b"B = 1\n",
}
TURNING = {
    **dock.VENDOR,
    "vllm/was_file": b"text",
    "vllm/was_folder/a.py": b"A = 0\n",
    "vllm/was_folder/__pycache__/a.cpython-311.pyc": b"stale",
    "vllm/was_folder/deep/b.json": b"{}",
}
LINK = Entry(path=f"{dock.SITE.lstrip('/')}/vllm/was_link", kind=Kind.LINK, link="layers")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine() as found:
        yield found


@pytest.fixture(scope="module")
def vendor(engine: Engine) -> Iterator[str]:
    with dock.base_image(engine, TREE) as reference:
        yield reference


@pytest.fixture(scope="module")
def story(
    engine: Engine, vendor: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, str]]:
    """The submission's whole bundle, and its image."""
    folder = tmp_path_factory.mktemp("story")
    meaning = dock.manifest("registry/vendor:1").meaning()
    made = dock.bundle(folder, EDITS, before=TREE, meaning=meaning)
    order = Order(
        bundle=made,
        base=vendor,
        reference=STORY,
        epoch=dock.EPOCH,
        extras=handed_in(made, ()),
    )
    build(engine, order, Folders(folder / "w", folder / "c"))
    yield made, str(STORY)
    engine.remove_image(str(STORY))


@pytest.fixture
def inside(story: tuple[Any, str]) -> Iterator[str]:
    with running(story[1]) as container:
        yield container


@contextlib.contextmanager
def running(image: str) -> Iterator[str]:
    argv = ("docker", "run", "-d", "--network", "none", image, "sleep", "300")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    try:
        yield done.stdout.strip()
    finally:
        argv = ("docker", "rm", "-f", done.stdout.strip())
        subprocess.run(argv, capture_output=True, timeout=60, check=True)


def sh(container: str, script: str) -> str:
    argv = ("docker", "exec", container, "sh", "-c", script)
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


def by_hand(container: str, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the bundle that lies in the image, as a person in a web terminal would."""
    argv = ("docker", "exec", container, "python3", "/root/submission/bundle.pyz", *words)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout)


def listing(container: str) -> str:
    """Every path of the site, folders included, with mode and owner; not the records."""
    find = f"cd {dock.SITE} && find . -path ./.dcu-bundle -prune -o -printf '%y %m %U:%G %p\\n'"
    return "\n".join(sorted(sh(container, find).splitlines()))


def record(container: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(sh(container, f"cat {dock.SITE}/{RECEIPT}"))
    return found


def test_an_image_has_the_receipt_and_the_paths_of_a_deploy(
    vendor: str, story: tuple[Any, str], inside: str
) -> None:
    with running(vendor) as live:
        deployed = Container(live).deliver(story[0], Request(verb=Verb.DEPLOY))
        assert deployed.exit == 0, str(deployed.error)
        want, paths = record(live), listing(live)

    found = record(inside)

    # What may differ: nobody ran it, and originals lie in the base. Bytecode is no original there.
    for one in (want, found):
        del one["incidental"], one["seal"]
        one["originals"] = {
            path: entry["state"]
            for path, entry in one["originals"].items()
            if not path.endswith(".pyc")
        }
    assert found == want
    assert found["folders"] == [
        "vllm/fresh",
        "vllm/fresh/deep",
        "vllm/fresh/deep/__pycache__",
        "vllm/layers/__pycache__",
    ]
    assert listing(inside) == paths
    assert "vllm/lone" not in paths


@pytest.mark.parametrize("stranger", [False, True], ids=["taken whole", "with a stranger"])
def test_files_turn_into_folders_and_back_as_in_a_live_target(
    engine: Engine, tmp_path: Path, stranger: bool
) -> None:
    reference = dock.own("turning")
    before = {**TURNING, **({"vllm/was_folder/deep/mine.json": b"?"} if stranger else {})}
    made = dock.bundle(tmp_path, TURNED, before={**TURNING, "vllm/was_link": "layers"})
    with dock.base_image(engine, before, entries=(LINK,)) as base, running(base) as live:
        pristine = listing(live)
        deployed = Container(live).deliver(made, Request(verb=Verb.DEPLOY))
        order = Order(bundle=made, base=base, reference=reference, epoch=dock.EPOCH)
        if stranger:
            with pytest.raises(Refused) as caught:
                build(engine, order, Folders(tmp_path / "w", tmp_path / "c"))
            assert deployed.exit == 6
            assert "vllm/was_folder" in caught.value.why
            return
        assert deployed.exit == 0, str(deployed.error)
        build(engine, order, Folders(tmp_path / "w", tmp_path / "c"))
        try:
            with running(str(reference)) as container:
                verified = Container(container).deliver(made, Request(verb=Verb.VERIFY))
                paths, want, found = listing(container), record(live), record(container)
        finally:
            engine.remove_image(str(reference))
        assert paths == listing(live)
        restored = Container(live).deliver(made, Request(verb=Verb.RESTORE))
        assert restored.exit == 0, str(restored.error)
        # Folders and all: a stale pyc of a folder that went comes back with it.
        assert listing(live) == pristine
    assert verified.exit == 0, verified.error
    assert {key: found[key] for key in ("files", "pycs", "folders", "removed")} == {
        key: want[key] for key in ("files", "pycs", "folders", "removed")
    }


def test_a_container_of_the_image_knows_what_is_installed(
    story: tuple[Any, str], inside: str
) -> None:
    code, status = by_hand(inside, "status")
    verified = Container(inside).deliver(story[0], Request(verb=Verb.VERIFY))
    again = Container(inside).deliver(story[0], Request(verb=Verb.DEPLOY))

    assert (code, status["met"]) == (0, "deployed")
    assert status["receipt"]["plan"] == story[0].plan.digest
    assert status["incidental"]["deployed"]["since"] == "2023-11-14T22:13:20Z"
    assert (verified.exit, verified.raw["met"]) == (0, "deployed")
    assert {row.get("proof", "receipt") for row in verified.files} == {"receipt"}
    assert again.outcome == "nothing to do"


def test_a_service_that_starts_in_the_image_is_recorded_as_running_on_that_receipt(
    story: tuple[Any, str], inside: str
) -> None:
    code, said = by_hand(inside, "record", "--pid", "1", "--run", "/root/submission")

    run = said["service"]["run"]
    assert code == 0
    assert run["plan"] == story[0].plan.digest
    assert run["receipt"] == sh(inside, f"sha256sum {dock.SITE}/{RECEIPT}").split()[0]


def test_a_restore_says_where_the_originals_are_and_changes_nothing(inside: str) -> None:
    before = listing(inside)

    code, restored = by_hand(inside, "restore")

    assert code == 6
    assert "lie in the base image, not here" in restored["error"]["what"]
    assert "vllm/envs.py" in restored["error"]["why"]
    assert "registry/vendor:1" in restored["error"]["fix"]
    assert listing(inside) == before
    assert by_hand(inside, "verify")[0] == 0


def test_an_image_that_only_adds_files_can_be_restored_to_its_base(
    engine: Engine, vendor: str, tmp_path: Path
) -> None:
    reference = dock.own("adding")
    made = dock.bundle(tmp_path, {"vllm/fresh/new.py": b"Z = 1\n"}, before=TREE)
    extras = handed_in(made, ())
    order = Order(bundle=made, base=vendor, reference=reference, epoch=dock.EPOCH, extras=extras)
    build(engine, order, Folders(tmp_path / "w", tmp_path / "c"))
    try:
        with running(vendor) as base, running(str(reference)) as container:
            code, restored = by_hand(container, "restore")
            assert (code, restored["outcome"]) == (0, "restored")
            assert listing(container) == listing(base)
    finally:
        engine.remove_image(str(reference))


@pytest.mark.parametrize(
    "harm",
    ["echo 'X = 9' >{}", "rm {}", "chmod 0755 {}", "cd $(dirname {}) && rm -r __pycache__"],
    ids=["edited", "removed", "another mode", "no bytecode"],
)
def test_what_a_person_did_in_the_container_is_mended_by_the_image_s_own_bundle(
    inside: str, harm: str
) -> None:
    sh(inside, harm.format(f"{dock.SITE}/vllm/envs.py"))
    assert by_hand(inside, "verify")[0] == 10

    code, mended = by_hand(inside, "deploy", "--replace-drift", "vllm/envs.py")

    assert (code, mended["outcome"]) == (0, "deployed"), mended
    assert by_hand(inside, "verify", "--recompile")[0] == 0


def test_drift_is_not_replaced_unasked_in_a_container_of_an_image(inside: str) -> None:
    sh(inside, f"echo 'X = 9' >{dock.SITE}/vllm/envs.py")

    code, refused = by_hand(inside, "deploy")

    assert (code, refused["outcome"]) == (6, "refused")


def test_a_kernel_is_not_carried_twice_and_the_whole_bundle_mends_it(
    story: tuple[Any, str], inside: str
) -> None:
    sh(inside, f"echo other >{dock.SITE}/{SO}")

    code, refused = by_hand(inside, "deploy", "--replace-drift", SO)
    request = Request(verb=Verb.DEPLOY, options={"replace_drift": [SO]})
    mended = Container(inside).deliver(story[0], request)

    assert code == 4
    assert "the whole bundle" in refused["error"]["fix"]
    assert int(sh(inside, "stat -c %s /root/submission/bundle.pyz")) < CARRIED_TWICE
    assert mended.exit == 0, mended.error
    assert by_hand(inside, "verify")[0] == 0


def test_a_base_that_was_deployed_to_is_refused(engine: Engine, tmp_path: Path) -> None:
    left = Entry(path=f"{dock.SITE.lstrip('/')}/{RECEIPT}", data=b"{}")
    with dock.base_image(engine, entries=(left,)) as base:
        order = Order(
            bundle=dock.bundle(tmp_path),
            base=base,
            reference=dock.own("twice"),
            epoch=dock.EPOCH,
        )
        with pytest.raises(Refused) as caught:
            build(engine, order, Folders(tmp_path / "w", tmp_path / "c"))

    assert "not as its vendor made it" in caught.value.what
    assert engine.inspect(str(order.reference)) is None
