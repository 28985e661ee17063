"""Profiles as the profiler writes them: table, database, API tables, damaged ones."""

from __future__ import annotations

import csv
import shutil
import sqlite3
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from deploy.errors import BadValues, Refused
from deploy.layout import HERE
from deploy.measure import profile
from deploy.measure.profile import Classes, summary

FIXTURES = Path(__file__).parent / "fixtures"
KERNELS = FIXTURES / "hipkernel.csv"
PATTERNS = {
    "gemm": ("Cijk_*", "Custom_Cijk_*"),
    "split-k": ("Cijk_B_PostGSU*",),
    "attention": ("kernel_unified_attention_*",),
    "linear-attention": ("fused_recurrent_gated_delta_rule*", "_causal_conv1d_*"),
    "own": ("dcu_*",),
    "elementwise": ("void at::native::*", "triton_???_fused_*"),
}


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def database(path: Path, rows: list[list[str]], *, processes: int = 1) -> Path:
    """The profiler's database of the same calls, spread over processes with own numbers."""
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE CONFIG (KEY, PID)")
    db.execute("CREATE TABLE STR_TABLE (PID, CONFIG_KEY, TYPE, STR_ID INT, STR_NAME TEXT)")
    for process in range(processes):
        key = f"192_0_2_{process}_61207_1773"
        columns = "BeginNs INT, EndNs INT, Name TEXT, DurationNs INT"
        db.execute(f'CREATE TABLE "HIPOPS_{key}" ({columns})')
        db.execute(f'CREATE INDEX "HIPOPS_{key}_idx" ON "HIPOPS_{key}" (BeginNs)')
        # The same number is another name in another process, and another type's.
        for number, row in enumerate(rows, 100 * process):
            db.execute("INSERT INTO STR_TABLE VALUES (1, ?, 6, ?, ?)", (key, number, row[0]))
            db.execute("INSERT INTO STR_TABLE VALUES (1, ?, 1, ?, 'hipMalloc')", (key, number))
            calls, total = int(row[1]), int(row[2])
            mine = [i for i in range(calls) if i % processes == process]
            durations = [total // calls + (total % calls if i == 0 else 0) for i in mine]
            db.executemany(
                f'INSERT INTO "HIPOPS_{key}" VALUES (0, 0, ?, ?)',
                [(str(number), duration) for duration in durations],
            )
    db.commit()
    db.close()
    return path


def rows_of(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))[1:-1]


def test_a_table_is_grouped_by_the_longest_pattern_that_fits() -> None:
    found = summary(KERNELS, PATTERNS)

    assert (found.kernels, found.calls, found.total) == (14, 7976, 1315492233)
    assert found.classes[0].name == "gemm"
    assert found.of("gemm").kernels == 3
    assert found.of("split-k").calls == 640
    assert found.of("own").total == 41177209
    assert found.of("elementwise").kernels == 5
    assert found.of("other").kernels == 1
    assert sum(part.total for part in found.classes) == found.total
    assert found.top[0].calls == 1344
    assert [part.total for part in found.top] == sorted((p.total for p in found.top), reverse=True)
    assert found.notes == ()


@pytest.mark.parametrize("processes", [1, 3])
def test_the_database_says_what_the_table_says(processes: int, tmp_path: Path) -> None:
    path = database(tmp_path / "x.db", rows_of(KERNELS), processes=processes)

    found, table = summary(path, PATTERNS), summary(KERNELS, PATTERNS)

    assert (found.calls, found.total, found.kernels) == (table.calls, table.total, table.kernels)
    assert found.classes == table.classes
    assert found.top == table.top


def test_an_empty_database_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE CONFIG (KEY)")
    db.execute("CREATE TABLE STR_TABLE (PID)")
    db.execute("CREATE TABLE HIPOPSX (Name)")
    db.commit()
    db.close()

    with pytest.raises(BadValues, match="no usable profile") as caught:
        summary(path, PATTERNS)

    assert "not valid trace data" in caught.value.why


def test_a_database_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    path = database(tmp_path / "x.db", rows_of(KERNELS))
    writer = sqlite3.connect(path)
    writer.execute("BEGIN EXCLUSIVE")

    with pytest.raises(Refused, match="cannot be read yet") as caught:
        summary(path, PATTERNS)
    writer.close()

    assert "locked" in caught.value.why


def changed(path: Path, *statements: str) -> Path:
    """The database of a few calls, with its columns as loose as sqlite lets them be."""
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE HIPOPS_k (Name, DurationNs)")
    db.execute("CREATE TABLE STR_TABLE (STR_ID, TYPE, CONFIG_KEY, STR_NAME)")
    db.execute("INSERT INTO STR_TABLE VALUES (1, 6, 'k', 'Cijk_a'), (2, 6, 'k', 'copy')")
    db.execute("INSERT INTO HIPOPS_k VALUES ('1', 10), ('1', 20), (2, 5)")
    for statement in statements:
        db.execute(statement)
    db.commit()
    db.close()
    return path


