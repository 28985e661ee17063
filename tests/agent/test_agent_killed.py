"""SIGKILL before every system call that changes something, on the unchanged agent."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.agent.target import NEW_FILES, Bundle, Target, compile_all, difference, planned
from tests.table import Found, plants

CALLS = ("linkat", "renameat", "unlinkat", "mkdirat", "fchmod", "fsync", "syncfs", "ftruncate")
# Of the kill points of forty files: each file has the same ones, and all 429 take minutes.
STRIDE = int(os.environ.get("DCU_TEST_STRIDE") or (3 if os.environ.get("CI") == "true" else 11))
STRACE = shutil.which("strace")
needs_strace = pytest.mark.skipif(not STRACE, reason="apt-get install strace")


def kill_points(target: Target, bundle: Bundle, verb: str) -> list[tuple[str, int]]:
    """Run the verb to its end and return every (system call, n-th time) at which it can die."""
    log = target.root.parent / "calls.log"
    wrap = ("strace", "-o", str(log), "-e", f"trace={','.join(CALLS)},write")
    outcome = target.run(bundle, verb, wrap=wrap)
    assert outcome.code == 0, outcome.err
    counts = Counter(re.findall(r"^(\w+)\(", log.read_text(), re.MULTILINE))
    assert counts["fsync"] >= 3
    return [(call, n) for call, most in sorted(counts.items()) for n in range(1, most + 1)]


def killed(target: Target, bundle: Bundle, verb: str, call: str, number: int) -> None:
    inject = f"inject={call}:signal=KILL:when={number}"
    wrap = ("strace", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
    assert target.run(bundle, verb, wrap=wrap).code == -signal.SIGKILL


def mended(points: Sequence[tuple[str, int]]) -> str:
    """What the table says of a sweep that every call ended well."""
    return f"the next call, after each of {len(points)} system calls"


def destinations(target: Target, files: dict[str, bytes | None]) -> dict[str, bytes | None]:
    return {path: target.read(path) if target.exists(path) else None for path in files}


def assert_old_or_new(
    target: Target, old: dict[str, bytes | None], new: dict[str, bytes | None]
) -> None:
    for path, found in destinations(target, new).items():
        assert found in (old[path], new[path]), path


@plants("kill -9 in a deploy of 5 files")
@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_deploy_killed_anywhere_leaves_old_or_new_and_the_next_call_mends_it(
    target: Target, found: Found
) -> None:
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()
    old = destinations(target, NEW_FILES)
    points = kill_points(target, bundle, "deploy")
    assert target.run(bundle, "restore").code == 0

    for index, (call, number) in enumerate(points):
        killed(target, bundle, "deploy", call, number)
        assert_old_or_new(target, old, NEW_FILES)
        if index % 2:  # the other half is undone at once
            assert target.run(bundle, "deploy").code == 0, (call, number)
            assert target.run(bundle, "verify").states == {}, (call, number)
        assert target.run(bundle, "restore").code == 0, (call, number)
        assert difference(before, target.snapshot()) == {}, (call, number)
    found(mended(points))


@plants("kill -9 in a deploy of 40 files")
@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_deploy_of_forty_files_survives_the_same(target: Target, found: Found) -> None:
    for number in range(40):
        target.write(f"pack/m{number}.py", b"V = 0\n")
    compile_all(target)
    before = target.snapshot()
    new: dict[str, bytes | None] = {f"pack/m{n}.py": b"V = 1\n" for n in range(40)}
    old: dict[str, bytes | None] = dict.fromkeys(new, b"V = 0\n")
    plan = target.plan(*(planned(path, data, assume=[b"V = 0\n"]) for path, data in new.items()))
    bundle = target.bundle(plan, list(new.values()))
    points = kill_points(target, bundle, "deploy")
    back = kill_points(target, bundle, "restore")
    assert (len(points) > 300, len(back) > 100) == (True, True)

    chosen = points[::STRIDE]
    for index, (call, number) in enumerate(chosen):
        killed(target, bundle, "deploy", call, number)
        assert_old_or_new(target, old, new)
        if index % 4 == 0:  # the others are undone at once
            assert target.run(bundle, "deploy").code == 0, (call, number)
            assert target.run(bundle, "verify").states == {}, (call, number)
            killed(target, bundle, "restore", *back[index * len(back) // len(chosen)])
            assert_old_or_new(target, old, new)
        assert target.run(bundle, "restore").code == 0, (call, number)
        assert difference(before, target.snapshot()) == {}, (call, number)
    found(mended(chosen))


@plants("kill -9 in a restore")
@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_restore_killed_anywhere_is_exact_after_the_next_one(
    target: Target, found: Found
) -> None:
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()
    old = destinations(target, NEW_FILES)
    assert target.run(bundle, "deploy").code == 0
    points = kill_points(target, bundle, "restore")

    for call, number in points:
        assert target.run(bundle, "deploy").code == 0
        killed(target, bundle, "restore", call, number)
        assert_old_or_new(target, old, NEW_FILES)
        assert target.run(bundle, "restore").code == 0, (call, number)
        assert difference(before, target.snapshot()) == {}, (call, number)
    found(mended(points))


@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_second_plan_killed_anywhere_still_leads_back_to_the_first_original(
    target: Target,
) -> None:
    compile_all(target)
    before = target.snapshot()
    first, second = target.usual(), second_plan(target)
    assert target.run(first, "deploy").code == 0
    points = kill_points(target, second, "deploy")
    assert target.run(second, "restore").code == 0

    for call, number in points:
        assert target.run(first, "deploy").code == 0
        killed(target, second, "deploy", call, number)
        if number % 2:
            assert target.run(second, "deploy").code == 0, (call, number)
            assert target.run(second, "verify").states == {}, (call, number)
        assert target.run(second, "restore").code == 0, (call, number)
        assert difference(before, target.snapshot()) == {}, (call, number)


@plants("kill -9 in the call that mends")
@needs_strace
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("commit", [False, True])
def test_the_mending_call_may_itself_be_killed_anywhere(
    target: Target, commit: bool, found: Found
) -> None:
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()
    points = kill_points(target, bundle, "deploy")
    assert target.run(bundle, "restore").code == 0
    # The third rename lies behind the commit point, the third link before it.
    first_kill = ("renameat", 3) if commit else ("linkat", 3)
    assert first_kill in points

    killed(target, bundle, "deploy", *first_kill)
    saved = target.root.parent / "saved"
    copy_with_links(target.root, saved)
    again = [("unlinkat", n) for n in range(1, 12)] + [("renameat", n) for n in range(1, 9)]
    for call, number in again:
        inject = f"inject={call}:signal=KILL:when={number}"
        wrap = ("strace", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject)
        target.run(bundle, "restore", wrap=wrap)
        assert target.run(bundle, "restore").code == 0, (call, number)
        after = target.snapshot(inodes=False)
        assert difference(without_inodes(before), after) == {}, (call, number)
        shutil.rmtree(target.root)
        copy_with_links(saved, target.root)
    found(mended(again))
    assert target.run(bundle, "restore").code == 0


def second_plan(target: Target) -> Bundle:
    """Touch one file of the first plan, leave its others, and touch a new one."""
    files: dict[str, bytes | None] = {"pack/core.py": b"V = 'second'\n", "pack/tool.py": b"T = 2\n"}
    plan = target.plan(*(planned(path, data) for path, data in files.items()))
    return target.bundle(plan, list(files.values()))


def copy_with_links(source: Path, to: Path) -> None:
    subprocess.run(("cp", "-a", str(source), str(to)), check=True, timeout=60)


def without_inodes(snapshot: dict[str, Any]) -> dict[str, Any]:
    return {path: row[:5] if len(row) == 6 else row for path, row in snapshot.items()}
