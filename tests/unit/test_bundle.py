"""A bundle: the same bytes from the same arguments; one that was brought is not believed."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from deploy import bundle as bundles
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.bundle import Bundle, Fill, Sink, pack, read
from deploy.errors import BundleError, StaleLock

CONTENTS = {hashlib.sha256(text).hexdigest(): text for text in (b"V = 1\n", b"x" * 3_000_000)}
INPUTS = {"schema": 1, "files": []}


def plan() -> Plan:
    files = tuple(
        PlannedFile(
            path=f"vllm/f{i}.py",
            role="module",
            want=State(type="file", mode="0644", sha256=sha, size=len(text)),
            assume=(ABSENT,),
        )
        for i, (sha, text) in enumerate(sorted(CONTENTS.items()))
    )
    return Plan(name="t", package="vllm", python="/usr/bin/python3", site="/site", files=files)


def filler(contents: Mapping[str, bytes] = CONTENTS) -> Fill:
    def fill(wanted: Iterator[tuple[str, Sink]]) -> None:
        for sha, sink in wanted:
            text = contents[sha]
            for at in range(0, len(text), 1 << 16):
                sink.write(text[at : at + (1 << 16)])

    return fill


def made(out: Path) -> Bundle:
    return pack(plan(), INPUTS, filler(), out)


def test_a_bundle_is_named_by_its_own_bytes_and_reads_back(tmp_path: Path) -> None:
    bundle = made(tmp_path)

    again = read(bundle.path)

    assert bundle.path.name == f"t-{bundle.sha256[:12]}.pyz"
    assert hashlib.sha256(bundle.path.read_bytes()).hexdigest() == bundle.sha256
    assert again == bundle
    assert os.listdir(tmp_path) == [bundle.path.name]


# What a bare interpreter needs to pack the bundle of `made`.
PACK = """
import hashlib, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
os.umask(int(sys.argv[3], 8))
from deploy.agent.plan import ABSENT, Plan, PlannedFile, State
from deploy.bundle import pack
contents = {hashlib.sha256(t).hexdigest(): t for t in (b"V = 1\\n", b"x" * 3_000_000)}
files = tuple(
    PlannedFile(path=f"vllm/f{i}.py", role="module", assume=(ABSENT,),
                want=State(type="file", mode="0644", sha256=sha, size=len(text)))
    for i, (sha, text) in enumerate(sorted(contents.items()))
)
plan = Plan(name="t", package="vllm", python="/usr/bin/python3", site="/site", files=files)
def fill(wanted):
    for sha, sink in wanted:
        sink.write(contents[sha])
