"""What fuzzing found stays found, and each target still runs: a few seconds of it, where it can."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.fuzz import zipped
from tests.fuzz.run import HERE, TARGETS, cases, load

SECONDS = 5
CACHE = Path(
    os.environ.get("DCU_TEST_CACHE")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dcu-bundle"
)
KEPT = [(name, path) for name in TARGETS for path in cases(name)]


@pytest.mark.parametrize(("name", "path"), KEPT, ids=[f"{n}-{p.name}" for n, p in KEPT])
def test_what_was_found_once_stays_mended(name: str, path: Path, tmp_path: Path) -> None:
    load(name).one(path.read_bytes(), tmp_path)


@pytest.mark.parametrize("path", cases("bundle"), ids=lambda path: path.name)
def test_no_bundle_that_was_found_is_believed(path: Path) -> None:
    assert load("bundle")._by_operator(path) is None


def test_a_bundle_is_put_together_as_it_was_taken_apart() -> None:
    whole = load("bundle").seeds()["whole"]

    assert zipped.joined(zipped.parts_of(whole)) == whole


def test_many_changes_of_a_bundle_get_past_the_first_check(tmp_path: Path) -> None:
    target = load("bundle")
    whole, path = target.seeds()["whole"], tmp_path / "x.pyz"
    taken = 0
    for seed in range(300):
        made = target.mutate(whole, 6000, seed, lambda data, _: data[:-1] + b"!")
        path.write_bytes(made)
        taken += made != whole and target._by_operator(path) is not None

    assert taken > 15


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_taken_by_its_target(name: str, tmp_path: Path) -> None:
    target = load(name)
    seeds = target.seeds()
    assert seeds
    for data in seeds.values():
        target.one(data, tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_can_fail(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that crashes on the first seed must not be taken for one that refuses it."""
    target = load(name)

    def crash(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    reader = {"bundle": "ZipBlobs", "said": "parse", "series": "series", "yaml": "document"}[name]
    place = getattr(target, reader)
    if isinstance(place, type) or callable(place):
        monkeypatch.setattr(target, reader, crash)
    else:
        monkeypatch.setattr(place, "parse" if name == "yaml" else "read", crash)
    with pytest.raises(ZeroDivisionError):
        target.one(next(iter(target.seeds().values())), tmp_path)


@cache
def fuzzer() -> tuple[Path, str]:
    """Return the folder that holds atheris, and why there is none."""
    tag = f"{sys.implementation.cache_tag}-{os.uname().machine}"
    folder = CACHE / "fuzz" / tag
    if (folder / "atheris").is_dir():
        return folder, ""
    beside = folder.with_name(f"{tag}.{os.getpid()}")
    argv = [sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-deps"]
    argv += ["--disable-pip-version-check", "--no-input", "--only-binary=:all:"]
    argv += ["--require-hashes", "--target", str(beside), "-r", str(HERE / "requirements.txt")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        return folder, lines[-1] if lines else "pip failed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        beside.rename(folder)
    return folder, ""


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", TARGETS)
def test_some_seconds_of_fuzzing_find_nothing(name: str, tmp_path: Path) -> None:
    folder, missing = fuzzer()
    if missing:
        pytest.skip(f"atheris cannot be had for this Python: {missing}")
    argv = [sys.executable, str(HERE / "run.py"), name, str(tmp_path / "corpus")]
    argv += [f"-max_total_time={SECONDS}", "-max_len=20000", "-timeout=60"]
    done = subprocess.run(
        argv,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done " in done.stderr
