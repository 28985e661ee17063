"""Disks, owners, signals, locks and processes that get in the way of a deploy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.agent.target import (
    BASE_FILES,
    Bundle,
    Target,
    assert_usable,
    compile_all,
    difference,
    planned,
)
from tests.table import Found, plants

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and chattr")
needs_strace = pytest.mark.skipif(not shutil.which("strace"), reason="apt-get install strace")
BIG = "pack/big.bin"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Target]]:
    """Return a function that makes a target on a tmpfs with these mount options."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = Target(disk / "root")

    def make(options: str) -> Target:
        argv = ("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk))
        subprocess.run(argv, check=True, timeout=60)
        made.make(BASE_FILES)
        return made

    yield make
    assert_usable(made)
    subprocess.run(("umount", "-l", str(disk)), check=True, timeout=60)


def bundle_beside(target: Target, folder: Path, files: dict[str, bytes | None]) -> Bundle:
    """Write a bundle that does not lie on the target's own small disk."""
    plan = target.plan(*(planned(path, data) for path, data in files.items()))
    from tests.agent.target import state

    blobs = {state(data).sha256: data for data in files.values() if data is not None}
    return Bundle.write(folder / "beside.pyz", plan, blobs)


USUAL: dict[str, bytes | None] = {"pack/core.py": b"V = 'ours'\n", "pack/fresh/a.py": b"A = 1\n"}


@plants("disk full before the commit point")
@needs_root
def test_too_little_room_is_seen_before_anything_is_written(
    small_disk: Callable[[str], Target], tmp_path: Path, found: Found
) -> None:
    target = small_disk("size=6m")
    before = target.snapshot()
    bundle = bundle_beside(target, tmp_path, {**USUAL, BIG: os.urandom(3 << 20)})

    outcome = target.run(bundle, "deploy")

    assert (outcome.code, outcome.evidence["outcome"]) == (6, "refused")
    assert "bytes free" in outcome.err
    assert target.snapshot() == before
    found(f"deploy: {outcome.told}")


@plants("disk full while staging")
@needs_root
@pytest.mark.parametrize("spare", range(12))
def test_a_disk_that_fills_up_while_staging_leaves_nothing_behind(
    small_disk: Callable[[str], Target], tmp_path: Path, spare: int, found: Found
) -> None:
    target = small_disk("size=20m,nr_inodes=200")
    before = target.snapshot()
    bundle = bundle_beside(target, tmp_path, USUAL)
    fillers = fill_inodes(target.root.parent, leave=spare)

    outcome = target.run(bundle, "deploy")

    for filler in fillers:
        filler.unlink()
    if outcome.code == 0:
        found("nothing to find: there was just room enough")
        assert spare > 8
        outcome = target.run(bundle, "restore")
        assert outcome.code == 0
    else:
        assert (outcome.code, outcome.evidence["outcome"]) == (6, "refused")
        assert "No space left" in outcome.err
        found(f"deploy: {outcome.reason}")
    assert difference(before, target.snapshot()) == {}


def fill_inodes(disk: Path, *, leave: int) -> list[Path]:
    made: list[Path] = []
    while os.statvfs(disk).f_ffree > leave:
        made.append(disk / f"filler{len(made)}")
        made[-1].touch()
    return made


def broken(target: Target, bundle: Bundle, verb: str, call: str, how: str) -> tuple[int, str]:
    wrap = ("strace", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:{how}")
    outcome = target.run(bundle, verb, wrap=wrap)
    return outcome.code, outcome.err


@plants("disk full after the commit point")
@needs_strace
@pytest.mark.slow
def test_a_failure_after_the_commit_point_is_rolled_back(target: Target, found: Found) -> None:
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()
    codes = []
    for number in range(1, 12):
        code, err = broken(target, bundle, "deploy", "renameat", f"error=ENOSPC:when={number}")
        codes.append(code)
        assert "rolled back" in err
        assert "No space left" in err
        assert difference(before, target.snapshot()) == {}
    assert set(codes) == {7}
    found(f"deploy: exit 7 at each of {len(codes)} renames: rolled back")


@needs_strace
@pytest.mark.slow
def test_a_failure_that_cannot_be_rolled_back_needs_a_person_and_then_mends(
    target: Target,
) -> None:
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()
    for number in range(2, 12, 3):
        code, err = broken(target, bundle, "deploy", "renameat", f"error=EIO:when={number}+")
        assert code == 8, err
        assert "journal" in err
        assert target.run(bundle, "status").evidence["met"] == "interrupted"
        assert target.run(bundle, "verify").code == 10
        assert target.run(bundle, "restore").code == 0
        assert difference(before, target.snapshot()) == {}


@needs_strace
@pytest.mark.slow
@pytest.mark.parametrize("call", ["fsync", "syncfs", "linkat", "mkdirat", "fchmod"])
def test_an_error_of_any_call_leaves_old_or_new(target: Target, call: str) -> None:
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()
    codes = []
    for number in range(1, 20):
        code, err = broken(target, bundle, "deploy", call, f"error=EIO:when={number}")
        codes.append(code)
        if code == 6:
            assert difference(before, target.snapshot()) == {}, err
        if code == 0:
            break
        assert code in (6, 7, 8), err
        assert target.run(bundle, "restore").code == 0
        assert difference(before, target.snapshot()) == {}
    assert codes[0] == 6
    assert codes[-1] == 0


def faulty(*injections: str) -> tuple[str, ...]:
    options = [part for text in injections for part in ("-e", f"inject={text}")]
    calls = ",".join(sorted({text.partition(":")[0] for text in injections}))
    return ("strace", "-o", "/dev/null", "-e", f"trace={calls}", *options)


@needs_strace
@pytest.mark.slow
def test_a_commit_that_did_not_reach_the_disk_is_not_finished_after_a_kill(
    target: Target,
) -> None:
    """The line may stand in the file though its fsync failed: the abort must take it back first."""
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()
    # fsync 1 and 2 are the journal's first line and its folder, 3 is the commit line.
    for number in range(1, 7):
        wrap = faulty("fsync:error=EIO:when=3", f"unlinkat:signal=KILL:when={number + 1}")
        assert target.run(bundle, "deploy", wrap=wrap).code == -signal.SIGKILL

        after = target.run(bundle, "restore")

        assert after.code == 0
        assert after.evidence["incidental"]["recovered"] == "undone"
        assert difference(before, target.snapshot()) == {}


@needs_strace
@pytest.mark.slow
def test_a_roll_back_that_was_killed_at_its_end_is_not_rolled_back_twice(target: Target) -> None:
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()
    steps = len(target.run(bundle, "deploy").evidence["changes"]["put"])
    assert target.run(bundle, "restore").code == 0
    for number in range(steps, 12):
        # syncfs 1 is the one before the commit, 2 comes when all is taken back.
        wrap = faulty(f"renameat:error=ENOSPC:when={number}", "syncfs:signal=KILL:when=2")
        if target.run(bundle, "deploy", wrap=wrap).code != -signal.SIGKILL:
            break
        assert target.run(bundle, "status").evidence["met"] == "interrupted"
        assert target.run(bundle, "restore").code == 0
        assert difference(before, target.snapshot()) == {}
    assert number > 8


@needs_strace
@pytest.mark.slow
def test_a_roll_back_that_was_killed_while_it_cleaned_up_is_not_repeated(target: Target) -> None:
    """Once all is taken back, "the new name is gone" no longer tells that a step was done."""
    compile_all(target)
    before = target.snapshot()
    bundle = target.usual()
    for number in range(1, 40):
        # Nine renames are done by then, one of bytecode into the place of bytecode among them.
        wrap = faulty("renameat:error=ENOSPC:when=10", f"unlinkat:signal=KILL:when={number}")
        code = target.run(bundle, "deploy", wrap=wrap).code
        assert target.run(bundle, "restore").code == 0, number
        assert difference(before, target.snapshot()) == {}, number
        if code != -signal.SIGKILL:
            break
    assert (code, number > 12) == (7, True)


@plants("an I/O error on read-back")
@needs_strace
def test_a_staged_file_that_does_not_read_back_stops_the_deploy(
    target: Target, found: Found
) -> None:
    before = target.snapshot()
    bundle = target.usual()
    # Only reads of this very file are made to fail: the staged twin of the first put.
    staged = [target.top / "pack" / f".dcu-bundle-1-{n}.tmp" for n in range(8)]
    paths = [option for path in staged for option in ("-P", str(path))]
    wrap = ("strace", "-o", "/dev/null", *paths, "-e", "inject=read:error=EIO")

    outcome = target.run(bundle, "deploy", wrap=wrap)

    assert outcome.code == 6
    assert "Input/output error" in outcome.err
    assert target.snapshot() == before
    found(f"deploy: {outcome.reason}")


@plants("a read-only site")
@needs_root
def test_a_read_only_site_is_unfit(
    small_disk: Callable[[str], Target], tmp_path: Path, found: Found
) -> None:
    target = small_disk("size=20m")
    bundle = bundle_beside(target, tmp_path, USUAL)
    disk = str(target.root.parent)
    subprocess.run(("mount", "-o", "remount,ro", disk), check=True, timeout=60)
    before = target.snapshot()

    outcome = target.run(bundle, "deploy")

    assert (outcome.code, outcome.evidence["outcome"]) == (3, "unfit")
    assert "read-only" in outcome.err
    assert target.run(bundle, "check").code == 10
    assert target.snapshot() == before
    found(f"deploy: {outcome.reason}")
    subprocess.run(("mount", "-o", "remount,rw", disk), check=True, timeout=60)


@plants("an immutable file")
@needs_root
@pytest.mark.parametrize("place", ["pack/core.py", "pack"])
def test_an_immutable_file_or_folder_refuses_before_the_commit_point(
    target: Target, place: str, found: Found
) -> None:
    before = target.snapshot()
    path = str(target.top / place)
    if subprocess.run(("chattr", "+i", path), check=False, timeout=60).returncode:
        pytest.skip("this file system knows no immutable files")
    try:
        outcome = target.run(target.usual(), "deploy")
        after = target.snapshot()
    finally:
        subprocess.run(("chattr", "-i", path), check=True, timeout=60)

    assert outcome.code == 6
    assert "not permitted" in outcome.err
    assert after == before
    found(f"deploy: {outcome.reason}")


@pytest.fixture
def open_target() -> Iterator[Target]:
    """Return a target whose way in is open to every user."""
    with tempfile.TemporaryDirectory(prefix="open-") as name:
        os.chmod(name, 0o755)
        made = Target(Path(name) / "root", python="/usr/bin/python3")
        made.make(BASE_FILES)
        before = {place: os.lstat(place) for place in made.root.rglob("*")}
        yield made
        for place, info in before.items():
            os.chown(place, info.st_uid, info.st_gid, follow_symlinks=False)
        assert_usable(made)


NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


@plants("no right to write")
@needs_root
@pytest.mark.skipif(not shutil.which("setpriv"), reason="apt-get install util-linux")
def test_without_the_right_to_write_nothing_changes(open_target: Target, found: Found) -> None:
    bundle = open_target.usual()
    os.chmod(bundle.path, 0o644)
    before = open_target.snapshot()

    outcome = open_target.run(bundle, "deploy", wrap=NOBODY)

    assert outcome.code == 6
    assert "Permission denied" in outcome.err
    assert open_target.snapshot() == before
    found(f"deploy: {outcome.reason}")


@plants("a file of another owner")
@needs_root
@pytest.mark.skipif(not shutil.which("setpriv"), reason="apt-get install util-linux")
def test_a_file_of_another_owner_in_an_own_site_is_refused_not_taken_over(
    open_target: Target, found: Found
) -> None:
    for folder, folders, files in os.walk(open_target.root):
        for name in ["", *folders, *files]:
            os.chown(os.path.join(folder, name), 65534, 65534)
    os.chown(open_target.top / "pack/core.py", 1000, 1000)
    bundle = open_target.usual()
    os.chmod(bundle.path, 0o644)
    before = open_target.snapshot()

    outcome = open_target.run(bundle, "deploy", wrap=NOBODY)

    assert outcome.code == 6
    assert "not permitted" in outcome.err
    assert open_target.snapshot() == before
    found(f"deploy: {outcome.reason}")


@needs_strace
@plants("a stale lock of a dead process")
def test_the_lock_of_a_process_that_died_holds_nobody_up(target: Target, found: Found) -> None:
    bundle = target.usual()
    options = ("--operator", "who died")
    died = target.run(bundle, "deploy", *options, wrap=faulty("syncfs:signal=KILL:when=1"))
    assert died.code == -signal.SIGKILL
    assert b"who died" in target.read(".dcu-bundle/lock")

    after = target.run(bundle, "deploy")

    assert (after.code, after.evidence["outcome"]) == (0, "deployed")
    assert not target.exists(".dcu-bundle/lock")
    assert target.run(bundle, "restore").code == 0
    found("nothing to find: the next deploy is not held up")


def slowed(target: Target, bundle: Bundle, call: str, *options: str) -> subprocess.Popen[str]:
    """Start a deploy that waits a second before every such call."""
    argv = ["strace", "-o", "/dev/null", "-e", f"trace={call}"]
    argv += ["-e", f"inject={call}:delay_enter=1000000"]
    argv += [target.python, "-I", "-S", str(bundle.path), "deploy", "--root", str(target.root)]
    return subprocess.Popen(
        [*argv, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for(path: Path, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} did not come"
        time.sleep(0.01)


def agent_of(tracer: int) -> int:
    return int(Path(f"/proc/{tracer}/task/{tracer}/children").read_text().split()[0])


@plants("two deploys at once")
@needs_strace
def test_a_second_operator_is_told_who_and_since_when_and_can_wait(
    target: Target, found: Found
) -> None:
    bundle = target.usual()
    first = slowed(target, bundle, "syncfs", "--operator", "first at desk 7")
    wait_for(target.top / ".dcu-bundle/lock")
    agent = agent_of(first.pid)

    refused = target.run(bundle, "deploy")
    waited = target.run(bundle, "deploy", "--wait", "30")

    _, err = first.communicate(timeout=30)
    assert first.returncode == 0, err
    assert refused.code == 6
    for part in ("first at desk 7", f"pid {agent}", "since 20"):
        assert part in refused.err
    assert (waited.code, waited.evidence["outcome"]) == (0, "nothing to do")
    assert not target.exists(".dcu-bundle/lock")
    found(f"deploy: {refused.told}; --wait")
    assert target.run(bundle, "restore").code == 0


@needs_strace
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_the_commit_point_aborts_and_after_it_does_not(
    target: Target, number: signal.Signals
) -> None:
    before = target.snapshot()
    bundle = target.usual()

    early = slowed(target, bundle, "syncfs")
    wait_for(target.top / ".dcu-bundle/journal")
    os.kill(agent_of(early.pid), number)
    out, err = early.communicate(timeout=30)

    assert early.returncode == 130
    assert json.loads(out)["outcome"] == "interrupted"
    assert number.name in err
    assert difference(before, target.snapshot()) == {}

    late = slowed(target, bundle, "renameat")
    wait_for(target.top / ".dcu-bundle/journal")
    wait_for_text(target.top / ".dcu-bundle/journal", "commit")
    os.kill(agent_of(late.pid), number)
    out, err = late.communicate(timeout=60)

    assert late.returncode == 0, err
    assert target.run(bundle, "verify").code == 0


def wait_for_text(path: Path, text: str) -> None:
    end = time.monotonic() + 20
    while text not in path.read_text():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_end_of_the_line_aborts_before_the_commit_point(target: Target) -> None:
    bundle = target.usual()
    before = target.snapshot()
    code = (
        "import io, json, os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from agent.main import run; from agent.blobs import ZipBlobs\n"
        "far, near = os.pipe(); os.close(near) if sys.argv[3] == 'gone' else None\n"
        "blobs = ZipBlobs(sys.argv[1]); plan = json.loads(b''.join(blobs.entry('plan.json')))\n"
        "request = {'verb': 'deploy', 'plan': plan, 'root': sys.argv[2], 'line': far}\n"
        "sys.exit(run(request, blobs, sys.stdout, sys.stderr))\n"
    )
    argv = [target.python, "-I", "-S", "-c", code, str(bundle.path), str(target.root)]

    gone = subprocess.run([*argv, "gone"], capture_output=True, text=True, check=False, timeout=60)
    after = target.snapshot()
    there = subprocess.run([*argv, "there"], capture_output=True, check=False, timeout=60)

    assert gone.returncode == 130
    assert "end of the line" in gone.stderr
    assert difference(before, after) == {}
    assert there.returncode == 0


def test_nobody_reading_the_progress_does_not_stop_it(target: Target) -> None:
    bundle = target.usual()
    far, near = os.pipe()
    os.close(far)
    argv = [target.python, "-I", "-S", str(bundle.path), "deploy", "--root", str(target.root)]
    done = subprocess.run(argv, stdout=near, stderr=near, check=False, timeout=60)
    os.close(near)
    assert done.returncode == 8  # done, and nobody could be told
    assert target.run(bundle, "verify").code == 0


MAP = (
    "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=1)\n"
    "print('mapped', flush=True); sys.stdin.readline(); print(m[:8], flush=True)\n"
)


@plants("a mapped .so")
def test_a_process_that_maps_a_file_is_named_and_lives_on_with_its_old_bytes(
    target: Target, found: Found
) -> None:
    old, new = b"OLD BYTES" * 1000, b"NEW BYTES" * 1000
    target.write("pack/ext.so", old)
    bundle = target.bundle(target.plan(planned("pack/ext.so", new, assume=[old])), [new])
    argv = [sys.executable, "-c", MAP, str(target.top / "pack/ext.so")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout
        assert user.stdout.readline() == "mapped\n"

        refused = target.run(bundle, "deploy")
        assert target.read("pack/ext.so") == old
        forced = target.run(bundle, "deploy", "--force-running")
        out, _ = user.communicate("\n", timeout=30)

    assert refused.code == 6
    assert f"pid {user.pid} " in refused.err
    assert "ext.so" in refused.err
    assert forced.code == 0
    assert target.read("pack/ext.so") == new
    assert out == "b'OLD BYTE'\n"
    found(f"deploy: {refused.told}: its pid")
    assert target.run(bundle, "restore").code == 0


def test_a_reinstalled_wheel_is_seen_file_by_file(target: Target) -> None:
    extension = b"\x7fELF custom"
    files = {"pack/core.py": b"V = 'ours'\n", "pack/ext.so": extension}
    bundle = target.usual(files)
    target.run(bundle, "deploy")
    assert target.states(bundle=bundle) == {}

    target.write("pack/core.py", BASE_FILES["pack/core.py"])
    os.unlink(target.top / "pack/ext.so")
    outcome = target.run(bundle, "verify")

    assert outcome.states == {"pack/core.py": "still base", "pack/ext.so": "missing"}
    assert outcome.evidence["met"] == "drifted"
    assert target.run(bundle, "deploy").code == 0
    assert target.states(bundle=bundle) == {}


@plants("a clock off by years")
def test_clocks_that_are_off_by_years_do_not_matter(target: Target, found: Found) -> None:
    bundle = target.usual()
    for year in (0, 4 * 10**18):
        for folder, _, names in os.walk(target.top):
            for name in names:
                os.utime(os.path.join(folder, name), ns=(year, year))
        before = target.snapshot()
        assert target.run(bundle, "deploy").code == 0
        assert target.states(bundle=bundle) == {}
        assert target.imported("pack.core") == "ours"
        assert target.run(bundle, "restore").code == 0
        assert difference(before, target.snapshot()) == {}
    found("nothing to find: deploy, verify, import, restore")


@plants("a link swapped in the middle")
def test_a_link_swapped_in_the_middle_never_leads_out(target: Target, found: Found) -> None:
    bundle = target.usual()
    outside = target.root.parent / "outside"
    shutil.copytree(target.top / "pack", outside)
    before = {p.name: (p.read_bytes(), p.stat().st_ino) for p in outside.glob("*.*")}
    pack, aside, link = (target.top / n for n in ("pack", "pack.aside", "pack.link"))
    link.symlink_to(outside)
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            os.rename(pack, aside)
            os.rename(link, pack)
            time.sleep(0.001)
            os.rename(pack, link)
            os.rename(aside, pack)
            time.sleep(0.001)

    swapper = threading.Thread(target=swap)
    swapper.start()
    codes = []
    try:
        for _ in range(8):
            codes += [target.run(bundle, verb).code for verb in ("deploy", "restore")]
    finally:
        stop.set()
        swapper.join()

    assert set(codes) <= {0, 3, 6, 7, 8}  # an answer every time, never a traceback
    assert {p.name: (p.read_bytes(), p.stat().st_ino) for p in outside.glob("*.*")} == before
    assert sorted(p.name for p in outside.iterdir()) == sorted({*before, "lonely"})
    link.unlink()
    found(
        "the descriptors: nothing left the root; exits " + ", ".join(map(str, sorted(set(codes))))
    )
    assert target.run(bundle, "restore").code == 0
