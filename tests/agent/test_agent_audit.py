"""The audit of a package whose base only a listing knows, and drift that is replaced by name."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.listing import Entry, parse, text_of
from deploy.agent.words import Damaged
from tests.agent.target import BASE_FILES, NEW_FILES, Bundle, Outcome, Target, difference, planned

PACKAGE = {path: data for path, data in BASE_FILES.items() if not path.startswith("other/")}


def entry(path: str, data: bytes, owner: str = "base", mode: str = "0644") -> Entry:
    return Entry(path, hashlib.sha256(data).hexdigest(), len(data), mode, owner)


def listed(bundle: Bundle, text: str, pinned: str | None = None) -> Bundle:
    """Let a bundle carry what the base holds, as `./inv bundle` packs it."""
    sha = hashlib.sha256((text if pinned is None else pinned).encode()).hexdigest()
    with zipfile.ZipFile(bundle.path) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    entries["inputs.json"] = json.dumps({"base_files": {"from": "files", "sha256": sha}}).encode()
    entries["base.files"] = text.encode()
    path = bundle.path.with_name(f"listed-{bundle.path.name}")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as made:
        for name, data in entries.items():
            made.writestr(name, data)
    return Bundle(path, bundle.plan)


def owners(outcome: Outcome) -> dict[str, str]:
    audit = outcome.evidence["audit"]
    found = {path: owner for owner, paths in audit["owners"].items() for path in paths}
    return {**found, **{row["path"]: row["owner"] for row in audit["files"]}}


def test_every_file_of_a_vendors_package_is_ours_base_vendor_or_foreign(target: Target) -> None:
    vendors = {"pack/tool.py": b"TOOL = 2  # the vendor's\n", "pack/blas.so": b"\x7fELF vendor"}
    for path, data in vendors.items():
        target.write(path, data)
    rows = [entry(path, data) for path, data in PACKAGE.items() if path not in vendors]
    rows += [entry(path, data, "vendor") for path, data in vendors.items()]
    bundle = listed(target.usual(), text_of(rows))
    assert target.run(bundle, "deploy").code == 0
    target.write("pack/sub/extra.py", b"X = 1\n")

    found = target.run(bundle, "verify", "--all")

    assert found.code == 10
    assert {p: o for p, o in owners(found).items() if o != "derived"} == {
        "pack/__init__.py": "base",
        "pack-1.0.dist-info/METADATA": "base",
        "pack/tool.py": "vendor",
        "pack/blas.so": "vendor",
        "pack/sub/extra.py": "foreign",
        **dict.fromkeys(NEW_FILES, "ours"),
    }
    assert "pack/sub/extra.py" in found.err


def test_a_mode_that_a_listing_knows_is_held_to_it(target: Target) -> None:
    bundle = listed(target.usual(), text_of(entry(p, d) for p, d in PACKAGE.items()))
    os.chmod(target.top / "pack/tool.py", 0o600)

    found = target.run(bundle, "verify", "--all")

    [row] = [row for row in found.evidence["audit"]["files"] if row["path"] == "pack/tool.py"]
    assert (row["owner"], row["why"]) == ("foreign", "mode 0600, the base has 0644")


def test_a_listing_that_is_not_the_pinned_one_proves_nothing(target: Target) -> None:
    text = text_of(entry(path, data) for path, data in PACKAGE.items())

    found = target.run(listed(target.usual(), text, pinned=text + "x"), "verify", "--all")

    assert found.code == 10
    assert "the lock pins" in found.evidence["audit"]["faults"][0]
    assert found.evidence["audit"]["owners"]["base"] == []


def test_without_a_pinned_listing_the_audit_says_so(target: Target) -> None:
    found = target.run(target.usual(), "verify", "--all")
    assert found.code == 10
    assert "./inv lock" in found.evidence["audit"]["faults"][0]


def test_files_lists_the_package_as_its_vendor_made_it_and_not_otherwise(target: Target) -> None:
    bundle = target.usual()
    before = target.snapshot()

    told = target.run(bundle, "files")

    assert told.code == 0
    want = [entry(path, data, "vendor") for path, data in PACKAGE.items()]
    assert told.evidence["listing"] == text_of(want)
    assert difference(before, target.snapshot()) == {}
    assert target.run(bundle, "deploy").code == 0
    refused = target.run(bundle, "files")
    assert refused.code == 6
    assert "restore it first" in refused.err


# --- the text itself


@pytest.mark.parametrize(
    "path",
    ["a b/c.py", "中文.py", 'pack/"q.py', "new\nline.py", "tab\t.py", " ", "-x", "é\u202e.py"],
)
def test_a_listing_gives_back_every_path_it_was_made_of(path: str) -> None:
    text = text_of([entry(path, b"x")])
    assert len(text.splitlines()) == 2
    assert parse(text) == {path: entry(path, b"x")}


BAD_LINES = {
    "no head": "0" * 64 + " 1 - base a\n",
    "short digest": "files/1\n00 1 - base a\n",
    "no owner": "files/1\n" + "0" * 64 + " 1 - mine a\n",
    "a path that leaves": "files/1\n" + "0" * 64 + " 1 - base ../a\n",
    "an absolute path": "files/1\n" + "0" * 64 + " 1 - base /a\n",
    "a bad size": "files/1\n" + "0" * 64 + " -1 - base a\n",
    "a bad mode": "files/1\n" + "0" * 64 + " 1 0999 base a\n",
    "torn JSON": "files/1\n" + "0" * 64 + ' 1 - base "a\n',
    "a cut end": "files/1\n" + "0" * 64 + " 1 - base a",
    "twice": "files/1\n" + ("0" * 64 + " 1 - base a\n") * 2,
    "empty": "",
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_listing_that_cannot_be_right_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(Damaged) as caught:
        parse(BAD_LINES[name])
    assert "line" in caught.value.why


# --- drift


def test_drift_is_replaced_only_by_name_and_restore_gives_it_back(target: Target) -> None:
    target.write("pack/core.py", b"V = 'edited by hand'\n")
    target.write("pack/table.json", b'{"mine": 1}\n')
    before = target.snapshot()
    bundle = target.usual()

    unnamed = target.run(bundle, "deploy")
    half = target.run(bundle, "deploy", "--replace-drift", "pack/core.py")
    assert (unnamed.code, half.code) == (6, 6)
    assert "pack/core.py" in unnamed.err
    assert "pack/core.py" not in half.err
    assert "pack/table.json" in half.err
    assert difference(before, target.snapshot()) == {}

    named = ("--replace-drift", "pack/core.py", "--replace-drift=pack/table.json")
    done = target.run(bundle, "deploy", *named)

    assert done.code == 0
    assert done.evidence["changes"]["replace drift"] == ["pack/core.py", "pack/table.json"]
    assert target.states(bundle=bundle) == {}
    assert target.run(bundle, "restore").code == 0
    assert difference(before, target.snapshot()) == {}


def test_a_file_edited_after_a_deploy_comes_back_as_it_was_replaced(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    target.write("pack/core.py", b"V = 'edited afterwards'\n")

    assert target.run(bundle, "deploy").code == 6
    assert target.run(bundle, "deploy", "--replace-drift", "pack/core.py").code == 0
    assert target.states(bundle=bundle) == {}
    # A later plan does not have to name it again: what is there is what we put there.
    later = target.usual({**NEW_FILES, "pack/core.py": b"V = 'later'\n"})
    assert target.run(later, "deploy").code == 0
    assert target.run(later, "restore").code == 0

    assert target.read("pack/core.py") == b"V = 'edited afterwards'\n"
    assert target.read("pack/table.json") == BASE_FILES["pack/table.json"]


def test_after_a_restore_of_drift_the_refusal_names_every_way_on(target: Target) -> None:
    bundle = target.usual()
    assert target.run(bundle, "deploy").code == 0
    target.write("pack/core.py", b"V = 'edited afterwards'\n")
    assert target.run(bundle, "deploy", "--replace-drift", "pack/core.py").code == 0
    assert target.run(bundle, "restore").code == 0
    assert target.run(bundle, "restore").evidence["outcome"] == "nothing to restore"

    refused = target.run(bundle, "check")
    fix = refused.err.partition("fix: ")[2]
    assert refused.code == 6
    assert "install the others of the base anew" in fix
    assert "`deploy --replace-drift FILE`" in fix

    assert target.run(bundle, "deploy", "--replace-drift", "pack/core.py").code == 0
    assert target.run(bundle, "restore").code == 0
    target.write("pack/core.py", BASE_FILES["pack/core.py"])
    assert target.run(bundle, "check").code == 10


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("make", [make_folder, make_fifo])
def test_what_is_no_file_is_not_replaced_even_by_name(
    target: Target, make: Callable[[Path], Any]
) -> None:
    make(target.top / "pack/table.json")
    refused = target.run(target.usual(), "deploy", "--replace-drift", "pack/table.json")
    assert refused.code == 6
    assert "pack/table.json" in refused.err


def test_a_name_that_the_plan_does_not_write_is_a_slip(target: Target) -> None:
    before = target.snapshot()
    refused = target.run(target.usual(), "deploy", "--replace-drift", "pack/tool.py")
    assert refused.code == 6
    assert "does not write" in refused.err
    assert difference(before, target.snapshot()) == {}


def test_a_deleted_file_that_was_edited_is_removed_by_name_and_comes_back(target: Target) -> None:
    target.write("pack/old.py", b"OLD = 'mine'\n")
    before = target.snapshot()
    bundle = target.bundle_of("pack/old.py", None)
    assert target.run(bundle, "deploy").code == 6
    assert target.run(bundle, "deploy", "--replace-drift", "pack/old.py").code == 0
    assert not target.exists("pack/old.py")
    assert target.run(bundle, "restore").code == 0
    assert difference(before, target.snapshot()) == {}


# --- what a diff is made of


def test_check_hands_over_the_targets_own_bytes_when_asked(target: Target) -> None:
    target.write("pack/core.py", b"V = 'edited'\n")
    target.write("pack/table.json", b"\0\1binary")
    asked = ("--options", '{"contents": true}')

    told = target.run(target.usual(), "check", *asked).evidence["contents"]
    silent = target.run(target.usual(), "check").evidence

    assert told["pack/core.py"]["data"] == "ViA9ICdlZGl0ZWQnCg=="
    assert told["pack/table.json"]["data"] is None
    assert told["pack/table.json"]["size"] == 8
    assert "pack/fresh/__init__.py" not in told  # nothing is there
    assert "contents" not in silent


def test_a_plan_that_wants_what_is_there_has_nothing_to_show(target: Target) -> None:
    same = BASE_FILES["pack/core.py"]
    bundle = target.bundle(target.plan(planned("pack/core.py", same)), [same])
    assert target.run(bundle, "deploy").code == 0
    told = target.run(bundle, "check", "--options", '{"contents": true}')
    assert (told.code, told.evidence["contents"]) == (0, {})
