"""Whole runs, played in simulated seconds over what was measured: never slower, near the best, few trials, no flapping."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from simulate import PARTS, SETUPS, STEPS, play
from worlds import WORLDS, Noise, Tier, World, best_fixed, best_proven, fixed

from hotloop.decide import break_even, guard
from hotloop.decide.horizon import FEWEST_GUESSED

LONG = 4_000


def eager_seconds(run) -> float:
    return fixed(run.world, run.noise, "eager", run.setup.total)


def moves(run) -> list[str]:
    return [decision.tier for _, decision in run.decisions if decision.action == "switch"]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.some_of(3)
def test_never_slower(name, setup, seed):
    for total in STEPS:
        run = play(name, total=total, seed=seed, **SETUPS[setup])
        assert run.step == total
        assert run.seconds <= 1.02 * eager_seconds(run) + 1.0, (total, run.decisions)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("name", WORLDS)
def test_where_the_length_is_unknown_the_promise_holds_at_every_step(name, background):
    run = play(name, total=100_000, told=False, background=background)
    # A capture is believed to take 0.9 s at most; xlmr's takes 1.8 s: the promise gives by what it took longer.
    overrun = max(0.0, run.world.tiers["eager+graph"].prepare - 0.9)
    assert run.excess <= overrun


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(("total", "factor"), [(1_000, 1.10), (10_000, 1.03), (100_000, 1.03)])
def test_with_a_background_compile_a_run_is_near_the_best_fixed_way(name, total, factor):
    run = play(name, total=total)
    assert run.seconds <= factor * best_fixed(run.world, run.noise, total)[0] + 0.5


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(("total", "factor"), [(200, 1.10), (1_000, 1.10), (10_000, 1.03), (100_000, 1.03)])
def test_a_run_is_near_what_one_could_do_who_knows_all_and_proves_first(name, total, factor):
    run = play(name, total=total)
    assert run.seconds <= factor * best_proven(run.world, total) + 0.5


def gain(total: int, **setup) -> float:
    runs = [play(name, total=total, **setup) for name in WORLDS]
    return statistics.geometric_mean(eager_seconds(run) / run.seconds for run in runs)


def test_geometric_means():
    assert gain(1_000) >= 1.6
    assert gain(10_000) >= 2.3
    assert gain(1_000, stored=True, background=False) >= 1.6
    assert gain(10_000, stored=True) >= 2.3


# In the foreground and for the first time, a compile that nobody has seen pay is a bet of 10 to 130 s. Where the promise
# has no room for it the run stays as it is, and that is what is missed against the best way in hindsight.
FOREGROUND = {
    (1_000, "gpt"): 1.12,
    (10_000, "inception"): 1.56,
    (10_000, "gpt"): 1.42,
    (10_000, "unet"): 1.16,
}


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(("total", "factor"), [(1_000, 1.10), (10_000, 1.03), (100_000, 1.03)])
def test_in_the_foreground_what_is_out_of_reach_is_known(name, total, factor):
    run = play(name, total=total, background=False)
    best, _ = best_fixed(run.world, run.noise, total)
    assert run.seconds <= max(factor, FOREGROUND.get((total, name), 0.0)) * best + 0.5
    if (total, name) in FOREGROUND:
        assert run.seconds > factor * best + 0.5, "reached after all: take it from the list"


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("total", [1_000, 10_000])
def test_costs_known_from_earlier_runs_open_the_foreground(name, total):
    run = play(name, total=total, background=False, stored=True)
    assert run.seconds <= 1.10 * best_fixed(run.world, run.noise, total)[0] + 0.5


@pytest.mark.parametrize("seed", [None, 4, 5])
@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.some_of(3)
def test_trials_keep_to_their_share(name, setup, seed):
    for total in STEPS:
        run = play(name, total=total, seed=seed, **SETUPS[setup])
        # Where the length is not told, the share is that of the run as it is guessed, of a thousand steps at least.
        guessed = 1.0 if run.setup.told else max(1.0, FEWEST_GUESSED / total)
        share = guard.TRIAL_SHARE * eager_seconds(run) * guessed + guard.SAVED_SHARE * run.saved
        # A preparation that turns out to be in vain was let in by its chance; it is the only one beyond the share.
        last = max(run.wasted, default=0.0)
        assert run.trial_seconds <= share + last + 1e-9, total


@pytest.mark.parametrize("seed", range(6, 12))
@pytest.mark.parametrize("name", WORLDS)
def test_no_flapping_on_a_noisy_machine(name, seed):
    for told in (True, False):
        run = play(name, total=10_000, seed=seed, told=told)
        assert len(moves(run)) == len(set(moves(run))) <= 3
        tried = {}
        for _, decision in run.decisions:
            if decision.action == "try" and decision.tier != "eager":
                left = decision.numbers["steps_left"]
                # Proof and trial take up to 204 steps, so a guess is by that much less when the tier is rejected.
                assert left >= break_even.REGROWN * (tried.get(decision.tier, 0) - 204)
                tried[decision.tier] = left


@pytest.mark.parametrize("name", WORLDS)
def test_an_idle_decision_is_asked_for_seldom(name):
    run = play(name, total=100_000)
    assert run.asked <= 60 + run.seconds / 4  # every five seconds, more often at the start


def gpt_like(**changes) -> World:
    return dataclasses.replace(WORLDS["gpt"], **changes)


def useless(factor: float) -> dict[str, Tier]:
    """Every tier prepares ``factor`` times longer than expected and gains nothing."""
    expected = {"eager+graph": 0.09, "regional+graph": 13.0, "full+graph": 30.0, "full": 30.0}
    return {tier: Tier(seconds * factor, 49.5) for tier, seconds in expected.items()}


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("bound", [0.01, 0.9])
@pytest.mark.parametrize("total", STEPS)
def test_compiles_that_take_ten_times_as_long_and_gain_nothing(background, told, bound, total):
    world = gpt_like(tiers=useless(10), launch_bound=bound)
    run = play(world, total=total, told=told, background=background)
    # What no decision can bound: a compile in the foreground that takes longer than the worst that was believed.
    worst = {"eager+graph": 0.9, "regional+graph": 80.0, "full": 126.0, "full+graph": 132.0}
    tried = [d.tier for _, d in run.decisions if d.action == "try" and d.numbers["source"] == "prior"]
    overrun = 0.0 if background else sum(max(0.0, world.tiers[tier].prepare - worst[tier]) for tier in tried)
    assert run.seconds <= 1.02 * eager_seconds(run) + 1.0 + overrun
    assert moves(run) == []


@pytest.mark.parametrize("total", STEPS)
def test_tiers_that_are_slower_than_eager_are_left(total):
    tiers = {name: Tier(tier.prepare, 1.4 * 49.5) for name, tier in WORLDS["gpt"].tiers.items()}
    for bound in (0.01, 0.9):
        run = play(gpt_like(tiers=tiers, launch_bound=bound), total=total)
        assert run.tier == "eager"
        assert run.seconds <= 1.02 * eager_seconds(run) + 1.0


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("name", WORLDS)
def test_a_tier_that_becomes_slower_than_eager_is_left(name, told):
    slow = {tier: 3.0 * WORLDS[name].eager_ms / made.ms for tier, made in WORLDS[name].tiers.items()}
    world = dataclasses.replace(WORLDS[name], phases=((LONG, slow),))
    run = play(world, total=10_000, told=told)
    assert run.tier == "eager"
    late = [step for step, decision in run.decisions if decision.tier == "eager" and decision.action == "switch"]
    assert len(late) == 1
    # Half of the hundred steps whose median is watched, the time between two questions, and the trial.
    assert late[0] - LONG <= 75 + 5.0 / (world.eager_ms / 1e3)


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("name", WORLDS)
def test_longer_or_shorter_sequences_later_are_no_reason_to_go_back(name, factor):
    world = dataclasses.replace(WORLDS[name], phases=((LONG, {"*": factor, "eager": factor}),))
    run = play(world, total=10_000)
    assert run.tier == play(name, total=10_000).tier
    assert run.seconds <= 1.02 * eager_seconds(run) + 1.0
    assert len(moves(run)) == len(set(moves(run)))


@pytest.mark.parametrize("total", range(1, 12))
def test_tiny_runs_are_eager(total):
    for world in WORLDS.values():
        run = play(world, total=total)
        assert run.decisions == []
        assert run.seconds == pytest.approx(eager_seconds(run))


def test_a_background_compile_is_given_up_when_it_could_no_longer_pay():
    slow = dict(WORLDS["gpt"].tiers)
    slow["full+graph"] = Tier(5_000.0, 33.0)
    slow["regional+graph"] = Tier(5_000.0, 33.0)
    run = play(
        gpt_like(tiers={key: slow[key] for key in ("eager+graph", "regional+graph", "full+graph")}), total=10_000
    )
    prepared = [decision for _, decision in run.decisions if decision.action == "prepare"]
    assert prepared
    assert all(decision.limit_seconds < 500 for decision in prepared)
    assert run.seconds <= 1.02 * eager_seconds(run) + 1.0


def test_noise_is_what_it_says():
    noise = Noise(20_000, 1)
    slow = sum(factor > 1.3 for factor in noise.factors) / 20_000
    assert 0.1 < slow < 0.4
    assert min(noise.factors) >= 0.7
    assert max(noise.factors) <= 2.6


@pytest.mark.parametrize("prepare", [0.5, 1.3, 1.8, 2.4, 3.5, 5.0])
@pytest.mark.parametrize("total", [100, 200, 400, 1_000])
def test_a_slow_capture_that_gains_nothing_costs_a_step_of_it_too_much(prepare, total):
    run = play(gpt_like(tiers={"eager+graph": Tier(prepare, 49.5)}, launch_bound=0.9), total=total, background=False)
    one, proven_and_timed = prepare / len(PARTS), 0.35
    assert run.seconds - 1.02 * eager_seconds(run) - 1.0 <= one + proven_and_timed