print(pack(plan, {"files": [], "schema": 1}, fill, Path(sys.argv[2])).sha256)
"""


def test_neither_umask_zone_locale_folder_hash_seed_nor_python_changes_a_byte(
    tmp_path: Path, pythons: dict[str, Path]
) -> None:
    here = made(tmp_path / "here").sha256
    top = Path(bundles.__file__).resolve().parent.parent
    # The modules under test, and nothing of this environment's packages.
    alone = tmp_path / "elsewhere 中文"
    shutil.copytree(top / "deploy", alone / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    digests = set()
    fit = [path for version, path in sorted(pythons.items()) if version.startswith("3.1")]
    for i, python in enumerate(fit):
        env = {
            "PATH": os.environ["PATH"],
            "TZ": ["UTC", "Asia/Shanghai"][i % 2],
            "LC_ALL": ["C", "C.UTF-8"][i % 2],
            "PYTHONHASHSEED": str(i),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        done = subprocess.run(
            [python, "-c", PACK, str(alone), str(tmp_path / f"o{i}"), ["022", "077"][i % 2]],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())

    assert digests == {here}


def test_a_content_that_is_not_its_name_is_never_packed(tmp_path: Path) -> None:
    wrong = {sha: text + b"!" for sha, text in CONTENTS.items()}

    with pytest.raises(StaleLock, match="cannot pack the blob") as caught:
        pack(plan(), INPUTS, filler(wrong), tmp_path)

    assert caught.value.exit == 4
    assert os.listdir(tmp_path) == []


def rewritten(bundle: Bundle, change: Callable[[dict[str, bytes]], None]) -> Path:
    with zipfile.ZipFile(bundle.path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    path = bundle.path.with_name("other.pyz")
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in members.items():
            archive.writestr(bundles._info(name), text)
    return path


def other_plan(members: dict[str, bytes]) -> None:
    raw = json.loads(members["plan.json"])
    raw["files"][0]["path"] = "../../etc/passwd"
    members["plan.json"] = json.dumps(raw).encode()


def drop_blob(members: dict[str, bytes]) -> None:
    del members["blobs/" + min(CONTENTS)]


def change_blob(members: dict[str, bytes]) -> None:
    members["blobs/" + min(CONTENTS)] += b"?"


CHANGES: dict[str, Callable[[dict[str, bytes]], None]] = {
    "plan that escapes": other_plan,
    "blob missing": drop_blob,
    "blob changed": change_blob,
    "foreign member": lambda m: m.update({"usercustomize.py": b""}),
    "no plan": lambda m: m.pop("plan.json") and None,
    "plan no json": lambda m: m.update({"plan.json": b"{"}),
    "plan nested deep": lambda m: m.update({"plan.json": b"[" * 200_000}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_altered_bundle_does_not_read(name: str, tmp_path: Path) -> None:
    bundle = made(tmp_path)
    assert read(rewritten(bundle, lambda _: None)).plan == bundle.plan

    with pytest.raises(BundleError) as caught:
        read(rewritten(bundle, CHANGES[name]))

    assert caught.value.exit == 4


# Each is a whole zip with right checksums, to which some reader of zips sees more than another.
FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "something before it": lambda whole: b"#!/usr/bin/python3\n" + whole,
    "something behind it": lambda whole: whole + b"\n",
    "a comment": lambda whole: whole[:-2] + b"\2\0hi",
    "a second end": lambda whole: whole[:-2] + b"\x16\0" + b"PK\5\6" + bytes(18),
    "another name in front of a content": lambda w: w.replace(
        b"agent/main.py", b"agent/mine.py", 1
    ),
    "a flag that some heed": lambda whole: whole[:6] + b"\0\x08" + whole[8:],
}


@pytest.mark.parametrize("name", FRAMES)
def test_a_bundle_that_could_be_read_in_two_ways_is_read_in_none(name: str, tmp_path: Path) -> None:
    bundle = made(tmp_path)
    path = tmp_path / "other.pyz"
    path.write_bytes(FRAMES[name](bundle.path.read_bytes()))

    with pytest.raises(StaleLock) as caught:
        read(path)

    assert caught.value.exit == 4


def test_a_truncated_a_flipped_and_a_compressed_bundle_do_not_read(tmp_path: Path) -> None:
    bundle = made(tmp_path)
    whole = bundle.path.read_bytes()
    flipped = bytearray(whole)
    flipped[whole.index(b"x" * 100) + 50] ^= 1
    squeezed = io.BytesIO()
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("plan.json", b"0" * 100_000_000)
    path = tmp_path / "bad.pyz"
    for text in (whole[:-50], whole[:1000], b"", bytes(flipped), squeezed.getvalue()):
        path.write_bytes(text)

        with pytest.raises(StaleLock):
            read(path)


def test_a_member_that_stands_twice_is_refused(tmp_path: Path) -> None:
    bundle = made(tmp_path)
    with zipfile.ZipFile(bundle.path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("plan.json", b"{}")

    with pytest.raises(StaleLock, match="cannot read"):
        read(bundle.path)


def test_older_bundles_of_the_same_name_go_and_others_stay(tmp_path: Path) -> None:
    bundle = made(tmp_path)
    old = tmp_path / f"t-{'0' * 12}.pyz"
    others = [tmp_path / f"t2-{'0' * 12}.pyz", tmp_path / "t-notes.pyz"]
    for path in (old, *others):
        path.write_text("")

    bundles.drop_older(tmp_path, bundle)

    assert not old.exists()
    assert all(path.exists() for path in (*others, bundle.path))


START = b"#!/bin/sh\n"
PINNED = {"start_vllm.sh": {"mode": "0755", "sha256": hashlib.sha256(START).hexdigest()}}


def test_a_bundle_holds_the_scripts_that_its_inputs_promise(tmp_path: Path) -> None:
    inputs = {**INPUTS, "scripts": PINNED}
    bundle = pack(plan(), inputs, filler(), tmp_path, scripts={"start_vllm.sh": START})

    assert read(bundle.path) == bundle
    with zipfile.ZipFile(bundle.path) as archive:
        assert archive.read("scripts/start_vllm.sh") == START


@pytest.mark.parametrize(
    "scripts", [{}, {"start_vllm.sh": b"#!/bin/sh\nexit\n"}, {"start_vllm.sh": START, "a": b""}]
)
def test_a_script_that_lacks_was_changed_or_was_added_stops_a_bundle(
    scripts: dict[str, bytes], tmp_path: Path
) -> None:
    bundle = pack(plan(), {**INPUTS, "scripts": PINNED}, filler(), tmp_path, scripts=scripts)

    with pytest.raises(StaleLock, match="cannot read the bundle") as caught:
        read(bundle.path)
    assert "script" in caught.value.why


WATCHED = """
import atexit, runpy, sys
times = {}
def watch(event, args):
    if event == "compile" and args[1] and "/agent/" in str(args[1]):
        times[args[1]] = times.get(args[1], 0) + 1
sys.addaudithook(watch)
atexit.register(lambda: print(times, file=sys.stderr))
path = sys.argv.pop(1)
sys.argv[0] = path
runpy.run_path(path, run_name="__main__")
"""


def test_a_bundle_compiles_each_of_its_modules_once(tmp_path: Path) -> None:
    bundle = made(tmp_path)
    site = tmp_path / bundle.plan.site.lstrip("/")
    site.mkdir(parents=True)
    words = (str(bundle.path), "facts", "--root", str(tmp_path))
    argv = [sys.executable, "-I", "-S", "-c", WATCHED, *words]

    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    times = ast.literal_eval(done.stderr.splitlines()[-1])
    names = {os.path.basename(path): count for path, count in times.items()}
    assert {"main.py", "tree.py", "verbs.py"} <= set(names)
    # Python's own importer brings the two that make ours.
    assert {name for name, count in names.items() if count > 1} <= {"__init__.py", "sources.py"}


def test_a_module_that_a_bundle_lacks_is_named(tmp_path: Path) -> None:
    def drop(members: dict[str, bytes]) -> None:
        del members["agent/main.py"]

    path = rewritten(made(tmp_path), drop)
    argv = [sys.executable, "-I", "-S", str(path), "facts"]

    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 1
    assert "the bundle has no module agent.main" in done.stderr
