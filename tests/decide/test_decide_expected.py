"""What is expected before anything is measured, and the horizon."""

from __future__ import annotations

import dataclasses

import pytest
from worlds import WORLDS

from hotloop.decide import Facts, expect, remaining
from hotloop.decide.priors import CPU, CUDA, step_range

TIERS = [(world.name, tier) for world in WORLDS.values() for tier in world.tiers]


def facts(name: str, **measured: float) -> Facts:
    world = WORLDS[name]
    known = {tier.replace("_", "+"): ms / 1e3 for tier, ms in measured.items()}
    return Facts(device="cuda", eager_seconds=world.eager_ms / 1e3, launch_bound=world.launch_bound, measured=known)


# tiny's rows are no whole-step graphs: their optimizer stays outside.
NO_WHOLE_STEP = {("tiny", "full+graph"), ("tiny", "autotune+graph")}


@pytest.mark.parametrize(("name", "tier"), [pair for pair in TIERS if pair not in NO_WHOLE_STEP])
def test_what_was_measured_lies_within_what_is_expected(name, tier):
    truth, expected = WORLDS[name].tiers[tier], step_range(tier, facts(name))
    assert 0.98 * expected.low <= truth.ms / 1e3 <= 1.02 * expected.high


@pytest.mark.parametrize(("name", "tier"), [pair for pair in TIERS if pair[1] != "eager+graph"])
def test_what_preparing_took_lies_within_what_is_expected(name, tier):
    prepare = CUDA[tier].prepare
    assert prepare.low - 0.5 <= WORLDS[name].tiers[tier].prepare <= prepare.high


@pytest.mark.parametrize("prior", [*CUDA.values(), *CPU.values()])
def test_ranges_are_in_order(prior):
    for each in (prior.gain, prior.prepare, prior.swap or prior.prepare):
        assert 0 < each.low <= each.expected <= each.high
    assert 0 < prior.chance <= 1


def test_a_measured_tier_is_the_yardstick_for_its_kin():
    known = step_range("full+graph", facts("xlmr", eager_graph=13.98))
    assert known.expected == pytest.approx(0.01398 / 1.3)
    nearer = step_range("full+graph", facts("xlmr", eager_graph=13.98, regional_graph=11.44))
    assert nearer.expected == pytest.approx(0.01144 * 1.2 / 1.3)
    assert nearer.low <= nearer.expected <= nearer.high
    assert step_range("full", facts("xlmr", eager_graph=13.98)).expected == pytest.approx(0.03606 / 1.2)


def test_a_device_that_is_never_idle_gains_nothing_from_a_capture():
    busy = Facts(device="cuda", eager_seconds=0.05, launch_bound=0.0)
    assert expect("eager+graph", busy).step_seconds == pytest.approx(0.05)
    unknown = Facts(device="cuda", eager_seconds=0.05)
    assert expect("eager+graph", unknown).step_seconds == pytest.approx(0.035)


def test_ways_that_are_not_there():
    on_cpu = Facts(device="cpu", eager_seconds=0.05)
    assert expect("eager+graph", on_cpu) is None
    assert expect("eager+graph", Facts(device="cuda", eager_seconds=0.05), background=True) is None
    assert expect("full", on_cpu, background=True).background_seconds == 35.0
    assert expect("full", on_cpu).background_seconds is None


def test_what_compiled_slowly_once_is_expected_to_do_so_again():
    facts = Facts(device="cuda", eager_seconds=0.1, slower=2.0)
    regional, captured = expect("regional", facts), expect("eager+graph", facts)
    assert (regional.prepare_seconds, regional.prepare_worst_seconds) == (20.0, 77.0)
    assert expect("regional", dataclasses.replace(facts, slower=10.0)).prepare_worst_seconds == 100.0
    assert expect("regional", facts, background=True).background_seconds == 25.0
    assert captured == expect("eager+graph", dataclasses.replace(facts, slower=1.0))
    assert expect("regional", dataclasses.replace(facts, slower=0.1)).prepare_seconds == 10.0  # a cache was warm


def test_steps_that_remain():
    assert str(remaining(100, 9_500)) == "9,400 steps left"
    assert str(remaining(5_000, None)) == "5,000 steps guessed to be left"
    assert remaining(10, None).steps == 990
    assert remaining(10, 5).steps == 0
    assert remaining(-3, 5).steps == 5


def test_runs_that_share_are_apart_from_the_steps_of_this_one():
    found = remaining(20, 200, runs=50.0)
    assert (found.steps, found.later_runs, found.run_steps) == (180, 49.0, 200)
    assert found.shared == ", shared by about 50 runs like this one"
    for alone in (1.0, 0.0, -3.0, float("nan"), float("inf")):
        assert (remaining(20, 200, runs=alone).later_runs, remaining(20, 200, runs=alone).shared) == (0.0, "")
    assert remaining(10, None, runs=3.0).run_steps == 1_000


def test_compiled_code_is_kept_and_a_capture_is_not():
    facts = Facts(device="cuda", eager_seconds=0.05)
    assert expect("eager+graph", facts).again_seconds is None
    assert expect("full", facts).again_seconds == pytest.approx(0.2)
    assert expect("full+graph", facts).again_seconds == pytest.approx(0.5)


def test_a_layout_is_expected_from_the_captured_step_and_compiled_code_from_the_layout():
    conv = Facts(device="cuda", eager_seconds=0.042, launch_bound=0.0)
    laid_out = expect("channels_last+graph", conv)
    assert laid_out.step_seconds == pytest.approx(0.042 / 1.5)
    assert laid_out.by_steps
    assert laid_out.again_seconds is None
    assert expect("channels_last+graph", conv, background=True) is None
    assert expect("channels_last+graph", dataclasses.replace(conv, device="cpu")) is None

    tried = dataclasses.replace(conv, measured={"channels_last+graph": 0.025})
    assert step_range("full+graph", tried).expected == pytest.approx(0.025 / 1.3)


def test_what_a_layout_took_says_nothing_of_a_step_that_is_captured_as_it_is():
    tried = Facts(device="cuda", eager_seconds=0.04, launch_bound=0.0, measured={"channels_last+graph": 0.05})
    assert expect("eager+graph", tried).step_seconds == pytest.approx(0.04)


def test_beside_compiled_code_a_layout_promises_nothing():
    compiled = Facts(device="cuda", eager_seconds=0.04, measured={"full+graph": 0.015})
    assert step_range("channels_last+graph", compiled).expected == pytest.approx(0.015 * 1.3)
