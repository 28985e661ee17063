"""Bundles and targets made to lead the agent astray: each is refused and nothing has changed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy import bundle as bundles
from deploy.agent.tree import TreeReader, TreeWriter
from deploy.agent.words import BundleError, Exit, Refused
from deploy.errors import StaleLock
from tests.agent.target import NEW_FILES, Bundle, Target, difference, planned, pythons
from tests.table import Found, plants

OLD = [version for version in ("2.7", "3.6", "3.7", "3.8", "3.9") if version in pythons()]


@pytest.mark.parametrize("version", OLD or [pytest.param("", marks=pytest.mark.skip("none here"))])
def test_an_old_python_is_told_what_is_needed_and_what_it_is(target: Target, version: str) -> None:
    before = target.snapshot()
    bundle = target.usual()
    argv = [pythons()[version], str(bundle.path), "deploy", "--root", str(target.root)]

    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 3
    assert f"needs Python >= 3.10, this is {version}" in done.stderr
    assert len(done.stderr.splitlines()) == 3
    assert target.snapshot() == before


def rewritten(bundle: Bundle, change: Callable[[dict[str, bytes]], None]) -> Bundle:
    with zipfile.ZipFile(bundle.path) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    change(entries)
    path = bundle.path.with_name("changed.pyz")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as made:
        for name, data in entries.items():
            made.writestr(name, data)
    return Bundle(path, bundle.plan)


def with_plan(bundle: Bundle, change: Callable[[Any], object]) -> Bundle:
    def edit(entries: dict[str, bytes]) -> None:
        plan = json.loads(entries["plan.json"])
        change(plan)
        entries["plan.json"] = json.dumps(plan).encode()

    return rewritten(bundle, edit)


BAD_PATHS = [
    "../outside.py", "pack/../../outside.py", "/etc/outside.py", "pack//core.py", "./pack/core.py",
    "pack/core.py/", "", "pack/\0.py", ".dcu-bundle/receipt.json", "pack/__pycache__/core.pyc",
    "pack/" + "n" * 256,
]  # fmt: skip


@plants("a path that escapes, lexically or absolute")
@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_that_leaves_its_place_is_refused(target: Target, path: str, found: Found) -> None:
    before = target.snapshot()
    bundle = with_plan(target.usual(), lambda plan: plan["files"][0].update(path=path))

    for verb in ("deploy", "verify", "check"):
        outcome = target.run(bundle, verb)
        assert (outcome.code, outcome.evidence["outcome"]) == (4, "damaged")
        assert len(outcome.err.splitlines()) == 3
        found(f"{verb}: {outcome.told}")

    assert target.snapshot() == before


def test_half_a_character_in_a_path_is_damage(target: Target) -> None:
    bundle = with_plan(target.usual(), lambda plan: plan["files"][0].update(path="pack/\ud800.py"))
    outcome = target.run(bundle, "deploy")
    assert outcome.told == "exit 4: the bundle is damaged"


@plants("control characters in names")
def test_control_characters_in_names_never_reach_the_terminal(target: Target, found: Found) -> None:
    name = "pack/\x1b[2J\n\x07core.py"
    bundle = target.bundle(target.plan(planned(name, b"V = 1\n")), [b"V = 1\n"])
    target.write(name, b"somebody's\n")

    refused = target.run(bundle, "deploy")
    verified = target.run(bundle, "verify")

    assert (refused.code, verified.code) == (6, 10)
    for text in (refused.err, verified.err):
        assert "\\x1b[2J\\n\\x07core.py" in text
        assert "\x1b" not in text
    found("deploy: exit 6, verify: exit 10; shown as escapes")


@plants("a flipped byte in a bundle")
def test_a_flipped_byte_anywhere_in_the_documents_is_found(target: Target, found: Found) -> None:
    before = target.snapshot()
    bundle = target.usual()
    for name in ("plan.json", "inputs.json"):

        def spoil(entries: dict[str, bytes], name: str = name) -> None:
            entries[name] = b"\x00" + entries[name][1:]

        outcome = target.run(rewritten(bundle, spoil), "deploy")
        assert outcome.code == 4
        assert name in outcome.err
        found(f"deploy: {outcome.told}")
    assert target.snapshot() == before


def test_a_missing_plan_and_a_plan_of_another_schema_are_named(target: Target) -> None:
    bundle = target.usual()
    missing = target.run(rewritten(bundle, lambda e: e.pop("plan.json") and None), "deploy")
    other = target.run(with_plan(bundle, lambda plan: plan.update(schema="plan/9")), "deploy")
    assert (missing.code, other.code) == (4, 4)
    assert "plan.json" in missing.err
    assert "plan/9" in other.err


@plants("a name twice in a bundle")
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_stands_twice_and_a_packed_entry_are_refused(
    target: Target, found: Found
) -> None:
    before = target.snapshot()
    twice, packed = target.usual(), target.usual()
    with zipfile.ZipFile(twice.path, "a") as file:
        file.writestr("plan.json", "{}")
    with zipfile.ZipFile(packed.path, "a", zipfile.ZIP_DEFLATED) as file:
        file.writestr("blobs/" + "0" * 64, bytes(100_000))

    first, second = target.run(twice, "deploy"), target.run(packed, "deploy")

    assert (first.code, second.code) == (4, 4)
    assert "twice" in first.err
    assert "only store" in second.err
    assert target.snapshot() == before
    found(f"deploy: {first.reason}")


@plants("a truncated bundle")
def test_a_truncated_bundle_never_deploys(target: Target, found: Found) -> None:
    before = target.snapshot()
    bundle = target.usual()
    whole = bundle.path.read_bytes()
    step = len(whole) // 12
    # From one step on: an empty file is an empty program, which ends well and says nothing.
    codes = set()
    for size in range(step, len(whole), step):
        bundle.path.write_bytes(whole[:size])
        codes.add(target.run(bundle, "deploy").code)
        with pytest.raises(StaleLock) as caught:
            bundles.read(bundle.path)
        codes.add(caught.value.exit)
    assert 0 not in codes
    found("reading it: exit 4; by hand Python does not start it")
    assert target.snapshot() == before


def test_nested_json_without_end_is_refused(target: Target) -> None:
    def nest(entries: dict[str, bytes]) -> None:
        entries["plan.json"] = b"[" * 200_000

    outcome = target.run(rewritten(target.usual(), nest), "deploy")
    assert outcome.code == 4


# --- links on the target ---


@plants("a site that is a symlink")
def test_a_site_behind_links_inside_the_root_is_deployed_to(target: Target, found: Found) -> None:
    real = target.top
    moved = target.root / "opt/site"
    moved.parent.mkdir()
    shutil.move(real, moved)
    real.symlink_to("../../../opt/site")
    before = target.snapshot()
    bundle = target.usual()

    assert target.run(bundle, "deploy").code == 0
    assert target.states(bundle=bundle) == {}
    assert (moved / "pack/core.py").read_bytes() == NEW_FILES["pack/core.py"]
    assert target.run(bundle, "restore").code == 0
    assert difference(before, target.snapshot()) == {}
    found("nothing to find: deploy, verify, restore")


@pytest.mark.parametrize("absolute", [True, False])
def test_a_package_behind_a_link_inside_the_root_keeps_its_link(
    target: Target, absolute: bool
) -> None:
    moved = target.root / "opt/pack"
    moved.parent.mkdir()
    shutil.move(target.top / "pack", moved)
    (target.top / "pack").symlink_to(moved if absolute else "../../../../opt/pack")
    bundle = target.usual()

    assert target.run(bundle, "deploy").code == 0

    assert (target.top / "pack").is_symlink()
    assert (moved / "core.py").read_bytes() == NEW_FILES["pack/core.py"]
    assert target.states(bundle=bundle) == {}


@plants("a link inside the root that leads out")
@pytest.mark.parametrize("link", ["absolute", "relative"])
def test_a_package_behind_a_link_out_of_the_root_is_refused(
    target: Target, link: str, found: Found
) -> None:
    outside = target.root.parent / "outside"
    shutil.move(target.top / "pack", outside)
    to = str(outside) if link == "absolute" else "../../../../../outside"
    (target.top / "pack").symlink_to(to)
    before = {path: path.read_bytes() for path in outside.rglob("*.py")}
    bundle = target.usual()

    for verb in ("deploy", "check", "verify"):
        outcome = target.run(bundle, verb)
        assert outcome.code == 6
        assert "leads out of" in outcome.err
        assert outcome.told.endswith(f"leads out of {target.root}")
        found(f"{verb}: exit 6: leads out of the root")

    assert {path: path.read_bytes() for path in outside.rglob("*.py")} == before
    (target.top / "pack").unlink()
    shutil.move(outside, target.top / "pack")


def test_a_package_that_is_a_link_to_a_source_checkout_is_refused(target: Target) -> None:
    """Source and target would be the same file: equal bytes there prove no deploy."""
    checkout = target.root / "src/repo"
    checkout.mkdir(parents=True)
    (checkout / ".git").mkdir()
    shutil.move(target.top / "pack", checkout / "pack")
    (target.top / "pack").symlink_to("../../../../src/repo/pack")
    before = target.snapshot()

    outcome = target.run(target.usual(), "deploy")

    assert outcome.code == 6
    assert "checkout" in outcome.err
    assert target.snapshot() == before


def test_an_interpreter_or_a_site_that_is_not_there_is_unfit(target: Target) -> None:
    bundle = target.usual()
    for options, word in (
        (("--python", "/usr/bin/python9"), "python9"),
        (("--site", "/usr/lib/nowhere"), "nowhere"),
        (("--root", str(target.root / "absent")), "absent"),
    ):
        outcome = target.run(bundle, "check", *options)
        assert outcome.code == 3
        assert word in outcome.err


def test_another_version_of_the_base_is_unfit_and_a_local_one_is_not(target: Target) -> None:
    meta = "pack-1.0.dist-info/METADATA"
    bundle = target.usual()
    target.write(meta, b"Name: pack\nVersion: 1.0+das.dtk2604\n")
    assert target.run(bundle, "check").code == 10
    target.write(meta, b"Name: pack\nVersion: 1.0.1\n")
    other = target.run(bundle, "deploy")
    target.write("Pack-1.0.0.dist-info/METADATA", b"Name: pack\nVersion: 1.0\n")
    twice = target.run(bundle, "deploy")
    assert (other.code, twice.code) == (3, 3)
    assert "pack is 1.0.1, the plan was made for 1.0" in other.err
    assert "2 times" in twice.err


def test_links_that_turn_in_circles_are_an_error_not_a_hang(target: Target) -> None:
    shutil.rmtree(target.top / "pack")
    (target.top / "pack").symlink_to("kcap")
    (target.top / "kcap").symlink_to("pack")
    outcome = target.run(target.usual(), "check")
    assert outcome.code == 6


def test_a_fifo_where_a_file_should_be_does_not_hang(target: Target) -> None:
    os.unlink(target.top / "pack/table.json")
    os.mkfifo(target.top / "pack/table.json")
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 6
    assert target.states(bundle=bundle)["pack/table.json"] == "changed"


def test_a_reader_has_no_method_that_writes() -> None:
    writing = {n for n in vars(TreeWriter) if not n.startswith("__")}
    assert "create" in writing
    assert not [name for name in writing if hasattr(TreeReader, name)]


def test_dot_dot_above_the_root_is_refused_by_the_tree(target: Target) -> None:
    tree = TreeReader(str(target.root), target.site)
    with pytest.raises(Refused) as caught:
        tree.resolve("../../../../..", None)
    assert caught.value.exit is Exit.REFUSED
    assert isinstance(caught.value, BundleError)


def test_a_folder_that_became_a_link_out_after_it_was_resolved_is_not_entered(
    target: Target,
) -> None:
    """The exact instant that a race only meets now and then: resolved, closed, then swapped."""
    outside = target.root.parent / "outside"
    outside.mkdir()
    for number in range(220):
        (target.top / f"many/d{number}").mkdir(parents=True)
    tree = TreeWriter(str(target.root), target.site)
    assert tree.exists("pack/core.py")
    for number in range(220):  # more than stay open, so that pack's descriptor is given up
        tree.folder(f"many/d{number}")
    os.rename(target.top / "pack", target.top / "aside")
    (target.top / "pack").symlink_to(outside)

    with pytest.raises(OSError, match=r"directory|symbolic"):
        tree.create("pack/planted.py", lambda fd: os.write(fd, b"x"), 0o644, (0, 0))

    assert list(outside.iterdir()) == []


def test_many_folders_do_not_exhaust_descriptors(target: Target) -> None:
    files: dict[str, bytes | None] = {f"pack/d{i}/e/f.json": b"1" for i in range(400)}
    bundle = target.usual(files)
    wrap = ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    before = target.snapshot()
    assert target.run(bundle, "deploy", wrap=wrap).code == 0
    assert target.run(bundle, "verify", wrap=wrap).code == 0
    assert target.run(bundle, "restore", wrap=wrap).code == 0
    assert difference(before, target.snapshot()) == {}


def test_usage_errors_are_told_apart(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deplay").code == 2
    assert "unknown option" in target.run(bundle, "deploy", "--rout", "/").err
    path = Path(bundle.path)
    help_ = subprocess.run(
        [target.python, str(path), "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "--force-running" in help_.stdout
