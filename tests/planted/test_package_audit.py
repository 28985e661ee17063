"""The whole package on the real wheel's tree: every file is somebody's, and a stranger is named."""

from __future__ import annotations

import importlib.util
import marshal
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BASE = "vllm/logger.py"  # the demo leaves it alone
TAG = sys.implementation.cache_tag
LOGGER_PYC = f"vllm/__pycache__/logger.{TAG}.pyc"
Rows = set[tuple[str, str]]


def info_of(site: Any) -> Path:
    return Path(site.site, str(site.bundle.inputs["base_files"]["record"])).parent


def audited(site: Any, *options: str) -> tuple[int, Rows, dict[str, Any]]:
    code, evidence = site.agent("verify", "--all", *options)
    assert evidence["error"] is None, evidence["error"]
    audit = evidence["audit"]
    return code, {(row["path"], row["owner"]) for row in audit["files"]}, audit


@pytest.fixture
def whole(deployed: Any) -> Iterator[Any]:
    """The deployed site; every file of it is known before the test and after it."""
    assert audited(deployed)[:2] == (0, set())
    yield deployed
    assert audited(deployed)[:2] == (0, set())


def aside_of(path: Path) -> Path:
    """A place of the same disk that no audit reads."""
    return next(p for p in path.parents if p.name == "dist-packages").parent / path.name


@contextmanager
def other_bytes(path: Path, data: bytes | None) -> Iterator[None]:
    """Put other bytes (or nothing) there, in a new inode; then the old inode again."""
    aside = aside_of(path)
    path.rename(aside)
    try:
        if data is not None:
            path.write_bytes(data)
        yield
    finally:
        path.unlink(missing_ok=True)
        aside.rename(path)


@contextmanager
def another(path: Path, data: bytes) -> Iterator[None]:
    made = [] if path.parent.exists() else [path.parent]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    try:
        yield
    finally:
        path.unlink()
        for folder in made:
            folder.rmdir()


def edited(site: Any) -> Any:
    path = site.site / BASE
    return other_bytes(path, path.read_bytes() + b"# edited\n")


def gone(site: Any) -> Any:
    return other_bytes(site.site / BASE, None)


def stranger(site: Any) -> Any:
    return another(site.site / "vllm/plugins/mine.py", b"V = 1\n")


def bare_bytecode(site: Any) -> Any:
    """What an uninstalled module left: Python imports it without a source."""
    code = marshal.dumps(compile("V = 1", "gone.py", "exec"))
    return another(site.site / "vllm/gone.pyc", importlib.util.MAGIC_NUMBER + bytes(12) + code)


def unchecked_bytecode(site: Any) -> Any:
    """A pyc of the right source that Python runs without ever looking at that source."""
    code = marshal.dumps(compile("V = 1", "logger.py", "exec"))
    header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
    return another(site.site / LOGGER_PYC, header + code)


@contextmanager
def linked(site: Any) -> Iterator[None]:
    path, elsewhere = site.site / BASE, site.home / "logger.py"
    elsewhere.write_bytes(path.read_bytes())
    aside = aside_of(path)
    path.rename(aside)
    path.symlink_to(elsewhere)
    try:
        yield
    finally:
        path.unlink()
        aside.rename(path)


@contextmanager
def pipe(site: Any) -> Iterator[None]:
    path = site.site / "vllm/pipe"
    os.mkfifo(path)
    try:
        yield
    finally:
        path.unlink()


@contextmanager
def second_record(site: Any) -> Iterator[None]:
    """Half of another version's dist-info beside the right one."""
    folder = site.site / "vllm-0.17.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.17.0\n")
    try:
        yield
    finally:
        shutil.rmtree(folder)


PLANTS: dict[str, tuple[Callable[[Any], Any], Rows]] = {
    "a base file that the plan leaves alone was edited": (edited, {(BASE, "foreign")}),
    "a base file that the plan leaves alone is gone": (gone, {(BASE, "missing")}),
    "a file that nobody knows": (stranger, {("vllm/plugins/mine.py", "foreign")}),
    "a bare .pyc of no module": (bare_bytecode, {("vllm/gone.pyc", "foreign")}),
    "a .pyc that is never compared with its source": (
        unchecked_bytecode,
        {(LOGGER_PYC, "foreign")},
    ),
    "a base file became a link to equal bytes": (linked, {(BASE, "foreign")}),
    "a fifo in the package": (pipe, {("vllm/pipe", "foreign")}),
    "a second dist-info of another version": (
        second_record,
        {("vllm-0.17.0.dist-info/METADATA", "foreign")},
    ),
}