@pytest.mark.parametrize(
    ("statement", "calls", "note"),
    [
        ("DELETE FROM STR_TABLE WHERE TYPE = 1", 3, ""),
        ("INSERT INTO STR_TABLE VALUES (1, 6, 'k', 'Cijk_a'), ('1', 6, 'k', 'Cijk_a')", 3, ""),
        ("INSERT INTO STR_TABLE VALUES (0, 6, 'k', 'Cijk_0')", 3, ""),
        ("INSERT INTO HIPOPS_k VALUES (1, '30')", 4, ""),
        ("INSERT INTO HIPOPS_k VALUES (1, NULL), (9, NULL)", 3, "2 calls had not ended"),
        ("INSERT INTO HIPOPS_k VALUES (NULL, 1)", 4, "1 calls are of kernels that STR_TABLE"),
        ("INSERT INTO HIPOPS_k VALUES ('who', 1)", 4, "1 calls are of kernels that STR_TABLE"),
        ("INSERT INTO HIPOPS_k VALUES (x'ff', 1)", 4, "1 calls are of kernels that STR_TABLE"),
        ("UPDATE STR_TABLE SET STR_NAME = NULL WHERE STR_ID = 2", 3, "1 calls are of kernels"),
        ("UPDATE STR_TABLE SET STR_NAME = x'ff' WHERE STR_ID = 2", 3, "1 calls are of kernels"),
        ("UPDATE STR_TABLE SET STR_NAME = 7 WHERE STR_ID = 2", 3, "1 calls are of kernels"),
    ],
)
def test_what_a_database_does_not_tell_is_left_out_and_said(
    statement: str, calls: int, note: str, tmp_path: Path
) -> None:
    found = summary(changed(tmp_path / "x.db", statement), PATTERNS)

    assert found.calls == calls
    assert (found.of("gemm").calls, found.of("gemm").total) == (
        (3, 60) if "'30'" in statement else (2, 30)
    )
    assert any(text.startswith(note) for text in found.notes[1:]) == bool(note), found.notes


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("UPDATE HIPOPS_k SET DurationNs = 'abc'", "have a DurationNs that is no whole number"),
        ("UPDATE HIPOPS_k SET DurationNs = 1.5", "have a DurationNs that is no whole number"),
        ("UPDATE HIPOPS_k SET DurationNs = x'31'", "have a DurationNs that is no whole number"),
        ("UPDATE HIPOPS_k SET DurationNs = -5 WHERE Name = 2", "a call of copy took -5 ns"),
        ("UPDATE HIPOPS_k SET DurationNs = NULL", "none of its 3 calls had ended"),
        ("INSERT INTO STR_TABLE VALUES (1, 6, 'k', 'other')", "two names for 1: Cijk_a and other"),
    ],
)
def test_a_database_that_cannot_be_added_up_is_refused(
    statement: str, why: str, tmp_path: Path
) -> None:
    with pytest.raises(BadValues) as caught:
        summary(changed(tmp_path / "x.db", statement), PATTERNS)

    assert why in caught.value.why


def test_api_calls_are_not_kernel_time(tmp_path: Path) -> None:
    for name in ("x.hiptrace.csv", "x.hsatrace.csv", "renamed.csv"):
        shutil.copy(FIXTURES / "hiptrace.csv", tmp_path / name)

        with pytest.raises(Refused, match="table of API calls"):
            summary(tmp_path / name, PATTERNS)


def test_names_with_commas_are_one_field(tmp_path: Path) -> None:
    text = (
        '"Name","Calls","TotalDurationNs"\n"void Cijk<float, 4, 256>(float*, int)",432,7631000000\n'
    )
    for start in ("", "\ufeff"):
        found = summary(
            write(tmp_path / "k.csv", start + text), {"c": ("void Cijk<float, 4, 256>*",)}
        )

        assert [(part.name, part.calls, part.total) for part in found.classes] == [
            ("c", 432, 7631000000)
        ]
        assert "no Total row" in found.notes[0]


