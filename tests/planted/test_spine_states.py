"""States of a deployed site that look like success, on the tree of the real wheel."""

from __future__ import annotations

import importlib.util
import marshal
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MODULE = "vllm/version.py"  # modified by the demo
NEW = "vllm/dcu/diag.py"
DELETED = "vllm/scripts.py"
PROGRAM = "vllm/collect_env.py"  # only its mode changed
TAG = sys.implementation.cache_tag
# What a shadowed package looks like: its own file is not what is imported.
SHADOWED = ("vllm/__init__.py", "shadowed")


def pyc(path: Path) -> Path:
    return path.parent / "__pycache__" / f"{path.stem}.{TAG}.pyc"


@contextmanager
def replaced(path: Path, text: bytes | None, *, keep_times: bool = False) -> Iterator[None]:
    """Put other bytes (or nothing) at a path, in a new inode; put the old inode back at the end."""
    aside = path.with_name(f"{path.name}.aside")
    was = os.lstat(path) if os.path.lexists(path) else None
    if was:
        path.rename(aside)
    try:
        if text is not None:
            path.write_bytes(text)
            path.chmod(was.st_mode if was else 0o644)
            if keep_times and was:
                os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        yield
    finally:
        if text is not None:
            path.unlink()
        if was:
            aside.rename(path)


def base_text(site: Any, path: str) -> bytes:
    """The bytes that the wheel has for a path."""
    with zipfile.ZipFile(wheel_of(site)) as archive:
        return archive.read(path)


def wheel_of(site: Any) -> Path:
    from deploy.layout import HERE

    sha = site.bundle.inputs["manifest"]["source"]["wheel"]["sha256"]
    return HERE.cache / "wheels" / f"{sha}.whl"


def flipped(text: bytes) -> bytes:
    """The same length, one byte changed inside a comment or a string."""
    at = len(text) // 2
    return text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]


def missing(site: Any) -> Any:
    return replaced(site.site / NEW, None)


def one_byte(site: Any) -> Any:
    path = site.site / "vllm/dcu/candidates.json"
    return replaced(path, flipped(path.read_bytes()), keep_times=True)


def still_base(site: Any) -> Any:
    return replaced(site.site / MODULE, base_text(site, MODULE))


def left_over(site: Any) -> Any:
    return replaced(site.site / DELETED, base_text(site, DELETED))


def left_over_bytecode(site: Any) -> Any:
    """A deleted module that a bare .pyc beside its place keeps importable."""
    code = compile(base_text(site, DELETED), DELETED, "exec")
    header = importlib.util.MAGIC_NUMBER + (0).to_bytes(4, "little") + bytes(8)
    return replaced((site.site / DELETED).with_suffix(".pyc"), header + marshal.dumps(code))


def stale_pyc(site: Any) -> Any:
    """Yesterday's bytecode whose recorded size and time are those of today's source."""
    path = site.site / MODULE
    was = path.stat()
    code = compile(base_text(site, MODULE), str(path), "exec")
    header = importlib.util.MAGIC_NUMBER + (0).to_bytes(4, "little")
    header += int(was.st_mtime).to_bytes(4, "little") + was.st_size.to_bytes(4, "little")
    return replaced(pyc(path), header + marshal.dumps(code))


def wrong_body(site: Any) -> Any:
    """Another module's code below the right magic, flags and source hash."""
    path = site.site / MODULE
    header = pyc(path).read_bytes()[:16]
    code = compile(base_text(site, MODULE), str(path), "exec")
    return replaced(pyc(path), header + marshal.dumps(code, 2), keep_times=True)


def not_compiled(site: Any) -> Any:
    return replaced(pyc(site.site / MODULE), None)


@contextmanager
def wrong_mode(site: Any) -> Iterator[None]:
    path = site.site / PROGRAM
    path.chmod(0o644)
    yield
    path.chmod(0o755)


@contextmanager
def link_to_equal_bytes(site: Any) -> Iterator[None]:
    """The right bytes at the wrong place: a link that a later edit elsewhere would follow."""
    path = site.site / NEW
    elsewhere = site.home / "diag.py"
    elsewhere.write_bytes(path.read_bytes())
    aside = path.with_name("diag.aside")
    path.rename(aside)
    path.symlink_to(elsewhere)
    try:
        yield
    finally:
        path.unlink()
        aside.rename(path)


