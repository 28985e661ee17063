"""A result file that looks like a success and is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deploy.agent.texts import digested, parts_at
from deploy.errors import BadValues
from deploy.measure import result
from deploy.measure.stats import percentile

FIXTURES = Path(__file__).parent / "fixtures"


def raw(name: str = "bench_result_ok") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / f"{name}.json").read_text())
    return found


def test_a_real_run_has_no_fault_and_its_own_figures() -> None:
    found = result.of_json(raw())

    assert result.faults(found) == ()
    assert found.detailed
    assert (found.asked, found.completed, found.failed) == (5, 5, 0)
    assert sum(found.output_lens or ()) == 28
    assert found.throughput == pytest.approx(0.85132, abs=1e-5)
    assert percentile([1000 * t for t in found.ttfts or ()], 99) == pytest.approx(8218.59577448)
    # One request has one token, so it has no time between tokens.
    assert len(found.tpots) == 4
    # The client's own also holds the chunk of usage after the last token: 72.059 ms.
    assert percentile([1000 * t for t in found.tpots], 99) == pytest.approx(72.059, rel=2e-3)


def test_the_wait_before_the_first_request_is_not_the_servers() -> None:
    found = result.of_json(raw())

    assert found.active > found.throughput


def test_a_run_whose_requests_all_failed_is_no_fast_run() -> None:
    said = result.faults(result.of_json(raw("bench_result_all_failed")))

    assert said[0] == "0 of 3 requests completed, 3 failed"
    assert "3 requests ended with an error, the first: Service Unavailable" in said


def test_a_stream_that_ended_with_an_error_completes_and_is_found_nevertheless() -> None:
    found = raw("bench_result_silent_error")
    assert (found["completed"], found["failed"], found["errors"]) == (3, 0, ["", "", ""])

    said = result.faults(result.of_json(found))

    assert "requests 1, 2, 3 made no token" in said
    assert "requests 1, 2, 3 have no time to the first token" in said
    assert "requests 1, 2, 3 have no gaps between tokens" in said
    assert "requests 1, 2, 3 have an empty text" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"completed": 1, "failed": 4}, "1 of 5 requests completed, 4 failed"),
        ({"completed": 4, "failed": None}, "4 of 5 requests completed, 1 failed"),
        ({"failed": 1}, "5 of 5 requests completed, 1 failed"),
        ({"completed": None}, "does not say how many requests"),
        ({"ttfts": [1.0, 2.0]}, "ttfts has 2 entries for 5 requests"),
        ({"output_lens": [6, 9, 0, 7, 5]}, "requests 3 made no token"),
        ({"ttfts": [1.0, 0.0, 1.0, 1.0, 1.0]}, "requests 2 have no time"),
        ({"itls": [[0.1], [], [0.1], [0.1], [0.1]]}, "requests 2 have no gaps"),
        ({"errors": ["", "", "Traceback ...", "", ""]}, "1 requests ended with an error"),
        ({"generated_texts": ["a", "", "b", "c", "d"]}, "requests 2 have an empty text"),
        ({"num_prompts": 0, "completed": 0}, "no request was asked for"),
        ({"output_throughput": 0.0}, "its throughput is 0"),
    ],
)
def test_each_sign_of_a_failed_request_is_a_fault_alone(change: dict[str, Any], said: str) -> None:
    found = {key: value for key, value in {**raw(), **change}.items() if value is not None}

    assert any(said in fault for fault in result.faults(result.of_json(found)))


def test_counts_alone_decide_where_there_are_no_lists() -> None:
    """Inputs of public reports: averages of an all-failed run are 0.0 and look like the best."""
    totals = [
        {"num_prompts": 100, "completed": 1, "failed": 99, "duration": 2.0, "mean_ttft_ms": 11.0},
        {"num_prompts": 100, "completed": 100, "failed": 0, "duration": 60.0, "mean_ttft_ms": 40.0},
        {"num_prompts": 100, "completed": 97, "duration": 58.0, "mean_ttft_ms": 39.0},
        {"num_prompts": 100, "completed": 0, "failed": 100, "duration": 0.5, "mean_ttft_ms": 0.0},
    ]

    valid = [not result.faults(result.of_json(found)) for found in totals]

    assert valid == [False, True, False, False]


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{", b'{"completed": 1}\n{"completed": 2}', b'{"duration": NaN}',
     b'{"output_lens": ["3"]}', b'{"ttfts": [true]}', b"[" * 100000],
)  # fmt: skip
def test_what_is_no_result_is_said_in_three_lines(text: bytes) -> None:
    with pytest.raises(BadValues, match="no result of a benchmark"):
        result.parse(text)


def test_texts_are_kept_as_digests_that_tell_where_they_part() -> None:
    one = digested("The keeper hid the brass key")
    other = digested("The keeper hid the iron key")

    assert parts_at(one, other) == 4
    assert parts_at(one, one) is None
    assert parts_at(one, digested("The keeper")) in (1, 2)
    assert parts_at(digested("a"), digested("a ")) == 0
    assert "brass" not in json.dumps(one)
    assert digested("")["chars"] == 0
