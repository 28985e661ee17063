"""The store of contents: bounded, believed only by digest, and never in the way of a deploy."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from deploy.agent.store import Store


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def keep(store: Store, data: bytes, name: str = "") -> str:
    aside = store.aside(name or sha(data))
    aside.write(data)
    aside.end(whole=True)
    aside.close()
    return name or sha(data)


def test_a_content_is_kept_under_its_digest_and_read_back(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))

    name = keep(store, b"content")

    assert store.whole(name)
    assert b"".join(store.chunks(name)) == b"content"
    assert [path.name for path in (tmp_path / "state/blobs").iterdir()] == [name]


def test_only_the_owner_can_look_into_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))
    name = keep(store, b"content")

    assert (tmp_path / "state/blobs").stat().st_mode & 0o077 == 0
    assert (tmp_path / "state/blobs" / name).stat().st_mode & 0o077 == 0


def test_a_wrong_content_is_not_kept_but_can_be_read_by_who_judges_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))
    aside = store.aside(sha(b"right"))
    aside.write(b"wrong")
    aside.end(whole=True)

    assert b"".join(aside.chunks()) == b"wrong"
    assert not list((tmp_path / "state/blobs").iterdir())


def test_half_a_content_leaves_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))
    aside = store.aside(sha(b"content"))
    aside.write(b"cont")
    aside.end(whole=False)

    assert not list((tmp_path / "state/blobs").iterdir())


def test_a_spoilt_content_is_removed_when_it_is_looked_at(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))
    name = keep(store, b"content")
    (tmp_path / "state/blobs" / name).write_bytes(b"c0ntent")

    assert not store.whole(name)
    assert not list((tmp_path / "state/blobs").iterdir())


def test_beyond_its_bound_the_longest_unused_go_but_none_that_is_needed(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))
    names = [keep(store, bytes([i]) * 100) for i in range(5)]
    for age, name in enumerate(names):
        os.utime(tmp_path / "state/blobs" / name, (1000 + age, 1000 + age))
    store.touch(names[1])

    store.prune({names[0]}, bound=300)

    assert [store.whole(name) for name in names] == [True, True, False, False, True]


@pytest.mark.parametrize("folder", ["", "/proc/nowhere/state"])
def test_without_a_folder_contents_are_still_set_aside(folder: str) -> None:
    store = Store(folder)
    aside = store.aside(sha(b"content"))
    aside.write(b"con")
    aside.write(b"tent")
    aside.end(whole=True)

    assert store.trouble
    assert b"".join(aside.chunks()) == b"content"
    assert not store.whole(sha(b"content"))
    store.prune(set())
    store.remember("key", {"plan": "x"})
    assert store.recall("key") is None


def test_what_was_deployed_is_remembered_until_it_is_restored(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))

    store.remember("a", {"plan": "1"})
    store.remember("b", {"plan": "2"})
    store.remember("a", None)

    again = Store(str(tmp_path / "state"))
    assert again.recall("a") is None
    assert again.recall("b") == {"plan": "2"}


def test_a_torn_memory_is_none(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "state"))
    store.remember("a", {"plan": "1"})
    [path] = (tmp_path / "state/targets").iterdir()
    path.write_text('{"plan"')

    assert store.recall("a") is None
