"""`./inv gc`: what is kept below out/, with size and age; only what may go goes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from deploy import caches, report
from deploy.layout import Layout

NOW = 1_800_000_000.0
DAY = 86_400
LOCKED, LOOSE, NEWEST = "a" * 64, "b" * 64, "c" * 64


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    made = Layout(tmp_path)
    made.manifest("x").parent.mkdir()
    made.lock("x").write_text(f"# {LOCKED}\nbundle: {'d' * 64}\n")
    for age, sha in ((30, LOCKED), (20, LOOSE), (10, NEWEST)):
        _file(made.cache / "wheels" / f"{sha}.whl", 10_000, age)
    _file(made.cache / "repos" / f"{LOOSE}.git" / "objects" / "pack", 4096, 5)
    (made.cache / "repos" / f"{LOOSE}.git" / "objects").chmod(0o500)
    _file(made.cache / "repos" / f"{LOOSE}.git.lock", 0, 5)
    _file(made.cache / "repos" / f"{NEWEST}.git" / "HEAD", 4096, 1)
    _file(made.out / f"x-{'d' * 12}.pyz", 5000, 9)
    _file(made.out / f"x-{'e' * 12}.pyz", 5000, 8)
    _file(made.out / f"x-{'f' * 12}.pyz", 5000, 7)
    _file(made.out / "x" / "root" / "vllm.py", 100, 90)
    return made


def _file(path: Path, size: int, age: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    for place in (path, *path.parents[:2]):
        os.utime(place, (NOW - age * DAY, NOW - age * DAY))


def survey(layout: Layout) -> dict[str, caches.Unit]:
    return {unit.path.name: unit for unit in caches.survey(layout, NOW)}


def test_each_unit_has_its_size_and_age_and_the_largest_comes_first(layout: Layout) -> None:
    units = caches.survey(layout, NOW)
    sizes = [unit.bytes for unit in units]
    assert sizes == sorted(sizes, reverse=True)
    wheel = survey(layout)[f"{LOOSE}.whl"]
    assert (wheel.kind, round(wheel.age)) == ("wheels", 20)
    assert 10_000 <= wheel.bytes <= 16_384


def test_what_a_lock_names_and_the_newest_of_each_kind_stay(layout: Layout) -> None:
    kept = {name: unit.kept for name, unit in survey(layout).items()}
    assert kept == {
        f"{LOCKED}.whl": "a lock names it",
        f"{NEWEST}.whl": "the newest of its kind",
        f"{LOOSE}.whl": "",
        f"{NEWEST}.git": "the newest of its kind",
        f"{LOOSE}.git": "",
        f"x-{'d' * 12}.pyz": "a lock names it",
        f"x-{'e' * 12}.pyz": "",
        f"x-{'f' * 12}.pyz": "the newest of its kind",
    }


def test_removing_takes_what_may_go_and_nothing_else(layout: Layout) -> None:
    before = {path for path in layout.out.rglob("*") if path.is_file()}

    gone = caches.remove(caches.survey(layout, NOW))

    after = {path for path in layout.out.rglob("*") if path.is_file()}
    assert {unit.path.name for unit in gone} == {
        f"{LOOSE}.whl", f"{LOOSE}.git", f"x-{'e' * 12}.pyz",
    }  # fmt: skip
    assert {path.name for path in before - after} == {
        f"{LOOSE}.whl", "pack", f"x-{'e' * 12}.pyz",
    }  # fmt: skip
    assert (layout.cache / "repos" / f"{LOOSE}.git.lock").exists()
    assert caches.remove(caches.survey(layout, NOW)) == []


def test_looking_removes_nothing(layout: Layout) -> None:
    before = sorted(layout.out.rglob("*"))
    caches.survey(layout, NOW)
    assert sorted(layout.out.rglob("*")) == before


def test_hard_links_are_counted_once_and_links_are_not_followed(
    layout: Layout, tmp_path: Path
) -> None:
    folder = layout.cache / "image" / "x"
    _file(folder / "one", 8192, 1)
    os.link(folder / "one", folder / "two")
    outside = tmp_path / "outside"
    _file(outside / "precious", 8192, 1)
    (folder / "link").symlink_to(outside)
    (layout.cache / "image" / "loose").symlink_to(outside)

    unit = survey(layout)["x"]
    assert 8192 <= unit.bytes < 2 * 8192 + 4096
    caches.remove(caches.survey(layout, NOW))
    assert (outside / "precious").exists()


def test_a_link_in_place_of_the_cache_is_not_walked(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    _file(tmp_path / "precious" / "a", 10, 9)
    layout.cache.mkdir(parents=True)
    (layout.cache / "wheels").symlink_to(tmp_path / "precious")
    assert caches.survey(layout, NOW) == []


def test_a_unit_that_vanishes_meanwhile_is_no_error(layout: Layout) -> None:
    units = caches.survey(layout, NOW)
    (layout.cache / "wheels" / f"{LOOSE}.whl").unlink()
    assert f"{LOOSE}.whl" not in {unit.path.name for unit in caches.remove(units)}


def test_an_empty_checkout_has_nothing(tmp_path: Path) -> None:
    assert caches.survey(Layout(tmp_path), NOW) == []
    assert report.caches_text([], [], []) == "0.0 MB may go"


def test_the_text_says_what_became_of_each(layout: Layout) -> None:
    units = caches.survey(layout, NOW)
    gone = caches.remove(units)
    text = report.caches_text(units, gone, [])
    assert text.count("  removed") == 3
    assert "kept: a lock names it" in text
    rows = report.caches_json(units, gone, [])["units"]
    assert sum(row["removed"] for row in rows) == 3


def test_what_a_process_uses_stays(layout: Layout) -> None:
    """A build in its folder, a repository that is made, and the files of a server that runs."""
    loose = layout.cache / "repos" / f"{LOOSE}.git"
    build = layout.cache / "kernels" / "old"
    for path in (build / "lock", layout.cache / "docker" / "lock"):
        _file(path, 0, 50)
    _file(layout.cache / "kernels" / "newer", 10, 2)
    _file(layout.cache / "docker" / "newest.log", 10, 1)
    for daemon, pid in (("dockerd", os.getpid()), ("ended", 2**22 + 1)):
        for suffix in ("pid", "log"):
            _file(layout.cache / "docker" / f"{daemon}.{suffix}", 10, 9)
        (layout.cache / "docker" / f"{daemon}.pid").write_text(f"{pid}\n")
    before = {name: unit.kept for name, unit in survey(layout).items()}
    with (
        loose.with_name(f"{LOOSE}.git.lock").open("w") as one,
        (build / "lock").open("w") as two,
    ):
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(two, fcntl.LOCK_EX)
        during = {name: unit.kept for name, unit in survey(layout).items()}
        caches.remove(caches.survey(layout, NOW))

    assert (before[loose.name], before["old"]) == ("", "")
    assert "lock" not in before
    used = {name for name, why in during.items() if why == "a process uses it"}
    assert used == {loose.name, "old", "dockerd.pid", "dockerd.log"}
    left = {path.name for path in (layout.cache / "docker").iterdir()}
    assert left == {"lock", "dockerd.pid", "dockerd.log", "newest.log"}


def test_the_text_of_a_dry_run_says_what_would_go_of_the_engine() -> None:
    rows = [
        {"kind": "container", "id": "c1", "kept": "", "removed": False},
        {"kind": "image", "id": "i1", "kept": "a container uses it", "removed": False},
        {"kind": "image", "id": "i2", "kept": "", "removed": True},
    ]
    lines = report.caches_text([], [], rows).splitlines()
    assert ["may go (--yes)" in line for line in lines[:3]] == [True, False, False]
    assert "kept: a container uses it" in lines[1]
    assert "removed" in lines[2]
