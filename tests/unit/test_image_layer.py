"""The layer's bytes: golden digests, and what Python's reader makes of them."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deploy.errors import BadValues, BundleError, StaleLock
from deploy.image.layer import Entry, Kind, Owner, confirm, read_back, write_layer

EPOCH = 1_700_000_000
DEMO = (
    Entry(path="opt/demo/run.sh", mode=0o755, data=b"#!/bin/sh\necho demo\n"),
    Entry(path="opt/demo/a.txt", data=b"demo\n"),
)
TOP = Path(__file__).resolve().parents[2]


def written(*entries: Entry, **options: object) -> bytes:
    out = io.BytesIO()
    write_layer(entries, out, epoch=EPOCH, **options)  # type: ignore[arg-type]
    return out.getvalue()


def test_a_layer_has_the_digest_that_today_s_builders_give() -> None:
    digest = "1d38514ff3642af689e63e10e8a00f5892a9d89aeb54f777cc3e7849df2b8e26"
    assert hashlib.sha256(written(*DEMO)).hexdigest() == digest


def test_a_deletion_is_an_empty_marked_file_with_a_known_digest() -> None:
    data = written(*DEMO, Entry(path="opt/demo/old.txt", kind=Kind.WHITEOUT))

    assert len(data) == 4608
    digest = "69ac5fe3f41b69175f9f0780f4ab9f733db3b4d3681acee24eb522870643b477"
    assert hashlib.sha256(data).hexdigest() == digest


def test_the_order_in_which_entries_come_changes_nothing() -> None:
    assert written(*DEMO) == written(*reversed(DEMO))


def test_children_stand_directly_below_their_folder() -> None:
    names = [row[0] for row in read_back(io.BytesIO(written(Entry(path="a-b"), Entry(path="a/c"))))]

    assert names == ["a", "a/c", "a-b"]


def test_a_parent_keeps_the_mode_and_owner_that_the_base_gave_it() -> None:
    data = written(Entry(path="root/x"), folders={"root": Owner(mode=0o700, uid=7, gid=8)})

    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        folder = tar.getmember("root")
    assert (folder.mode, folder.uid, folder.gid) == (0o700, 7, 8)


def test_the_bytes_do_not_depend_on_the_machine_they_are_made_on(tmp_path: Path) -> None:
    script = (
        "import hashlib, io; from deploy.image.layer import *; out = io.BytesIO();"
        "write_layer([Entry(path='ö/x', data=b'1'), Entry(path='a', mode=0o755)], out, epoch=9);"
        "print(hashlib.sha256(out.getvalue()).hexdigest())"
    )
    answers = set()
    for zone, locale, seed, umask in (("UTC", "C", "0", 0o77), ("Asia/Tokyo", "C.UTF-8", "5", 0)):
        env = {**os.environ, "TZ": zone, "LC_ALL": locale, "PYTHONHASHSEED": seed}
        env["PYTHONPATH"] = str(TOP)
        done = subprocess.run(
            (sys.executable, "-c", script),
            cwd=tmp_path,
            env=env,
            umask=umask,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        answers.add(done.stdout)
    assert len(answers) == 1


# Names as they occur, and lengths around every limit of the header (100, 155, 156, 255 bytes).
_NAME = st.text(
    st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]), min_size=1, max_size=12
).filter(lambda name: name not in (".", "..") and not name.startswith(".wh."))
_LONG = st.builds(lambda c, n: c * n, st.sampled_from("abö"), st.integers(90, 120))
_PATH = st.lists(st.one_of(_NAME, _LONG), min_size=1, max_size=4).map("/".join)
_LINK = st.text(
    st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1, max_size=130
)
_ENTRY = st.one_of(
    st.builds(
        Entry,
        path=_PATH,
        data=st.binary(max_size=1200),
        mode=st.sampled_from([0o600, 0o644, 0o755, 0o4755]),
    ),
    st.builds(Entry, path=_PATH, kind=st.just(Kind.LINK), link=_LINK),
    st.builds(Entry, path=_PATH, kind=st.just(Kind.FOLDER), mode=st.just(0o711)),
    st.builds(Entry, path=_PATH, kind=st.just(Kind.WHITEOUT)),
)


def _fit(entries: list[Entry]) -> list[Entry]:
    """Drop what contradicts another entry, so that the rest is a possible tree."""
    kept: dict[str, Entry] = {}
    for entry in entries:
        parents = [entry.path[:i] for i, c in enumerate(entry.path) if c == "/"]
        blocked = any(p in kept and kept[p].kind is not Kind.FOLDER for p in parents)
        below = any(path.startswith(entry.path + "/") for path in kept)
        if not blocked and not below and entry.path not in kept:
            kept[entry.path] = entry
    return list(kept.values())


@settings(max_examples=150, deadline=None)
@given(entries=st.lists(_ENTRY, max_size=8).map(_fit))
@example(entries=[Entry(path="a" * 100 + "/" + "b" * 100)])
@example(entries=[Entry(path="a" * 155 + "/" + "b" * 100)])
@example(entries=[Entry(path="a" * 156 + "/" + "b")])
@example(entries=[Entry(path="a" * 90 + "/" + "b" * 9, kind=Kind.LINK, link="ö" * 80)])
def test_python_reads_back_what_was_meant(entries: list[Entry]) -> None:
    data = written(*entries)

    found = {row[0]: row[1:] for row in read_back(io.BytesIO(data))}

    for entry in entries:
        kind, mode, size, link, digest = found.pop(entry.stored_path.rstrip("/"))
        if entry.kind is Kind.FILE:
            assert (kind, mode, size) == ("file", entry.mode, len(entry.data))
            assert digest == hashlib.sha256(entry.data).hexdigest()
        if entry.kind is Kind.LINK:
            assert (kind, link) == ("link", entry.link)
        if entry.kind is Kind.FOLDER:
            assert (kind, mode) == ("folder", entry.mode)
        if entry.kind is Kind.WHITEOUT:
            assert (kind, size) == ("file", 0)
    assert all(kind == "folder" for kind, *_ in found.values())  # the parents


def _spoilt(data: bytes, old: bytes, new: bytes) -> io.BytesIO:
    assert data.count(old) == 1
    return io.BytesIO(data.replace(old, new))


def test_the_second_reader_agrees_with_what_was_packed() -> None:
    confirm(DEMO, io.BytesIO(written(*DEMO)))


def test_the_second_reader_names_a_changed_byte_a_lost_and_a_foreign_file() -> None:
    data = written(*DEMO)
    stray = Entry(path="opt/demo/stray")

    with pytest.raises(StaleLock) as caught:
        confirm(DEMO, _spoilt(data, b"echo demo", b"echo Demo"))
    assert "opt/demo/run.sh" in caught.value.why
    with pytest.raises(StaleLock) as caught:
        confirm([*DEMO, stray], io.BytesIO(data))
    assert "opt/demo/stray" in caught.value.why
    with pytest.raises(StaleLock) as caught:
        confirm(DEMO, io.BytesIO(written(*DEMO, stray)))
    assert "opt/demo/stray: nobody packed it" in caught.value.why


def test_a_content_with_another_digest_than_promised_is_noticed() -> None:
    promised = Entry(path="x", size=1, source=lambda: io.BytesIO(b"a"), sha256="0" * 64)

    with pytest.raises(StaleLock, match="does not hold"):
        confirm([promised], io.BytesIO(written(promised)))


def test_a_file_of_more_than_eight_gibibytes_says_its_size_in_an_extended_record() -> None:
    size = 8 * 1024**3
    entry = Entry(path="big", size=size, source=lambda: io.BytesIO(b""))
    out = io.BytesIO()

    with pytest.raises(BundleError, match="changed while"):
        write_layer([entry], out, epoch=EPOCH)  # the header is out before the content falls short

    assert f"size={size}\n".encode() in out.getvalue()[512:1024]


def test_every_impossible_entry_is_named_at_once() -> None:
    bad = [
        Entry(path="../x"),
        Entry(path="/abs"),
        Entry(path="a/.wh.b"),
        Entry(path="m", mode=0o100644),
        Entry(path="f"),
        Entry(path="f/below"),
        Entry(path="twice"),
        Entry(path="twice"),
    ]
    with pytest.raises(BadValues) as caught:
        written(*bad)

    for path in ("'../x'", "'/abs'", "'a/.wh.b'", "'m'", "'f/below'", "'twice'"):
        assert path in caught.value.why


def test_a_source_that_grows_while_it_is_packed_is_noticed() -> None:
    entry = Entry(path="x", size=3, source=lambda: io.BytesIO(b"four"))

    with pytest.raises(BundleError, match="x changed while it was being packed"):
        written(entry)
