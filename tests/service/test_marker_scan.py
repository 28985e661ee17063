"""Markers are read from one window of a log, by whoever printed them; logs are real bytes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.agent import log
from deploy.agent.log import Count, Marker, Place

FIXTURES = Path(__file__).parent / "fixtures"
BIG = (4096, 5120)
READY = "(APIServer pid=1) INFO:     Application startup complete.\n"


def line(shape: str = "(4096, 5120)", pid: int = 1200, selected: object = True) -> str:
    return (
        f"(EngineCore pid={pid}) WARNING 03-16 10:32:19 [utils.py:203] "
        f"DCU_KERNEL_DIAG selected={selected} shape={shape} dtype=torch.bfloat16\n"
    )


def written(path: Path, *parts: str) -> Place:
    """Append to a log as a server does, and return where it ended before."""
    place = log.mark(str(path))
    with path.open("a", newline="") as file:
        file.write("".join(parts))
    return place


def counts(found: log.Scan) -> dict[tuple[int, tuple[int, ...], bool], Count]:
    return {(m.pid, m.shape, m.selected): count for m, count in found.markers.items()}


def test_a_whole_start_is_read_with_its_phases_and_signs() -> None:
    found = log.scan(str(FIXTURES / "serve_start.txt"))

    assert counts(found) == {
        (4187, BIG, False): Count(before=1),
        (4187, (1, 5120), True): Count(before=1),
        (4187, BIG, True): Count(after=2),
        (4187, (808, 5120), False): Count(after=1),
    }
    assert found.ready
    assert found.signs == {"compiled code loaded", "graphs captured"}
    assert found.damaged == 0


def test_a_real_start_of_the_server_without_markers_has_none_and_is_ready() -> None:
    found = log.scan(str(FIXTURES / "serve_start_cpu.txt"))

    assert found.ready
    assert found.markers == {}
    assert found.lost == []


def test_a_start_before_this_one_in_the_same_file_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    written(path, line(pid=900), READY)
    start = written(path, line("(1, 8)"), READY, line(selected=False))

    found = log.scan(str(path), start)

    assert counts(found) == {
        (1200, (1, 8), True): Count(before=1),
        (1200, BIG, False): Count(after=1),
    }


def test_only_what_stands_after_the_windows_begin_is_in_the_window(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    start = written(path, READY, line())
    window = written(path, line())
    end = written(path, line(), line())
    assert counts(log.scan(str(path), start, window))[1200, BIG, True] == Count(0, 4, 3)

    found = log.scan(str(path), start, window, end)

    assert counts(found)[1200, BIG, True] == Count(before=0, after=2, window=1)


@pytest.mark.parametrize(
    "text",
    [
        "Processed prompts:  50%\r" + line().strip() + "\n",
        line().strip() + "\rProcessed prompts:  50%\n",
        line().strip() + "\r\n",
        line().strip(),
        "\x1b[33m" + line().replace("selected=", "\x1b[0mselected=\x1b[1m").strip() + "\x1b[0m\n",
        "(APIServer pid=7) INFO: half a line" + line(),
        line("torch.Size([4096, 5120])"),
        line("[4096, 5120]"),
        line("4096x5120").replace("shape=4096x5120", "shape=(4096 x 5120)"),
        line(selected=1),
        line().replace("(EngineCore pid=1200) ", "").strip() + " pid=1200 phase=prefill\n",
        "  \t" + line(),
        line().replace("pid=1200", "rank=0 pid=1200"),
        "(EngineCore pid=1200) TRACE 11-30 10:00:00.5 [linear.py:33] [x: dcu] " + line()[60:],
    ],
)
def test_a_marker_is_read_however_its_line_is_dressed(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.log"
    written(path, "noise\n", text)

    assert counts(log.scan(str(path))) == {(1200, BIG, True): Count(before=1)}


@pytest.mark.timeout(60)  # each mark of a prompt looked at anew would take hours
def test_a_long_prompt_full_of_marks_and_markers_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    prompt = 'it\\\'s "so" ' * 20 + line().strip()
    written(path, *(f"(APIServer pid=7) INFO prompt: '{prompt * 200}', n=1\n" for _ in range(20)))

    assert log.scan(str(path)).markers == {}


@pytest.mark.parametrize(
    "text",
    [
        "WARNING Unknown vLLM environment variable detected: VLLM_DCU_KERNEL_DIAG\n",
        "DCU_KERNEL_DIAG\n",
        "",
    ],
)
def test_the_name_alone_is_no_marker(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.log"
    written(path, text)

    found = log.scan(str(path))

    assert found.markers == {}
    assert found.damaged == 0


def test_a_marker_torn_by_another_writer_is_reported_and_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    torn = "(EngineCore pid=3) DCU_KERNEL_DIAG selected=True shape=(40(APIServer pid=7) INFO ok\n"
    written(path, torn, line())

    found = log.scan(str(path))

    assert counts(found) == {(1200, BIG, True): Count(before=1)}
    assert found.damaged == 1


def test_two_markers_on_one_line_are_two(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    written(path, line(pid=1).strip() + " ", line(pid=2))

    assert set(counts(log.scan(str(path)))) == {(1, BIG, True), (2, BIG, True)}


def test_a_marker_that_names_no_process_belongs_to_none(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    written(path, line(), line().replace("(EngineCore pid=1200) ", ""))

    assert set(counts(log.scan(str(path)))) == {(1200, BIG, True), (0, BIG, True)}


def test_a_log_that_was_rotated_by_rename_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    written(path, line(pid=900))
    start = written(path, line())
    window = written(path, line())
    path.rename(tmp_path / "serve.log.1")
    written(path, line())

    found = log.scan(str(path), start, window)

    assert counts(found) == {(1200, BIG, True): Count(before=3, window=2)}
    assert found.lost == []


def test_a_window_in_the_new_file_leaves_out_the_rotated_part(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    start = written(path, line())
    path.rename(tmp_path / "serve.log.1")
    written(path, line())
    window = written(path, line())

    found = log.scan(str(path), Place(start.device, (tmp_path / "serve.log.1").stat().st_ino, 0),
                     window)  # fmt: skip

    assert counts(found) == {(1200, BIG, True): Count(before=3, window=1)}


def test_a_piece_that_has_gone_is_said_to_be_lost(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    written(path, line())
    start = written(path, line())
    kept = path.open()  # so that its inode is not given to the next file
    path.unlink()
    written(path, line())

    found = log.scan(str(path), start, start)
    kept.close()

    assert found.lost == [
        "the file in which this start began has been rotated away",
        "the measured window begins in a piece of the log that has gone",
    ]
    assert counts(found)[1200, BIG, True].window == 0


def test_a_log_cut_to_nothing_and_grown_again_is_said_to_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    written(path, line(), line())
    start = written(path, line())
    os.truncate(path, 0)

    found = log.scan(str(path), start)

    assert found.lost == [f"{path} was cut to less than the noted offset"]


@pytest.mark.parametrize("kept", [True, False])
def test_a_log_cut_and_grown_beyond_the_window_is_another_log(tmp_path: Path, kept: bool) -> None:
    path = tmp_path / "serve.log"
    bare = "DCU_KERNEL_DIAG selected=True shape=(1, 8) dtype=torch.bfloat16\n"
    written(path, "first\n", READY, bare * 200)
    window = written(path, line(selected=False))
    if kept:
        (tmp_path / "serve.log.1").write_bytes(path.read_bytes())  # what logrotate keeps
    os.truncate(path, 0)
    # The same lines before the place as before: only the log's begin tells the two apart.
    written(path, "again\n", READY, bare * 200, line())

    found = log.scan(str(path), None, window)

    assert "the measured window begins in a piece of the log that has gone" in found.lost
    assert not any(count.window for count in found.markers.values())
    assert log.scan(str(path), window).lost == [f"{path} was cut and written anew since the start"]
    assert Place.parse(window.to_json()) == window


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "serve.log"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")

    assert log.scan(str(path)).lost == [f"{path} is no file that can be read"]
    with pytest.raises(log.NoLog, match="is not read"):
        log.mark(str(path))
    with pytest.raises(log.NoLog):
        log.require_log(str(path), str(tmp_path))


def test_a_log_that_leads_out_of_the_launch_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "serve.log"
    log.require_log(str(path), str(tmp_path))
    (tmp_path / "kept.log").touch()
    path.symlink_to(tmp_path / "kept.log")
    log.require_log(str(path), str(tmp_path))
    log.require_log(str(path), str(tmp_path / "runs"), str(tmp_path))

    with pytest.raises(log.NoLog) as caught:
        log.require_log(str(path), str(tmp_path / "runs"))
    assert "leads to" in caught.value.why


def test_a_log_that_is_not_there_is_lost_and_one_that_came_later_is_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    assert log.scan(str(path)).lost == [f"{path} is not there"]

    start = written(path, line())

    assert counts(log.scan(str(path), start, start))[1200, BIG, True] == Count(1, 0, 1)


def test_markers_without_number_are_bounded_and_the_rest_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    written(path, *(line(f"({n}, 1)") for n in range(5000)))

    found = log.scan(str(path))

    assert len(found.markers) == 4096
    assert found.uncounted == 5000 - 4096


# One is longer than a chunk of the reader may be between two line ends.
PARTS = (line(), line("(1, 8)", 7), READY, "noise\r", "x" * 99_999 + "\n", "\n")


@settings(deadline=None)
@given(st.lists(st.integers(0, len(PARTS) - 1), max_size=12), st.integers(0, 12))
def test_where_chunks_end_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[int], cut: int
) -> None:
    """The reader in one pass says what a plain reading of the whole text says."""
    parts = [PARTS[index] for index in chosen]
    path = tmp_path_factory.mktemp("log") / "serve.log"
    written(path, *parts[:cut])
    window = written(path, *parts[cut:])

    found = log.scan(str(path), None, window)

    text = "".join(parts)
    ready = text.find("Application startup complete.")
    edge = len("".join(parts[:cut]))
    for pid, shape in ((1200, "(4096, 5120)"), (7, "(1, 8)")):
        wanted = line(shape, pid).strip()
        at = [i for i in range(len(text)) if text.startswith(wanted, i)]
        count = found.markers.get(
            Marker(pid, BIG if pid == 1200 else (1, 8), "torch.bfloat16", selected=True), Count()
        )
        assert count.before + count.after == len(at)
        assert count.after == sum(0 <= ready < i for i in at)
        assert count.window == sum(i >= edge for i in at)


BARE = "DCU_KERNEL_DIAG selected=True shape=(4096, 5120) dtype=torch.bfloat16\n"
# The second ends as the first does, and is another process's: a block must not begin inside it.
BURST = (BARE, "(EngineCore pid=9) " + BARE, line("(1, 8)", 7), line("(2, 8)", 7), "noise\n")


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 40)),
        max_size=8,
    ),
    st.sampled_from([0, 7_000, 300_000]),
)
def test_bursts_that_repeat_are_counted_as_line_by_line(
    tmp_path_factory: pytest.TempPathFactory, bursts: list[tuple[list[int], int]], gap: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "serve.log"
    lines = [BURST[index] for block, times in bursts for index in block * times]
    written(path, READY, *lines, "x\n" * (gap // 2), *lines)

    found = log.scan(str(path))

    wanted: dict[tuple[int, tuple[int, ...], bool], Count] = {}
    for pid, shape, text in zip((0, 9, 7, 7), (BIG, BIG, (1, 8), (2, 8)), BURST):
        if text in lines:
            wanted[pid, shape, True] = Count(after=2 * lines.count(text))
    assert counts(found) == wanted


@pytest.mark.parametrize("at", [0, 3, 500, 999])
def test_a_long_log_read_by_several_processes_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    path = tmp_path / "serve.log"
    lines = [line(f"({n % 7}, 1)", selected=n % 3 > 0) + "noise\n" * (n % 5) for n in range(1000)]
    written(path, READY, *lines[:at])
    window = written(path, *lines[at:])
    alone = log.scan(str(path), None, window).to_json()

    # A share of a few lines, so that a small log is cut as often as a long one.
    monkeypatch.setattr(log, "_SHARE", 1000)
    monkeypatch.setattr(log, "_START", 200)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(4))
    shared = log.scan(str(path), None, window).to_json()

    assert shared == alone
    assert alone["bytes"] == path.stat().st_size
    assert sum(row["window"] for row in alone["markers"]) == 1000 - at


@pytest.mark.slow
def test_memory_stays_the_same_whatever_the_size_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    block = (line() + "(EngineCore pid=1200) INFO something else goes on here\n" * 50) * 400
    with path.open("w") as file:
        for _ in range(150):
            file.write(block)
        file.write("no end of line " * 4_000_000)
    code = (
        "import sys; from deploy.agent import log; found = log.scan(sys.argv[1])\n"
        "print(found.bytes, sum(c.before for c in found.markers.values()))"
    )
    limit = 200 << 20
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True, text=True, timeout=120, check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip

    assert path.stat().st_size > limit
    assert done.stdout.split() == [str(path.stat().st_size), str(150 * 400)]