HEAD = '"Name","Calls","TotalDurationNs","AverageNs","Percentage"\n'
TOTAL = '"Total","2","30","15","100.0"\n'
B = '"b","1","10","10","33.333"\n'
GOOD = '"a","1","20","20","66.667"\n"b","1","10","10","33.333"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "line 1: it is empty"),
        ("Name,Calls\na,1\n", "line 1: it has no column TotalDurationNs"),
        ("Name,Calls,TotalDurationNs\nvoid Cijk<float, 4, 256>(float*, int),432,7631000000\n",
         "line 2: 6 fields where the header has 3; a name with commas needs quotes"),
        (HEAD + GOOD + '"Total","2","30","15","100.0"', "line 4: the last line is cut"),
        (HEAD + '"a","1","20","20","66.667"\n"b","1","1', "line 3: the last line is cut"),
        (HEAD + GOOD, "the last row is not Total"),
        (HEAD + GOOD + '"c","1","5","5","1.0"\n' + TOTAL, "line 4: average or share"),
        (HEAD + '"a","1","20","21","66.667"\n' + B + TOTAL, "line 2: average"),
        (HEAD + '"a","1","20","20","70.0"\n' + B + TOTAL, "line 2: average"),
        (HEAD + GOOD + '"Total","3","30","10","100.0"\n', "says 3 calls and 30 ns"),
        (HEAD + '"a","0","20","20","66.667"\n' + B + TOTAL, "line 2: 0 calls"),
        (HEAD + '"a","x","20","20","66.667"\n' + B + TOTAL,
         "line 2, column Calls: 'x' is no whole number"),
        (HEAD + '"a","1","2e1","20","66.667"\n' + B + TOTAL,
         "line 2, column TotalDurationNs: '2e1' is no whole number of nanoseconds"),
        (HEAD + '"a","1","20","20.5","66.667"\n' + B + TOTAL,
         "line 2, column AverageNs: '20.5' is no whole number of nanoseconds"),
        (HEAD + '"a","1","20","20","most"\n' + B + TOTAL,
         "line 2, column Percentage: 'most' is no number of percent"),
        (HEAD + '"a","1","20"\n' + TOTAL, "line 2: 3 fields where the header has 5"),
        (HEAD + '"Total","0","0","0","100.0"\n', "it holds no kernel call"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_an_error_with_its_line(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadValues, match="no usable profile") as caught:
        summary(write(tmp_path / "k.csv", text), {"x": ("*",)})

    assert why in caught.value.why


def test_a_value_that_was_typed_wrong_is_not_told_to_be_a_cut_file(tmp_path: Path) -> None:
    path = write(tmp_path / "k.csv", HEAD + '"a","x","20","20","66.667"\n' + B + TOTAL)

    with pytest.raises(BadValues) as caught:
        summary(path, {"x": ("*",)})

    assert "as the profiler wrote it" in caught.value.fix
    assert "docs/measure.md" in caught.value.fix


@pytest.mark.parametrize("top", ["-1", "21"])
def test_a_number_of_kernels_that_cannot_be_shown_is_refused(top: str) -> None:
    argv = ("./inv", "profile.summary", "-n", "demo", "--file", str(KERNELS), "--top", top)

    done = subprocess.run(argv, cwd=HERE.top, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == f"--top {top} cannot be shown"


def test_a_fault_far_down_is_named_by_its_own_line(tmp_path: Path) -> None:
    rows = [f'"kernel {i}, a",1,10\n' for i in range(10_000)]
    rows[9_000] = '"kernel, cut",1\n'

    with pytest.raises(BadValues) as caught:
        summary(write(tmp_path / "k.csv", "Name,Calls,TotalDurationNs\n" + "".join(rows)), {})

    assert "line 9002: 2 fields" in caught.value.why


def test_bytes_that_are_no_text_are_no_crash(tmp_path: Path) -> None:
    (tmp_path / "k.csv").write_bytes(b"Name,Calls,TotalDurationNs\n\xff\xfe,1,10\n")

    with pytest.raises(BadValues):
        summary(tmp_path / "k.csv", {})


def test_a_part_that_was_never_written_is_found(tmp_path: Path) -> None:
    path = tmp_path / "k.csv"
    path.write_bytes(b"Name,Calls,TotalDurationNs\n\0\0\0,1,2\n")

    with pytest.raises(BadValues) as caught:
        summary(path, {})

    assert "NUL" in caught.value.why


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    path = tmp_path / "k.csv"
    with path.open("w") as file:
        file.write("Name,Calls,TotalDurationNs\n")
        file.writelines(f'"void at::native::k<{i}, {"x" * 200}>(int, int)",3,{i}\n'
                        for i in range(60_000))  # fmt: skip
    tracemalloc.start()

    found = summary(path, PATTERNS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert found.kernels == 60_000
    assert path.stat().st_size > 12 << 20
    assert peak < 8 << 20


def test_brackets_mean_themselves_and_marks_any_character() -> None:
    classes = Classes({"a": ("k[1]*",), "b": ("k?2",), "c": ("*x*y",)})

    names = [classes.names[classes.index(name)] for name in ("k[1]z", "k12", "k122", "1x2y", "k1")]

    assert names == ["a", "b", "other", "c", "other"]


def test_two_profiles_show_where_the_time_went(tmp_path: Path) -> None:
    before = write(tmp_path / "a.csv", "Name,Calls,TotalDurationNs\ngemm1,10,900\natt,10,100\n")
    after = write(tmp_path / "b.csv", "Name,Calls,TotalDurationNs\ngemm1,10,80\natt,10,120\n")
    classes = {"gemm": ("gemm*",), "attention": ("att*",)}

    one, two = summary(before, classes), summary(after, classes)
    rows = profile.changes(one, two)

    assert [(row["class"], row["change_ns"]) for row in rows] == [("gemm", -820), ("attention", 20)]
    assert profile.hot_spot(one, two) == (
        "the hot spot moved from gemm (90.0%) to attention (60.0% of the kernel time)"
    )
    assert profile.worth(one, one.of("gemm")) == pytest.approx(0.09)
    assert profile.worth(two, two.of("nothing")) == 0