FILES: dict[str, tuple[Callable[[Any], Any], set[tuple[str, str]]]] = {
    "a file is missing": (missing, {(NEW, "missing")}),
    "one byte changed, size and mtime kept": (one_byte, {("vllm/dcu/candidates.json", "changed")}),
    "a file is still the base's": (still_base, {(MODULE, "still base")}),
    "a deleted module is left over": (left_over, {(DELETED, "left over")}),
    "a deleted module's bare .pyc is left over": (left_over_bytecode, {(DELETED, "left over")}),
    "stale .pyc of equal size and mtime": (stale_pyc, {(MODULE, "stale pyc")}),
    ".pyc with a right header and a wrong body": (wrong_body, {(MODULE, "wrong pyc body")}),
    "a module was never compiled": (not_compiled, {(MODULE, "not compiled")}),
    "a mode was lost": (wrong_mode, {(PROGRAM, "wrong mode")}),
    "a link to equal bytes elsewhere": (link_to_equal_bytes, {(NEW, "changed")}),
}


@pytest.mark.parametrize("recompile", [False, True], ids=["by-receipt", "recompiled"])
@pytest.mark.parametrize("name", FILES)
def test_a_planted_file_is_found_and_its_neighbours_stay_silent(
    name: str, recompile: bool, clean: Any, row: Any
) -> None:
    plant, expected = FILES[name]

    with plant(clean):
        code, said = clean.said(*(["--recompile"] if recompile else []))

    assert (code, said) == (10, expected)
    if not recompile:
        row(name, "verify: " + ", ".join(f"{path}: {state}" for path, state in sorted(expected)))


@contextmanager
def package(folder: Path, text: str | None = "V = 'shadow'\n") -> Iterator[None]:
    """A second `vllm` below a folder, with or without an __init__.py."""
    (folder / "vllm").mkdir(parents=True)
    if text is not None:
        (folder / "vllm/__init__.py").write_text(text)
    try:
        yield
    finally:
        shutil.rmtree(folder / "vllm")


def user_site(site: Any) -> Path:
    ask = "import site; print(site.getusersitepackages())"
    env = {"HOME": str(site.home), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [site.python, "-c", ask], env=env, capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip())


def test_a_vllm_in_the_launch_folder_shadows_the_site_from_there_only(clean: Any, row: Any) -> None:
    with package(clean.launch):
        said = clean.said()

    assert said == (10, {SHADOWED, ("launch", "shadowed")})
    row("a vllm/ lies in the launch folder", "origin: launch folder")


def test_a_vllm_on_pythonpath_shadows_the_site(clean: Any, row: Any, tmp_path: Path) -> None:
    with package(tmp_path):
        said = clean.said(PYTHONPATH=str(tmp_path))
    unrelated = clean.said(PYTHONPATH=str(tmp_path))

    assert said == (10, {SHADOWED, ("empty", "shadowed"), ("launch", "shadowed")})
    assert unrelated == (0, set())
    row("a vllm/ on PYTHONPATH", "origin: both folders")


def test_a_vllm_in_the_user_site_shadows_the_site(clean: Any, row: Any) -> None:
    with package(user_site(clean)):
        said = clean.said()

    assert said == (10, {SHADOWED, ("empty", "shadowed"), ("launch", "shadowed")})
    row("a vllm/ in the user site", "origin: both folders")


def test_a_pth_file_that_puts_another_folder_first_shadows_the_site(
    clean: Any, row: Any, tmp_path: Path
) -> None:
    pth = clean.site / "zz-dev.pth"
    pth.write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n")
    with package(tmp_path):
        said = clean.said()
    without = clean.said()
    pth.unlink()

    assert said == (10, {SHADOWED, ("empty", "shadowed"), ("launch", "shadowed")})
    assert without == (0, set())  # a .pth alone is no fault
    row("a .pth puts another folder first", "origin: both folders")


