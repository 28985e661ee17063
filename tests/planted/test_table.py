"""The table itself: no item of it can be missing without a run that says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.layout import HERE
from tests.table import ITEMS, planters


def test_every_item_of_the_table_is_planted_by_a_test() -> None:
    assert set(planters()) == set(ITEMS)
    assert len(set(ITEMS)) == len(ITEMS)


PLANTING = """
import pytest
from tests.table import plants

@plants("a read-only site")
def test_one(found):
    {one}

@plants("an immutable file")
def test_two(found):
    {two}
"""
NOTED = "found('exit 6')"


@pytest.fixture
def frame(tmp_path: Path) -> Path:
    """A project of its own whose table has two items."""
    (tmp_path / "tests/area").mkdir(parents=True)
    for name in ("tests/conftest.py", "pyproject.toml"):
        shutil.copy(HERE.top / name, tmp_path / name)
    text = (HERE.top / "tests/table.py").read_text()
    head, rest = text.split("ITEMS = (", 1)
    two = '"a read-only site", "an immutable file")'
    (tmp_path / "tests/table.py").write_text(head + "ITEMS = (" + two + rest.split("\n)", 1)[1])
    return tmp_path


def run(frame: Path, one: str, two: str, *options: str) -> tuple[int, str]:
    (frame / "tests/area/test_frame.py").write_text(PLANTING.format(one=one, two=two))
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    done = subprocess.run(argv, cwd=frame, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stdout


@pytest.mark.parametrize("processes", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_rows_of_a_whole_run_are_printed(frame: Path, processes: tuple[str, ...]) -> None:
    code, out = run(frame, NOTED, NOTED, *processes)

    assert code == 0
    for name in ("a read-only site", "an immutable file"):
        assert f"{name:19}exit 6  silent; clean state passes" in out


def test_a_test_that_plants_and_does_not_say_what_found_it_fails(frame: Path) -> None:
    code, out = run(frame, NOTED, "pass")

    assert code == 1
    assert "an immutable file  NO ROW" in out


def test_an_item_that_could_not_be_planted_is_printed_with_the_reason(frame: Path) -> None:
    code, out = run(frame, NOTED, "pytest.skip('no chattr here')")

    assert code == 0
    assert "an immutable file  NOT PLANTED: Skipped: no chattr here" in out


def test_an_item_that_no_test_plants_any_more_fails_a_whole_run(frame: Path) -> None:
    text = PLANTING.replace('@plants("an immutable file")', '@plants("a read-only site")')
    (frame / "tests/area/test_frame.py").write_text(text.format(one=NOTED, two=NOTED))
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = subprocess.run(argv, cwd=frame, capture_output=True, text=True, check=False, timeout=60)

    assert done.returncode == 1
    assert "an immutable file  NO ROW" in done.stdout


def test_a_part_of_the_tests_is_not_asked_for_the_whole_table(frame: Path) -> None:
    assert run(frame, NOTED, NOTED, "-k", "test_one")[0] == 0
