"""Locks: one spelling, the same for every reader; any edit is noticed; stale by meaning alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy import manifest
from deploy.agent.words import digest
from deploy.errors import Exit, StaleLock
from deploy.layout import HERE
from deploy.lock import Lock, check_fresh, lock_text, read_lock, write_lock

COMMIT = "61e9540" + "0" * 33
FILES = [
    {"path": "vllm/a.py", "class": "overlay", "old": None, "new": {"oid": "1" * 40, "size": 7}},
    {"path": 'odd "name\\\t\x7f é \U0001f600.py', "class": "kernel", "old": {}, "new": None},
]
INPUTS: dict[str, Any] = {
    "schema": 1,
    "manifest": manifest.load(HERE.manifest("example")).meaning(),
    "base": COMMIT,
    "head": "1" * 40,
    "head_time": 1_700_000_000,
    "files": FILES,
    "none": None,
    "empty": {},
    "nothing": [],
    "words": ["no", "0644", "3.10", "~", "", " x ", "a: b", "# c", "- d"],
}
EXPECT = {"plan": "a" * 64, "bundle": "b" * 64, "on": True}


def lock() -> Lock:
    return Lock(INPUTS, EXPECT)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "example.lock.yaml"
    write_lock(found, lock())
    return found


def refusal(path: Path) -> StaleLock:
    with pytest.raises(StaleLock) as caught:
        read_lock(path)
    assert caught.value.exit == Exit.STALE
    assert "`./inv lock -n example`" in caught.value.fix
    return caught.value


def test_a_lock_comes_back_as_it_was_written_and_knows_its_inputs(path: Path) -> None:
    found = read_lock(path)

    assert found.inputs == INPUTS
    assert found.expect == EXPECT | {"inputs": digest(INPUTS)}
    assert lock_text(found) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("reader", [yaml.SafeLoader, yaml.FullLoader])
def test_another_yaml_reader_reads_the_same_values(path: Path, reader: Any) -> None:
    found = yaml.load(path.read_bytes(), Loader=reader)

    assert found["inputs"] == INPUTS
    assert found["inputs"]["base"] == COMMIT
    assert found["expect"]["plan"] == "a" * 64


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=20,
)


@pytest.mark.slow
@settings(deadline=None)
@given(JSON)
def test_any_value_survives_the_file_for_us_and_for_other_readers(value: Any) -> None:
    made = Lock(INPUTS | {"value": value}, EXPECT)

    text = lock_text(made)

    assert yaml.safe_load(text)["inputs"]["value"] == value
    assert reread(text).inputs["value"] == value
    assert lock_text(reread(text)) == text


def reread(text: str) -> Lock:
    from deploy import lock as module

    return module._parse(Path("x.lock.yaml"), text.encode())


def test_the_text_does_not_depend_on_order_hash_seed_locale_or_umask(path: Path) -> None:
    code = (
        "import sys, json, pathlib; from deploy.lock import Lock, lock_text; "
        "from deploy.lock import read_lock, write_lock; l = read_lock(pathlib.Path(sys.argv[1])); "
        "turn = lambda d: dict(reversed(list(d.items()))); "
        "write_lock(pathlib.Path(sys.argv[2]), Lock(turn(l.inputs), turn(l.expect)))"
    )
    other = path.with_name("other.lock.yaml")
    env = {"PYTHONHASHSEED": "7", "LC_ALL": "C", "TZ": "Asia/Shanghai", "PATH": os.environ["PATH"]}

    subprocess.run(
        [sys.executable, "-c", code, str(path), str(other)],
        cwd=HERE.top,
        env=env,
        umask=0o077,
        check=True,
    )

    assert other.read_bytes() == path.read_bytes()
    assert stat.S_IMODE(other.stat().st_mode) == 0o644


def test_writing_the_same_lock_again_writes_nothing(path: Path) -> None:
    before = path.stat()

    assert write_lock(path, lock()) is False

    after = path.stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert write_lock(path, Lock(INPUTS, EXPECT | {"x": "y"})) is True


def test_a_write_that_fails_leaves_the_old_lock_and_no_left_over(tmp_path: Path) -> None:
    path = tmp_path / "example.lock.yaml"
    path.mkdir()  # so the rename fails, after the new text was written beside

    with pytest.raises(OSError, match="directory"):
        write_lock(path, lock())

    assert [child.name for child in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("value", "why"),
    [(1.5, "a float"), (b"x", "a bytes"), ({1: "x"}, "a key must be text"), ("\ud800", "not UTF-8"),
     ((1, 2), "a tuple"), ({"k" * 1001: 1}, "1000 characters")],
)  # fmt: skip
def test_what_readers_would_not_agree_on_is_not_written(value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        lock_text(Lock(INPUTS | {"value": value}, EXPECT))


@pytest.mark.slow
def test_every_changed_byte_is_noticed(path: Path) -> None:
    small = Lock({"schema": 1, "manifest": {"a": ["b"]}, "files": FILES}, {"plan": "a" * 64})
    write_lock(path, small)
    raw = path.read_bytes()
    for i in range(len(raw)):
        for new in {raw[i] ^ 1, raw[i] ^ 32, 10, 32} - {raw[i]}:
            path.write_bytes(raw[:i] + bytes([new]) + raw[i + 1 :])
            refusal(path)
    path.write_bytes(raw)
    assert read_lock(path).inputs == small.inputs


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda raw: raw[:-1], "line"),
        (lambda raw: raw + b"\n", "line"),
        (lambda raw: raw + b"# a note\n", "not spelled as it was written"),
        (lambda raw: raw.replace(b"\n", b"\r\n"), "line 2 was not written by it"),
        (lambda raw: raw[: len(raw) // 2], ""),
        (lambda raw: raw[:0], "expect, inputs and seal are due"),
        (lambda raw: b"\xff" + raw, "line 1 is not UTF-8"),
        (lambda raw: b"<<<<<<< HEAD\n" + raw, "line 1 was not written by it"),
        (lambda raw: raw + b'"extra": 1\n', "it holds expect, extra, inputs, seal"),
        (lambda raw: raw.replace(b'"seal"', b'"sael"'), "it holds expect, inputs, sael"),
        (lambda raw: raw.replace(b'"plan": "a', b'"plan": "0'), "below expect"),
        (lambda raw: raw.replace(b'"base": "6', b'"base": "7'), "below inputs"),
        (lambda raw: raw.replace(b'"schema": 1\n', b'"schema": 2\n'), "its schema is 2"),
        (lambda raw: raw.replace(b'"head_time": 17', b'"head_time": NaN, 17'), "line"),
        (lambda raw: raw.replace(b'"none": null', b'"none": NaN'), "cannot be locked"),
        (lambda raw: raw.replace(b'"none": null', b'"none": 1.5'), ""),
        (lambda raw: raw.replace(b'"none": null', b'"none": "\\ud800"'), ""),
        (lambda raw: raw.replace(b'"none": null', b'"none": ' + b"[" * 100_000), "line"),
        (lambda raw: raw.replace(b'"none": null', b'"none": null\n  "none": null'), "twice"),
        (lambda raw: raw.replace(b'"none": null', b'"none": "\x1b[31m'), ""),
    ],
)  # fmt: skip
def test_every_kind_of_edit_is_refused_with_what_it_was(
    path: Path, edit: Callable[[bytes], bytes], why: str
) -> None:
    before = path.read_bytes()
    path.write_bytes(edit(before))
    assert path.read_bytes() != before

    found = refusal(path)

    assert why in found.why
    assert "\x1b" not in str(found)


def test_a_missing_lock_says_how_to_make_it(tmp_path: Path) -> None:
    found = refusal(tmp_path / "example.lock.yaml")

    assert found.what == "example is not locked"


def test_a_lock_that_cannot_be_read_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "example.lock.yaml"
    path.mkdir()

    assert "cannot be read" in refusal(path).why


# --- freshness ----------------------------------------------------------------------------------


def example(*edits: tuple[str, str]) -> manifest.Manifest:
    text = HERE.manifest("example").read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    return manifest.parse(text, "example")


def test_a_comment_a_quote_or_a_default_does_not_make_a_lock_stale(path: Path) -> None:
    edits = (
        ("schema: 1 # the format's number", "# hello\nschema: '1'"),
        ("  ready: 15m # default; how long a start may take\n", ""),
        ("vllm: 0.18.1\n    torch: 2.10.0", "torch: '2.10.0'\n    vllm: \"0.18.1\""),
    )

    check_fresh(read_lock(path), example(*edits))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            "arch: gfx936",
            "arch: gfx938",
            'kernels.arch was locked as "gfx936" and is "gfx938" in the manifest',
        ),
        ("head: 22", "head: 32", f'source.head was locked as "{"2" * 40}" and is "3{"2" * 39}"'),
        ("port: 8001", "port: 8002", "launch.port was locked as 8001 and is 8002"),
        (
            "  port: 8001 # default: 8000\n",
            "",
            "launch.port was locked as 8001 and is absent",
        ),
        (
            "groups: [video]",
            "groups: [video, render]",
            'launch.container.groups[1] was locked as absent and is "render"',
        ),
        (
            "read_only: yes",
            "read_only: no",
            "launch.container.mounts[0].read_only was locked as true and is absent",
        ),
    ],
)
def test_an_edit_of_meaning_is_named_with_both_values(
    path: Path, old: str, new: str, why: str
) -> None:
    with pytest.raises(StaleLock) as caught:
        check_fresh(read_lock(path), example((old, new)))

    assert caught.value.why.startswith(why)
    assert caught.value.exit == Exit.STALE


def test_of_several_edits_the_first_by_key_is_named(path: Path) -> None:
    edited = example(("arch: gfx936", "arch: gfx938"), ("python: /usr/bin", "python: /opt/bin"))

    with pytest.raises(StaleLock, match="stale") as caught:
        check_fresh(read_lock(path), edited)

    assert caught.value.why.startswith('base.python was locked as "/usr/bin/python3"')


def test_true_and_one_are_not_the_same() -> None:
    found = example()
    locked = Lock(INPUTS | {"manifest": found.meaning() | {"schema": True}}, {})

    with pytest.raises(StaleLock) as caught:
        check_fresh(locked, found)

    assert "schema was locked as true and is 1" in caught.value.why
