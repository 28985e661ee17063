"""Whatever is damaged in what is handed in: the table is printed, and its row does not say ok."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy import inspection
from tests.measure.test_inspection import EVIDENCE, FIVE, RESULT, measured, submission, verified

TABLE = "Name,Calls,TotalDurationNs,AverageNs,Percentage\nk,2,10,5,100\nTotal,2,10,5,100\n"
GONE = object()
VALUES = st.one_of(
    st.just(GONE),
    st.sampled_from([[], {}, [{}], {"a": 1}, [[]], 10**400, 2**63, float("inf"), float("nan")]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
)
# What may stand there without a lie: it is for people, not known to all, or nothing rests on it.
FREE_OF_EVIDENCE = {("outcome",), ("python",), ("traps",), ("gates",)}
# The least that every record says, by what is asked of it; ... is any place of a list or mapping.
OF_RECORD: tuple[tuple[Any, ...], ...] = (
    ("schema",), ("name",), ("plan",), ("inputs",), ("locked",), ("locked", "buckets"),
    ("locked", "buckets", ...), ("locked", "buckets", ..., ...), ("locked", "flags"), ("flags",),
    ("flags", ...), ("buckets",), ("buckets", ...), ("buckets", ..., "bucket"),
    ("buckets", ..., "sha256"), ("buckets", ..., "requests"), ("buckets", ..., "rounds"),
    ("buckets", ..., "rounds", ...), ("buckets", ..., "rounds", ..., "round"),
    ("buckets", ..., "rounds", ..., "before"), ("buckets", ..., "rounds", ..., "after"),
    ("buckets", ..., "rounds", ..., "before", ...),
    ("buckets", ..., "rounds", ..., "result"),
    ("buckets", ..., "rounds", ..., "result", "num_prompts"),
    ("buckets", ..., "rounds", ..., "result", "completed"),
)  # fmt: skip


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, itself left out."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        yield (*at, key)
        if isinstance(child, dict | list):
            yield from places(child, (*at, key))


def fits(place: tuple[Any, ...], pattern: tuple[Any, ...]) -> bool:
    return len(place) == len(pattern) and all(
        wanted is ... or wanted == key for key, wanted in zip(place, pattern)
    )


def damaged(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    found = copy.deepcopy(document)
    holder = found
    for key in place[:-1]:
        holder = holder[key]
    if value is GONE:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one of everything, all of it right."""
    folder = tmp_path_factory.mktemp("whole")
    path = submission(folder, FIVE)
    (folder / "evidence.json").write_text(json.dumps(verified(path)))
    (folder / "bench.json").write_text(json.dumps(measured(path)))
    (folder / "t.hipkernel.csv").write_text(TABLE)
    assert {row.state for row in inspection.inspect(folder)} == {inspection.OK}
    return folder


def states(folder: Path, what: str) -> set[str]:
    return {row.state for row in inspection.inspect(folder) if row.what == what}


def same(one: Any, other: Any) -> bool:
    """Equal to the reader: 0 and false are one exit code."""
    return one is not GONE and bool(one == other)


@pytest.fixture
def folder(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(whole, tmp_path_factory.mktemp("copy") / "folder"))


def test_no_damaged_evidence_is_called_right(folder: Path) -> None:
    good = json.loads((folder / "evidence.json").read_text())
    known = [
        place for place in places(good)
        if place[:1] not in FREE_OF_EVIDENCE and not (place[0] == "origin" and place[-1] == "why")
    ]  # fmt: skip

    @settings(max_examples=100, deadline=None)
    @given(place=st.sampled_from(known), value=VALUES)
    def law(place: tuple[Any, ...], value: Any) -> None:
        bad = damaged(good, place, value)
        (folder / "evidence.json").write_text(json.dumps(bad))
        old = good
        for key in place:
            old = old[key]
        if not same(value, old):
            assert states(folder, EVIDENCE) == {inspection.FAILED}, (place, value)

    law()


def test_no_damaged_record_is_called_right(folder: Path) -> None:
    good = json.loads((folder / "bench.json").read_text())
    every = list(places(good))
    known = [place for place in every if any(fits(place, pattern) for pattern in OF_RECORD)]
    assert len(known) > 40

    @settings(max_examples=150, deadline=None)
    @given(place=st.sampled_from(known), value=VALUES)
    def law(place: tuple[Any, ...], value: Any) -> None:
        bad = damaged(good, place, value)
        (folder / "bench.json").write_text(json.dumps(bad))
        old = good
        for key in place:
            old = old[key]
        if not same(value, old):
            assert states(folder, RESULT) == {inspection.FAILED}, (place, value)

    law()


def test_the_table_is_printed_whatever_a_record_or_evidence_holds(folder: Path) -> None:
    good = {
        name: json.loads((folder / name).read_text())
        for name in ("evidence.json", "bench.json", "result.json")
    }
    known = [(name, place) for name, found in good.items() for place in places(found)]

    @settings(max_examples=150, deadline=None)
    @given(at=st.sampled_from(known), value=VALUES)
    def law(at: tuple[str, tuple[Any, ...]], value: Any) -> None:
        name, place = at
        (folder / name).write_text(json.dumps(damaged(good[name], place, value)))
        assert len(inspection.inspect(folder)) > 15

    law()


def test_damaged_bytes_never_keep_the_table_from_being_printed(folder: Path) -> None:
    good = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    bundle = next(name for name in good if name.endswith(".pyz"))
    pinned = {bundle, *(name for name in good if name.endswith(".sh"))}

    @settings(max_examples=100, deadline=None)
    @given(
        name=st.sampled_from(sorted(good)), data=st.binary(max_size=8), gone=st.integers(0, 40),
        at=st.integers(min_value=0),
    )  # fmt: skip
    def law(name: str, data: bytes, gone: int, at: int) -> None:
        old = good[name]
        at %= len(old) + 1
        new = old[:at] + data + old[at + gone :]
        (folder / name).write_bytes(new)
        try:
            rows = inspection.inspect(folder)
        finally:
            (folder / name).write_bytes(old)
        if name in pinned and new != old:
            assert inspection.FAILED in {row.state for row in rows}, name

    law()
