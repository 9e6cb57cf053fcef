"""Trials of two tiers by turns, and what is kept of them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.decide import Speeds, Trial, median_interval


def run(here, there, noise=lambda: 1.0, *, tiers=("eager", "full"), **more) -> Trial:
    trial = Trial(*tiers, **more)
    for _ in range(10_000):
        if trial.verdict().outcome != "undecided":
            break
        turn = trial.turn()
        trial.add(turn, (there if turn.tier == tiers[1] else here) * noise())
    return trial


def test_the_order_turns_so_that_a_trend_cancels():
    trial, order = Trial("a", "b"), []
    for _ in range(8):
        turn = trial.turn()
        order.append(turn.tier)
        trial.add(turn, 1.0)
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]


@pytest.mark.parametrize(
    ("there", "outcome", "pairs"),
    [(0.5, "faster", 3), (2.0, "no faster", 3), (0.9, "faster", 7), (1.0, "no faster", 7), (0.99, "no faster", 7)],
)
def test_without_noise_a_few_pairs_tell(there, outcome, pairs):
    verdict = run(1.0, there).verdict()
    assert (verdict.outcome, verdict.pairs) == (outcome, pairs)
    assert verdict.ratio == pytest.approx(there)


def spells(rng: random.Random):
    """±30 % a step, and spells in which the machine is half as fast."""
    slow = 1.0

    def noise() -> float:
        nonlocal slow
        if rng.random() < 1 / 30:
            slow = 3.0 - slow
        return slow * rng.uniform(0.7, 1.3)

    return noise


def share_faster(there: float) -> float:
    trials = [run(1.0, there, spells(random.Random(seed))) for seed in range(300)]
    return sum(trial.verdict().outcome == "faster" for trial in trials) / len(trials)


@pytest.mark.campaign
def test_on_a_noisy_machine_errors_are_few():
    assert share_faster(1.2) <= 0.01
    assert share_faster(1.05) <= 0.05
    assert share_faster(1.0) <= 0.15
    assert share_faster(0.8) >= 0.97
    assert share_faster(0.5) == 1.0


def test_a_trial_ends_even_where_no_time_is_one():
    trial = run(math.nan, math.nan, most_pairs=10)
    assert trial.verdict().outcome == "no faster"
    assert trial.verdict().pairs == 0
    assert trial.seconds("full") is None


def test_a_pair_with_a_time_that_is_none_does_not_count():
    trial = Trial("a", "b")
    for seconds in (1.0, -1.0, 2.0, 1.0):
        trial.add(trial.turn(), seconds)
    assert trial.verdict().pairs == 1
    assert trial.seconds("a") == 1.0
    assert trial.seconds("b") == 2.0


def test_what_a_comparison_costs_is_what_the_candidate_takes_longer():
    assert run(1.0, 0.5).extra_seconds == 0.0
    assert run(1.0, 3.0).extra_seconds == pytest.approx(6.0)


@given(st.lists(st.floats(1e-9, 1e9), max_size=60))
def test_the_interval_holds_the_median(values):
    low, high = median_interval(values)
    ordered = sorted(values)
    assert low <= (ordered[len(ordered) // 2] if ordered else 1.0) <= high


def test_the_interval_covers_as_often_as_it_says():
    rng, missed = random.Random(1), 0
    for _ in range(4_000):
        low, high = median_interval([rng.lognormvariate(0.0, 1.0) for _ in range(20)], coverage=0.9)
        missed += not low <= 1.0 <= high
    assert 0.02 < missed / 4_000 <= 0.1
    assert median_interval([1.0] * 6) == (0.0, math.inf)
    assert median_interval([float(value) for value in range(7)]) == (0.0, 6.0)


def known() -> Speeds:
    """Eager takes 0.1 s, full half of it."""
    speeds = Speeds()
    speeds.see("eager", 0.1)
    speeds.record(run(0.1, 0.05), 100)
    return speeds


def test_speeds_chain_over_trials_whatever_the_machine_does():
    speeds = Speeds()
    assert speeds.seconds("eager") is None
    speeds.see("eager", 0.1)
    speeds.record(run(0.2, 0.1), 100)  # the machine is half as fast now
    assert speeds.ratio("full") == pytest.approx(0.5)
    assert speeds.seconds("eager") == pytest.approx(0.2)
    assert speeds.base_low_seconds == pytest.approx(0.1)
    speeds.record(run(1.0, 0.6, tiers=("full", "other")), 100)
    assert speeds.measured() == pytest.approx({"eager": 0.2, "full": 0.1, "other": 0.06})
    assert speeds.high_seconds("other") == pytest.approx(0.06)
    assert speeds.saved("other", 3.0) == pytest.approx(7.0)
    assert speeds.saved("never tried", 3.0) == 0.0


def test_savings_are_counted_at_the_slow_end():
    speeds, noise = Speeds(), spells(random.Random(3))
    speeds.see("eager", 0.1)
    speeds.record(run(0.1, 0.07, noise), 100)
    assert speeds.high_seconds("full") > speeds.seconds("full")
    assert 0.0 < speeds.saved("full", 7.0) < 7.0 / speeds.ratio("full") - 7.0


def test_outside_the_base_tier_only_a_faster_step_is_believed():
    speeds = known()
    speeds.see("full", 0.08)
    assert speeds.seconds("eager") == pytest.approx(0.1)
    speeds.see("full", 0.04)
    assert speeds.seconds("eager") == pytest.approx(0.08)
    speeds.see("full", math.nan)
    speeds.see("unknown", 1e-6)
    assert speeds.seconds("eager") == pytest.approx(0.08)


def test_a_trial_against_the_base_tier_tells_of_the_tier_in_force():
    speeds = known()
    speeds.record(run(0.2, 0.1, tiers=("full", "eager")), 100)
    assert speeds.ratio("full") == pytest.approx(2.0)
    assert speeds.rejected_at("full") is None
    speeds.switch("full", "eager", 90)
    assert speeds.rejected_at("full") == 90


def test_a_tier_that_was_beaten_is_rejected_and_forgiven_when_the_winner_is_gone():
    speeds = Speeds()
    speeds.see("eager", 0.1)
    speeds.record(run(0.1, 0.1), 70)
    assert speeds.rejected_at("full") == 70
    speeds.switch("eager", "eager+graph", 60)
    assert speeds.rejected_at("eager") is None
    speeds.switch("eager+graph", "eager", 50)
    assert speeds.rejected_at("full") is None
    assert speeds.rejected_at("eager+graph") == 50


def test_a_trial_that_was_broken_off_says_nothing():
    speeds = Speeds()
    trial = Trial("eager", "full")
    for _ in range(4):
        trial.add(trial.turn(), 1.0)
    speeds.record(trial, 100)
    assert speeds.ratio("full") is None
    assert speeds.rejected_at("full") is None
