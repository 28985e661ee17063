"""A file that becomes a folder, and a folder that becomes a file: in one plan, and between two."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from deploy.agent.plan import PlannedFile, State
from tests.agent.target import Bundle, Target, compile_all, difference, role, state
from tests.agent.test_agent_killed import kill_points, killed, mended, needs_strace
from tests.table import Found, plants

Side = Mapping[str, bytes | str]  # bytes of a file, or the text of a link

FILE: Side = {"pack/thing": b"one file\n"}
FOLDER: Side = {
    "pack/thing/__init__.py": b"V = 'a package'\n",
    "pack/thing/deep/er/table.json": b"{}\n",
    "pack/thing/deep/more.py": b"V = 'deep'\n",
}
LINK: Side = {"pack/thing": "lonely"}  # a folder of the base that has an __init__.py, too
TURNS = {
    "a file becomes a folder": (FILE, FOLDER),
    "a folder becomes a file": (FOLDER, FILE),
    "a link becomes a folder": (LINK, FOLDER),
    "a folder becomes a link": (FOLDER, LINK),
}


def lay(target: Target, side: Side) -> None:
    for path, content in side.items():
        place = target.top / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            place.symlink_to(content)
        else:
            place.write_bytes(content)
            place.chmod(0o644)
    compile_all(target)
    if (target.top / "pack/thing").is_dir() and not (target.top / "pack/thing").is_symlink():
        os.chmod(target.top / "pack/thing", 0o750)


def as_state(content: bytes | str | None) -> State:
    return State(type="link", link=content) if isinstance(content, str) else state(content)


def turned(target: Target, old: Side, new: Side) -> Bundle:
    """Return a bundle that leads from one side to the other, as git tells it path by path."""
    files = [
        PlannedFile(path=path, role=role(path), want=as_state(new.get(path)),
                    assume=(as_state(old.get(path)),))
        for path in sorted({*old, *new})
    ]  # fmt: skip
    contents = [content for content in new.values() if isinstance(content, bytes)]
    return target.bundle(target.plan(*files), contents)


@pytest.mark.parametrize("name", TURNS)
def test_one_plan_turns_it_and_restore_gives_it_back(target: Target, name: str) -> None:
    old, new = TURNS[name]
    lay(target, old)
    before = target.snapshot()
    bundle = turned(target, old, new)

    assert target.run(bundle, "check").code == 10
    done = target.run(bundle, "deploy")
    assert (done.code, done.states) == (0, {}), done.err
    for options in ((), ("--recompile",)):
        assert target.run(bundle, "verify", *options).states == {}
    assert target.run(bundle, "deploy").evidence["outcome"] == "nothing to do"
    assert target.run(bundle, "status").evidence["met"] == "deployed"
    assert left_over(target.top) == []
    assert target.run(bundle, "restore").code == 0
    assert difference(before, target.snapshot()) == {}


def left_over(site: Path) -> list[Path]:
    return list(site.rglob(".dcu-bundle-*"))


@pytest.mark.parametrize("name", TURNS)
def test_another_plan_turns_what_an_earlier_one_put(target: Target, name: str) -> None:
    first, second = TURNS[name]
    before = target.snapshot()
    bundles = [turned(target, {}, first), turned(target, {}, second)]

    for bundle in (*bundles, bundles[0]):
        done = target.run(bundle, "deploy")
        assert done.code == 0, done.err
        assert target.run(bundle, "verify", "--recompile").states == {}
    assert target.run(bundles[0], "restore").code == 0
    assert difference(before, target.snapshot()) == {}


@pytest.mark.parametrize("name", TURNS)
def test_a_plan_that_leaves_it_alone_turns_it_back(target: Target, name: str) -> None:
    old, new = TURNS[name]
    lay(target, old)
    before = target.snapshot()
    other = target.bundle_of("pack/core.py", b"V = 2\n")

    assert target.run(turned(target, old, new), "deploy").code == 0
    assert target.run(other, "deploy").code == 0
    assert target.run(other, "restore").code == 0

    assert difference(before, target.snapshot()) == {}


@pytest.mark.parametrize("place", ["pack/thing/mine.txt", "pack/thing/empty/"])
def test_a_folder_that_holds_a_strangers_file_does_not_turn(target: Target, place: str) -> None:
    lay(target, FOLDER)
    mine = target.top / place
    mine.mkdir() if place.endswith("/") else mine.write_text("mine\n")
    before = target.snapshot()
    bundle = turned(target, FOLDER, FILE)

    refused = target.run(bundle, "deploy")

    assert (refused.code, refused.evidence["outcome"]) == (6, "refused")
    assert f"found folder with {place.rstrip('/')}, which nobody planned" in refused.err
    assert difference(before, target.snapshot()) == {}
    mine.rmdir() if place.endswith("/") else mine.unlink()
    assert target.run(bundle, "deploy").code == 0


def test_a_strangers_file_where_a_folder_must_be_is_named(target: Target) -> None:
    target.write("pack/thing", b"somebody's\n")
    before = target.snapshot()

    refused = target.run(turned(target, {}, FOLDER), "deploy")

    assert refused.code == 6
    assert "pack/thing: assumed folder, promised folder, found" in refused.err
    assert difference(before, target.snapshot()) == {}


def test_what_lies_behind_a_link_that_goes_is_nobodys_target(target: Target) -> None:
    """The link led to a folder that has files of the same names."""
    lay(target, LINK)
    shutil.copytree(target.top / "pack/lonely", target.top / "pack/aside")
    there = {path: path.read_bytes() for path in (target.top / "pack/lonely").rglob("*.*")}

    assert target.run(turned(target, LINK, FOLDER), "deploy").code == 0

    assert {path: path.read_bytes() for path in (target.top / "pack/lonely").rglob("*.*")} == there


def sweep(target: Target, name: str, found: Found) -> None:
    old, new = TURNS[name]
    lay(target, old)
    before = target.snapshot()
    bundle = turned(target, old, new)
    # Every second: its neighbours are like it, and the sweep over five files leaves none out.
    points = kill_points(target, bundle, "deploy")[::2]
    assert target.run(bundle, "restore").code == 0

    for index, (call, number) in enumerate(points):
        killed(target, bundle, "deploy", call, number)
        for path in {*old, *new}:
            assert content_at(target, path) in (old.get(path), new.get(path)), (call, number, path)
        if index % 3 == 0:  # another third is undone at once, the last while it is undone
            assert target.run(bundle, "deploy").code == 0, (call, number)
            assert target.run(bundle, "verify").states == {}, (call, number)
        elif index % 3 == 1:
            target.run(bundle, "restore", wrap=dying(index // 3 % 7 + 1))
        assert target.run(bundle, "restore").code == 0, (call, number)
        assert difference(before, target.snapshot()) == {}, (call, number)
    found(mended(points))


def dying(number: int) -> tuple[str, ...]:
    inject = f"inject=renameat:signal=KILL:when={number}"
    return ("strace", "-o", "/dev/null", "-e", "trace=renameat", "-e", inject)


def content_at(target: Target, path: str) -> bytes | str | None:
    """What is there: nothing, too, where a folder is, or where a link would lead elsewhere."""
    place = target.top / path
    if (target.top / "pack/thing").is_symlink() and path != "pack/thing":
        return None
    if place.is_symlink():
        return os.readlink(place)
    return place.read_bytes() if place.is_file() else None


@plants("kill -9 where files become folders")
@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_file_that_becomes_a_folder_survives_kills(target: Target, found: Found) -> None:
    sweep(target, "a file becomes a folder", found)
    (target.top / "pack/thing").unlink()


@plants("kill -9 where folders become files")
@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_folder_that_becomes_a_file_survives_kills(target: Target, found: Found) -> None:
    sweep(target, "a folder becomes a file", found)
    shutil.rmtree(target.top / "pack/thing")