def test_a_site_whose_package_became_a_namespace_folder_is_not_installed(
    clean: Any, row: Any
) -> None:
    with replaced(clean.site / "vllm/__init__.py", None):
        code, evidence = clean.agent("verify")

    assert code == 10
    places = evidence["origin"]
    assert {p: o["state"] for p, o in places.items()} == {"empty": "shadowed", "launch": "shadowed"}
    assert all("namespace" in probe["why"] for probe in places.values())
    faults = {(r["path"], r["state"]) for r in evidence["files"] if r["state"] != "ok"}
    assert faults == {SHADOWED}
    row("vllm/ without __init__.py is a namespace", "origin: both folders")


def test_a_namespace_folder_before_the_site_does_not_shadow_a_real_package(
    clean: Any, tmp_path: Path
) -> None:
    with package(tmp_path, None):
        assert clean.said(PYTHONPATH=str(tmp_path)) == (0, set())


def test_a_wheel_unpacked_again_over_the_overlay_is_found_file_by_file(
    clean: Any, row: Any
) -> None:
    owned = [entry.path for entry in clean.bundle.plan.files]
    with zipfile.ZipFile(wheel_of(clean)) as archive:
        back = {path: archive.read(path) for path in owned if path in archive.namelist()}
    plants = [replaced(clean.site / path, text) for path, text in sorted(back.items())]

    for plant in plants:
        plant.__enter__()
    try:
        (clean.site / PROGRAM).chmod(0o644)
        code, said = clean.said()
    finally:
        for plant in reversed(plants):
            plant.__exit__(None, None, None)

    states = dict(said)
    assert code == 10
    assert set(states) == set(back)
    assert states[MODULE] == "still base"
    assert states[DELETED] == "left over"
    assert states[PROGRAM] == "wrong mode"
    row("the wheel was unpacked again over it", f"verify: {len(states)} files, each by its state")


CALLS = ("write", "linkat", "renameat", "unlinkat", "mkdirat", "fchmod", "fsync", "syncfs")


def kill_points(site: Any, log: Path) -> list[tuple[str, int]]:
    """Every system call of a whole deploy that changes something, by name and count."""
    argv = ["strace", "-o", str(log), "-e", f"trace={','.join(CALLS)}"]
    assert site.agent("deploy", under=argv)[0] == 0
    names = [line.split("(")[0] for line in log.read_text().splitlines() if "(" in line]
    return [(name, n) for name in CALLS for n in range(1, names.count(name) + 1)]


def owned(site: Any) -> dict[str, bytes | None]:
    paths = [site.site / entry.path for entry in site.bundle.plan.files]
    return {str(path): path.read_bytes() if path.exists() else None for path in paths}


def whole(site: Any) -> dict[str, tuple[int, int, int, int]]:
    """Inode, mode, size and mtime of every file of the package; nothing of the agent's own."""
    found = {}
    for folder, _, names in os.walk(site.site / "vllm"):
        for name in names:
            was = os.lstat(os.path.join(folder, name))
            at = (was.st_ino, was.st_mode, was.st_size, was.st_mtime_ns)
            found[os.path.join(folder, name)] = at
    return found


@pytest.mark.timeout(1200)
def test_a_deploy_killed_at_any_change_leaves_old_or_new_and_is_mended_by_the_next(
    pristine: Any, row: Any, tmp_path: Path
) -> None:
    site = pristine
    before, old = whole(site), owned(site)
    points = kill_points(site, tmp_path / "calls")
    new = owned(site)
    assert site.agent("restore")[0] == 0
    assert whole(site) == before

    for call, number in points:
        inject = f"inject={call}:signal=KILL:when={number}"
        argv = ["strace", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject]
        assert site.killed("deploy", under=argv), (call, number)
        now = owned(site)
        assert all(now[path] in (old[path], new[path]) for path in now), (call, number)
        code, said = site.said()
        # With all files new, verify still says 10 until the next call has closed the journal.
        assert code == 10 or (code == 0 and now == new and not said), (call, number, code, said)
        assert site.agent("deploy")[0] == 0, (call, number)
        assert site.said() == (0, set()), (call, number)
        assert site.agent("restore")[0] == 0, (call, number)
        assert whole(site) == before, (call, number)
    row(f"kill -9 at each of {len(points)} changes of a deploy", "old or new bytes at once; verify")
