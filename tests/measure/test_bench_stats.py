"""What numbers prove, on data whose truth is known."""

from __future__ import annotations

import random

import pytest

from deploy.measure.stats import (
    Verdict,
    bootstrap,
    claim,
    median_change,
    needed,
    p99_name,
    percentile,
    turns,
)


@pytest.mark.parametrize(
    ("base", "candidate", "verdict"),
    [
        ([100.0, 100.75, 99.25, 100.0], [100.8, 100.9, 100.7, 100.8], Verdict.NOISE),
        ([100.0, 102.5, 97.5, 100.0], [104.0, 104.5, 103.6, 103.9], Verdict.NOT_SHOWN),
        ([100.0, 100.3, 99.8, 99.9], [106.0, 106.3, 105.8, 105.9], Verdict.GAIN),
    ],
)
def test_a_gain_must_be_more_than_runs_of_one_side_differ(
    base: list[float], candidate: list[float], verdict: Verdict
) -> None:
    found = claim(base, candidate)

    assert found.verdict is verdict
    assert found.pairs == 4
    assert found.spread == pytest.approx((max(base) - min(base)) / 100, abs=2e-4)


@pytest.mark.parametrize(("change", "verdict"), [
    (1.30, Verdict.NOT_SHOWN), (1.004, Verdict.NOISE), (0.996, Verdict.NOISE),
    (0.97, Verdict.POSSIBLE_LOSS),
])  # fmt: skip
def test_one_pair_of_runs_shows_no_gain_and_rules_out_no_loss(
    change: float, verdict: Verdict
) -> None:
    found = claim([10.0], [10.0 * change])

    assert found.verdict is verdict
    assert found.verdict.regression == (change < 0.99)


def test_a_small_gain_is_one_when_repeats_agree() -> None:
    found = claim([100.0, 100.01, 99.99], [100.5, 100.51, 100.49])

    assert found.verdict is Verdict.GAIN
    assert found.point < 0.01


def test_runs_that_did_not_take_turns_show_nothing() -> None:
    """Four runs of A, then four of B, on a machine that warms up: 6 % of nothing."""
    assert claim([100.0, 100.3, 99.8], [106.0, 106.3, 105.8], interleaved=False).verdict is (
        Verdict.NOT_SHOWN
    )
    assert claim([100.0, 100.3, 99.8], [90.0, 90.3, 89.8], interleaved=False).verdict.regression


def test_turns_are_told_by_the_starts() -> None:
    assert turns([("1", "a"), ("2", "b"), ("3", "b"), ("4", "a")])
    assert turns([("4", "b"), ("1", "a"), ("3", "a"), ("2", "b")])
    assert not turns([("1", "a"), ("2", "a"), ("3", "b"), ("4", "b")])
    assert not turns([("1", "a"), ("2", "b"), ("3", "b")])


@pytest.mark.parametrize("pairs", [3, 4, 6, 10])
@pytest.mark.parametrize("noise", [0.002, 0.02])
def test_without_a_difference_a_gain_is_claimed_in_at_most_one_of_twenty(
    pairs: int, noise: float
) -> None:
    generator = random.Random(pairs)
    trials = 2000
    gains = losses = 0
    for _ in range(trials):
        runs = [generator.gauss(100.0, 100.0 * noise) for _ in range(2 * pairs)]
        verdict = claim(runs[0::2], runs[1::2]).verdict
        gains += verdict is Verdict.GAIN
        losses += verdict is Verdict.LOSS

    assert gains / trials <= 0.05
    assert losses / trials <= 0.05


def test_a_difference_that_is_there_is_found() -> None:
    generator = random.Random(1)
    trials, found = 500, 0
    for _ in range(trials):
        base = [generator.gauss(100.0, 0.3) for _ in range(5)]
        candidate = [generator.gauss(104.0, 0.3) for _ in range(5)]
        found += claim(base, candidate).verdict is Verdict.GAIN

    assert found / trials > 0.95


def test_the_interval_holds_the_truth_nineteen_times_of_twenty() -> None:
    generator = random.Random(2)
    trials, held = 1500, 0
    for _ in range(trials):
        base = [100.0 * generator.lognormvariate(0, 0.01) for _ in range(4)]
        candidate = [103.0 * generator.lognormvariate(0, 0.01) for _ in range(4)]
        change = claim(base, candidate).change
        assert change is not None
        held += change.low <= 0.03 <= change.high

    assert held / trials == pytest.approx(0.95, abs=0.02)


def test_five_requests_are_too_few_for_a_small_change() -> None:
    base = [4.3, 6.0, 7.7, 4.1, 8.2]
    faster = [4.2, 6.1, 7.4, 4.15, 8.0]

    assert (needed(base, faster) or 0) > 5
    assert needed(base, [t * 0.7 * (1 + 0.001 * i) for i, t in enumerate(base)]) == 2
    assert needed(base, base) is None


def test_the_bootstrap_is_the_same_on_every_machine() -> None:
    pairs = [(1.0, 1.1), (2.0, 2.1), (3.0, 3.3), (4.0, 4.1), (5.0, 5.6)]

    found = bootstrap(pairs, median_change)

    assert found == bootstrap(pairs, median_change)
    assert found.low <= found.value <= found.high
    assert found.value == pytest.approx(0.1)


def test_a_percentile_is_the_clients() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([5.0], 99) == 5.0
    assert percentile([0.0, 100.0], 99) == pytest.approx(99.0)
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_p99_of_five_is_called_what_it_is() -> None:
    assert p99_name(5) == "slowest of 5 (p99)"
    assert p99_name(100) == "p99"


def test_sides_that_cannot_be_paired_are_refused() -> None:
    for base, candidate in (([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])):
        with pytest.raises(ValueError, match="same number"):
            claim(base, candidate)
