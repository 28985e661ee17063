"""The official score, by examples that were worked out by hand."""

from __future__ import annotations

import pytest

from deploy.errors import BadValues
from deploy.measure.score import FULL, Side, coefficient, drop, score

BASE = (12.00, 9.00, 5.50)
CANDIDATE = (15.00, 11.70, 7.15)


def sides(rates: tuple[float, ...], **more: tuple[float, ...]) -> dict[str, Side]:
    return {
        name: Side(throughput=rate, **more)  # type: ignore[arg-type]
        for name, rate in zip(FULL, rates)
    }


def test_the_worked_example_comes_out_exactly() -> None:
    found = score(sides(BASE), sides(CANDIDATE))

    assert [round(row.gain, 4) for row in found.rows] == [0.25, 0.30, 0.30]
    assert [round(row.points, 4) for row in found.rows] == [14.2198, 36.4589, 21.8753]
    assert round(found.total, 4) == 72.5540
    factors = [coefficient(100.0, 100.0 - lost) for lost in (0.4, 1.6, 2.5, 0.0)]
    assert factors == [1.00, 0.97, 0.94, 1.00]
    assert round(found.final(sum(factors) / 4), 4) == 70.9215


def test_a_slow_first_token_takes_that_buckets_points() -> None:
    base, candidate = sides(BASE, ttfts=(100.0,)), sides(CANDIDATE, ttfts=(150.0,))
    candidate["16-32K"] = Side(throughput=7.15, ttfts=(151.0,))

    found = score(base, candidate)

    # The example adds rounded points; the sum itself is 50.67864.
    assert round(sum(round(row.points, 4) for row in found.rows), 4) == 50.6787
    assert found.total == pytest.approx(50.67864, abs=1e-5)
    assert round(found.final(0.9775), 4) == 49.5384
    assert found.rows[2].zeroed == "TTFT p99 is 1.51 times the baseline's, allowed is 1.5"
    assert [row.zeroed for row in found.rows[:2]] == ["", ""]


def test_the_baseline_itself_scores_sixty() -> None:
    assert score(sides(BASE), sides(BASE)).total == pytest.approx(60.0)


def test_a_published_vector_comes_out() -> None:
    found = score(sides((12.2076, 8.8108, 5.3902)), sides((12.7816, 10.5395, 7.3887)))

    assert [round(row.gain, 4) for row in found.rows] == [0.0470, 0.1962, 0.3708]
    assert [round(row.points, 4) for row in found.rows] == [12.4744, 34.5026, 22.5894]
    assert round(found.total, 4) == 69.5664


def test_slow_tokens_over_all_requests_take_every_point() -> None:
    """Each bucket alone is within the limit or has no p99 of its own; the pool decides."""
    base = sides(BASE, tpots=(70.0,) * 10)
    candidate = sides(CANDIDATE, tpots=(70.0,) * 10)
    candidate["8-16K"] = Side(throughput=11.70, tpots=(70.0,) * 9 + (200.0,))

    found = score(base, candidate)

    assert found.total == 0.0
    assert all("TPOT p99 of all buckets" in row.zeroed for row in found.rows)


def test_fewer_completed_requests_take_that_buckets_points() -> None:
    base = {"8-16K": Side(throughput=9.0, asked=200, completed=200)}

    at_limit = score(base, {"8-16K": Side(throughput=9.0, asked=200, completed=198)})
    below = score(base, {"8-16K": Side(throughput=9.0, asked=200, completed=197)})

    assert at_limit.total == pytest.approx(30.0)
    assert below.total == 0.0
    assert at_limit.missing == ("4-8K", "16-32K")


@pytest.mark.parametrize(
    ("lost", "factor"),
    [(-3, 1), (0, 1), (1, 1), (1.01, 0.97), (2, 0.97), (3, 0.94), (3.1, 0.90), (5, 0.90),
     (10, 0.85), (10.1, 0), (100, 0)],
)  # fmt: skip
@pytest.mark.parametrize("base", [100.0, 77.96, 32.96, 0.3])
def test_the_steps_of_accuracy_include_their_limits(
    base: float, lost: float, factor: float
) -> None:
    assert coefficient(base, base - base * lost / 100) == factor


def test_a_baseline_of_nothing_is_no_baseline() -> None:
    with pytest.raises(BadValues):
        score(sides((0.0, 1.0, 1.0)), sides(CANDIDATE))
    with pytest.raises(BadValues):
        drop(0.0, 50.0)
