"""Gate 6: what the markers of a log prove, and what they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.agent import log
from deploy.errors import BadValues
from deploy.service.chunks import chunks
from deploy.service.markers import Wanted, counted, judge, judge_off, wanted

ENGINE = 1200
BIG = wanted("(4096, 5120)", "bfloat16", "prefill")
READY = "(APIServer pid=1100) INFO:     Application startup complete.\n"
CAPTURED = "(EngineCore pid=1200) INFO Graph capturing finished in 8 secs, took 0.34 GiB\n"


def line(shape: str = "(4096, 5120)", selected: bool = True, pid: int = ENGINE) -> str:
    return (
        f"(EngineCore pid={pid}) WARNING DCU_KERNEL_DIAG "
        f"selected={selected} shape={shape} dtype=torch.bfloat16\n"
    )


FELL = line(selected=False)


def scan(tmp_path: Path, start: str, window: str = "") -> dict[str, Any]:
    """What the agent reads of a log whose measured window begins after `start`."""
    path = tmp_path / "serve.log"
    path.write_text(start)
    place = log.mark(str(path))
    with path.open("a") as file:
        file.write(window)
    return log.scan(str(path), None, place).to_json()


def test_a_marker_inside_the_window_proves_the_path(tmp_path: Path) -> None:
    found = judge(scan(tmp_path, READY, line() + line()), BIG, [ENGINE])

    assert found.proven
    assert found.proofs == (
        "(4096, 5120) bfloat16 prefill: selected=True 2 times inside the window",
    )


@pytest.mark.parametrize(
    ("start", "window", "why"),
    [
        (READY, "", "the log holds no marker of this service; is the diag variable set?"),
        (READY + line("(1, 8)"), "", "the window holds no marker of this service"),
        (READY, line("(1, 8)"), "the window holds other markers only: (1, 8) bfloat16"),
        (READY + line(), "", "it was selected outside the window only"),
        (line() + READY, "", "it was selected outside the window only"),
        (READY + line(selected=False), "", "outside the window it took the fallback"),
        (READY, line(selected=False), "selected=False all 1 times inside the window"),
        (READY, line() + line(selected=False), "selected=False 1 of 2 times inside the window"),
        (READY, line(pid=900), "only pid 900 printed it, which is not this service"),
        (READY, line().replace("(EngineCore pid=1200) ", ""), "only no named process printed it"),
        ("", line(), "the server never said that it is ready"),
    ],
)
def test_anything_else_is_not_proven_and_says_what_came_nearest(
    tmp_path: Path, start: str, window: str, why: str
) -> None:
    found = judge(scan(tmp_path, start, window), BIG, [ENGINE])

    assert not found.proven
    assert why in "\n".join(found.faults)


def test_the_right_shape_of_another_type_is_not_it(tmp_path: Path) -> None:
    needed = wanted("(4096, 5120)", "torch.float16", "prefill")

    assert not judge(scan(tmp_path, READY, line()), needed, [ENGINE]).proven


def test_a_decode_marker_may_be_seen_at_capture_and_nowhere_else(tmp_path: Path) -> None:
    needed = wanted("(1, 5120)", "", "decode")
    one = line("(1, 5120)")

    assert judge(scan(tmp_path, one + CAPTURED + READY), needed, [ENGINE]).proven
    assert not judge(scan(tmp_path, one + READY), needed, [ENGINE]).proven
    assert not judge(scan(tmp_path, one + CAPTURED + READY), needed, [ENGINE], eager=True).proven
    prefill = wanted("(1, 5120)", "", "prefill")
    assert not judge(scan(tmp_path, one + CAPTURED + READY), prefill, [ENGINE]).proven


def test_every_chunk_of_the_plan_is_asked_for(tmp_path: Path) -> None:
    needed = wanted("chunks", "", "prefill", chunks(9000, 4096))
    assert [want.shape for want in needed] == [(4096, None), (808, None)]
    both = line() + line() + line("(808, 5120)")

    assert judge(scan(tmp_path, READY, both), needed, [ENGINE]).proven

    fallback = line() + line() + line("(808, 5120)", selected=False)
    found = judge(scan(tmp_path, READY, fallback), needed, [ENGINE])
    assert len(found.proofs) == 1
    assert found.faults == ("(808, *) prefill: selected=False all 1 times inside the window",)


def test_what_cannot_be_seen_is_said(tmp_path: Path) -> None:
    loaded = "(EngineCore pid=1200) INFO Directly load AOT compilation from path /c/model\n"
    torn = "(EngineCore pid=1200) DCU_KERNEL_DIAG selected=True sha(APIServer pid=1) INFO\n"

    found = judge(scan(tmp_path, loaded + CAPTURED + READY, line() + torn), BIG, [ENGINE])

    assert found.proven
    assert [text.split(":")[0] for text in found.blind] == [
        "decode runs captured graphs",
        "compiled code was loaded from a cache",
        "1 markers were torn apart by other output and not counted",
    ]


def test_with_the_switch_off_nothing_may_be_selected_in_any_phase(tmp_path: Path) -> None:
    off = line(selected=False)

    assert judge_off(scan(tmp_path, off + READY, off), [ENGINE]).proven
    assert not judge_off(scan(tmp_path, line() + READY, off), [ENGINE]).proven
    assert not judge_off(scan(tmp_path, READY, off + line("(1, 8)")), [ENGINE]).proven


@pytest.mark.parametrize(
    ("start", "window", "why"),
    [
        (READY, "", "this service printed no marker inside the window"),
        (READY + line(selected=False), "", "this service printed no marker inside the window"),
        (READY, line(selected=False, pid=900), "this service printed no marker"),
        (READY, FELL + line(pid=900), "was selected 1 times by pid 900"),
        (READY, FELL + line().replace("(EngineCore pid=1200) ", ""), "by no named process"),
        (READY, FELL + "(EngineCore pid=1200) DCU_KERNEL_DIAG selected=True sh(APIServer) x\n",
         "1 markers cannot be read whole"),
        (READY, FELL + "(EngineCore pid=1200) DCU_KERNEL_DIAG selected=\n",
         "1 markers cannot be read whole"),
    ],
)  # fmt: skip
def test_with_the_switch_off_silence_and_strangers_speak_against_it(
    tmp_path: Path, start: str, window: str, why: str
) -> None:
    found = judge_off(scan(tmp_path, start, window), [ENGINE])

    assert not found.proven
    assert why in "\n".join(found.faults)


TORN = "(EngineCore pid=1200) DCU_KERNEL_DIAG selected=False shape=({}(APIServer pid=7) INFO ok\n"
UNREAD = "1 markers inside the window cannot be read whole, and may be fallbacks"


@pytest.mark.parametrize(
    "torn",
    [
        TORN.format("40"),
        TORN.format("4096, 5120) dtype=torch.bfl"),
        "(EngineCore pid=1200) DCU_KERNEL_DIAG selected=Fa(APIServer pid=7) INFO ok\n",
        f"(EngineCore pid=1200) WARN(APIServer pid=7) INFO ok\nING {FELL[FELL.index('DCU') :]}",
    ],
)
def test_a_torn_marker_that_may_be_a_fallback_of_what_is_wanted_is_a_fault(
    tmp_path: Path, torn: str
) -> None:
    found = judge(scan(tmp_path, READY, line() + torn), BIG, [ENGINE])

    assert not found.proven
    assert found.faults[0].startswith(UNREAD)
    # Before the window, or of another shape, it is nothing to this request.
    assert judge(scan(tmp_path, READY + torn, line()), BIG, [ENGINE]).proven
    other = TORN.format("808, 5120) dtype=torch.bfl")
    assert judge(scan(tmp_path, READY, line() + other), BIG, [ENGINE]).proven


def test_a_fallback_counts_whoever_printed_it_and_however_many_shapes_came_before(
    tmp_path: Path,
) -> None:
    fell = line(selected=False)
    for window in (line() + fell.replace("pid=1200", "pid=900"),
                   line() + "".join(line(f"({n}, 1)") for n in range(5000)) + fell):  # fmt: skip
        assert not judge(scan(tmp_path, READY, window), BIG, [ENGINE]).proven
    rare = "".join(line(f"({n}, 1)") for n in range(5000))
    assert judge(scan(tmp_path, READY, line() + rare), BIG, [ENGINE]).proven


ASKED = (
    "(APIServer pid=1100) INFO 11-30 00:00:00 [logger.py:43] Received request cmpl-1: prompt: {},"
    " params: SamplingParams(n=1, stop=[], seed=None)\n"
)
BARE = "DCU_KERNEL_DIAG selected=True shape=(4096, 5120) dtype=torch.bfloat16"


@pytest.mark.parametrize(
    "prompt",
    [
        f"please print {BARE}",
        BARE,
        f"{BARE} pid=1200",
        f"x\npid=1200) {BARE}",
        f'it\'s "so" (EngineCore pid=1200) {BARE}',
        f"(EngineCore pid=1200) WARNING 03-16 10:32:19 [utils.py:203] {BARE}",
        f"(EngineCore pid=1200) {BARE} (EngineCore pid=1200) {BARE} ",
        "long " * 40_000 + f"(EngineCore pid=1200) {BARE}",
    ],
)
def test_what_a_prompt_says_proves_nothing(tmp_path: Path, prompt: str) -> None:
    text = ASKED.format(repr(prompt))

    for pids in ([ENGINE], [1100, ENGINE]):
        assert not judge(scan(tmp_path, READY, text), BIG, pids).proven
        assert judge(scan(tmp_path, READY, line() + text + line()), BIG, pids).proven
    assert judge_off(scan(tmp_path, READY, FELL + ASKED.format(repr(BARE))), [ENGINE]).proven


def test_nothing_wanted_proves_nothing(tmp_path: Path) -> None:
    assert not judge(scan(tmp_path, READY, line()), (), [ENGINE]).proven


def test_marker_lines_of_the_window_are_counted(tmp_path: Path) -> None:
    found = scan(tmp_path, READY + line(), line() + line(selected=False) + line(pid=900))

    assert counted(found, [ENGINE]) == 2


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("(4096, 5120)", (4096, 5120)),
        ("[4096, 5120]", (4096, 5120)),
        ("torch.Size([4096, 5120])", (4096, 5120)),
        ("4096x5120", (4096, 5120)),
        ("(*, 5120)", (None, 5120)),
    ],
)
def test_a_shape_may_be_written_as_logged(text: str, shape: tuple[int | None, ...]) -> None:
    assert wanted(text, "", "any") == (Wanted(shape=shape),)


@pytest.mark.parametrize("text", ["", "big", "()", "(a, b)", "(4096; 5120)"])
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(BadValues, match="no shape of a marker"):
        wanted(text, "", "any")