@pytest.mark.parametrize("name", PLANTS)
def test_what_is_planted_beside_the_plan_is_found_by_the_audit(
    name: str, whole: Any, row: Any
) -> None:
    plant, expected = PLANTS[name]

    with plant(whole):
        code, rows, _ = audited(whole)

    assert (code, rows) == (10, expected)
    row(name, "verify --all: " + ", ".join(f"{path}: {owner}" for path, owner in sorted(expected)))


def with_body_of(site: Any, text: bytes) -> Any:
    """A pyc of the header that Python believes for logger.py, and the code of another text."""
    path = site.site / BASE
    info = path.stat()
    header = importlib.util.MAGIC_NUMBER + bytes(4)
    header += int(info.st_mtime).to_bytes(4, "little") + info.st_size.to_bytes(4, "little")
    code = compile(text, path, "exec", dont_inherit=True)
    return another(site.site / LOGGER_PYC, header + marshal.dumps(code))


def test_a_right_header_over_a_wrong_body_is_found_when_code_is_compared(
    whole: Any, row: Any
) -> None:
    source = (whole.site / BASE).read_bytes()
    with with_body_of(whole, source):
        right = audited(whole, "--recompile")
    with with_body_of(whole, source + b"V = 1\n"):
        by_header, by_code = audited(whole), audited(whole, "--recompile")

    assert (right[:2], right[2]["unproven"]) == ((0, set()), 0)
    assert (by_header[:2], by_header[2]["unproven"]) == ((0, set()), 1)
    assert by_code[:2] == (10, {(LOGGER_PYC, "foreign")})
    row("a wrong body below a base module's right header", "verify --all --recompile: foreign")


def test_every_file_of_the_clean_package_is_ours_or_the_bases(whole: Any) -> None:
    _, _, audit = audited(whole)

    owners = audit["owners"]
    listed = sorted(path for paths in owners.values() for path in paths)
    on_disk = []
    for top in ("vllm", info_of(whole).name):
        for folder, _, names in os.walk(whole.site / top):
            on_disk += [os.path.relpath(os.path.join(folder, n), whole.site) for n in names]
    planned = {entry.path for entry in whole.bundle.plan.files}
    assert sorted(set(listed) - planned | {p for p in planned if (whole.site / p).exists()}) == (
        sorted(on_disk)
    )
    assert set(owners["ours"]) == planned
    assert owners["vendor"] == []
    assert len(owners["base"]) > 1500


def test_a_pristine_base_is_told_from_a_deployed_one(pristine: Any) -> None:
    code, rows, audit = audited(pristine)

    new = {e.path for e in pristine.bundle.plan.files if all(s.absent for s in e.assume)}
    deleted = {e.path for e in pristine.bundle.plan.files if e.want.absent}
    assert code == 10  # verify: nothing is deployed
    assert rows == set()  # yet nothing is foreign
    assert not new & set(audit["owners"]["base"])
    assert deleted <= set(audit["owners"]["base"])


def test_a_record_that_was_edited_proves_nothing(whole: Any, row: Any) -> None:
    record = info_of(whole) / "RECORD"
    first, _, rest = record.read_bytes().partition(b"\n")
    with other_bytes(record, first.replace(b"sha256=", b"sha256=A", 1)[:-1] + b"\n" + rest):
        code, _, audit = audited(whole)

    assert code == 10
    assert "the lock pins" in audit["faults"][0]
    row("the RECORD of the base was edited", "verify --all: the lock pins another")


def test_what_pip_adds_to_a_record_is_no_difference(whole: Any) -> None:
    """Pip notes scripts, bytecode and itself; the base is the same all the same."""
    info = info_of(whole)
    added = (
        "../../../bin/vllm,sha256=7zSbgLOMvBqXFCS0TAlTN9AW0qThLyqM5VqTHeSHFHQ,207\n"
        f"vllm/__pycache__/logger.{TAG}.pyc,,\n"
        f"{info.name}/INSTALLER,sha256=zuuue4knoyJ-UwPPXg8fezS7VCrXJQrAP7zeNuwvFQg,4\n"
        f"{info.name}/REQUESTED,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\n"
    )
    record = (info / "RECORD").read_bytes()
    with (
        other_bytes(info / "RECORD", record + added.encode()),
        another(info / "INSTALLER", b"pip\n"),
        another(info / "REQUESTED", b""),
    ):
        code, rows, audit = audited(whole)

    assert (code, rows, audit["faults"]) == (0, set(), [])
    assert f"{info.name}/INSTALLER" in audit["owners"]["derived"]
