"""The share of the sentinel over 20,000 steps on a clock that the test sets, suspicions included, and what it finds."""

from __future__ import annotations

import dataclasses
import types
from unittest import mock

import pytest
import torch
from step_sentinels import Run

from hotloop.measure import Limits, compare, compare_with_reference
from hotloop.step.prove import sentinel
from hotloop.step.prove.budget import Budget
from hotloop.step.prove.outcomes import Outcome
from hotloop.step.tiers import parse

STEPS = 20_000
NAME = "gradient of weight at the optimizer step"
BERT = {"step": 0.0047, "plain": 0.25, "rehearsal": 0.6, "wide": 1.4, "roundings": 3.0}
"""Seconds: a captured step of BERT-base on an H100, and what the parts of a check take, as a CPU's host took for it."""
SMALL = {"step": 0.0028, "plain": 0.06, "rehearsal": 0.1, "wide": 0.2, "roundings": 0.6}
FAULT_AT = 9_000


class World:
    """A run of a step whose checks take what the test says: eager's rounding, and what compiled code makes of it.

    Args:
        costs: seconds of the step, and of the parts of a check.
        rounding: by step, how far eager is from the step in more bits, relative to the gradient.
        fault: by step, the factor by which compiled code is wrong.
        told: whether the run's length is known.
        share: the sentinel's share.
    """

    def __init__(self, costs, *, rounding=lambda step: 0.0, fault=lambda step: 1.0, told=True, share=0.01):
        self.costs, self.rounding, self.fault, self.now = costs, rounding, fault, 0.0
        self.tier = parse("aot_eager+graph")
        self.run = Run("aot_eager", 8, sentinel=0.01)
        self.loop, runner = self.run.loop, self.run.loop._runners[0]
        runner.code.seconds.clear()
        context = dataclasses.replace(runner.step.context, total_steps=STEPS if told else None)
        runner.step.context = context
        graphs = types.SimpleNamespace(seconds=costs["plain"], candidate=print)
        made = sentinel.Sentinel(runner.step, runner.sentinel._runs, graphs, self, runner.code, share)
        self.sentinel, self.code, self.progress = made, runner.code, context.progress
        self.progress.tier = self.tier
        usual = self.loop.account.tiers[self.tier.name]
        usual._known, usual._known_at, usual.samples = costs["step"], 10**9, [costs["step"]]
        draws = torch.Generator().manual_seed(1)
        self.truth, self.noise, self.other = (torch.randn(4096, generator=draws) for _ in range(3))
        self.checked, self.told = [], None
        self.recorded = types.SimpleNamespace(
            recording=self, noise=sentinel.noise.Noise(), updated=(), path=None, keep_gradients=lambda: None
        )

    # -- what a check is made of -----------------------------------------------------------------------------------

    def rehearse(self, run, args, kwargs):
        self.now += self.costs["rehearsal"]
        return False, None

    def in_more_bits(self, runs, call):
        self.now += self.costs["wide"]
        return {NAME: self.truth}

    def prove_step(self, program, candidate, reference, limits, *, spread=None, wide=None, updated=()):
        self.now += self.costs["plain"]
        return Outcome(None, {"gradient": self.compared(limits, wide)}, 0, False)

    def compared(self, limits, wide=None):
        size, step = self.rounding(self.progress.steps), self.progress.steps
        eager = self.truth * (1 + size * self.noise + size)
        if limits.compute_dtype is None:  # a recording beside the code that it recorded
            return compare({NAME: eager}, {NAME: eager}, limits)
        ours = self.truth * (1 + size * self.other - size) * self.fault(step)
        return compare_with_reference(wide or {}, {NAME: eager}, {NAME: ours}, limits)

    def disagrees(self, joined, calls, recorded, tier):
        self.told = self.progress.steps

    # -- the run ---------------------------------------------------------------------------------------------------

    def prove_code(self):
        """Make the code need more bits: it is past the normal limits from the first step on."""
        limits = Limits.compiled("bfloat16")
        outcomes = [Outcome(None, {"gradient": self.compared(limits, {NAME: self.truth})}, 0, False)] * 3
        assert all(one.agrees for one in outcomes)
        self.code.learn("aot_eager", outcomes)
        self.code.seconds["more bits"] = sum(self.costs[part] for part in ("plain", "rehearsal", "wide"))

    def play(self):
        """Play the run to its end, or to where the sentinel tells on the code; return this."""
        self.prove_code()
        with (
            mock.patch.object(sentinel, "time", types.SimpleNamespace(perf_counter=lambda: self.now)),
            mock.patch.object(sentinel.proof, "prove_step", self.prove_step),
            mock.patch.object(sentinel, "in_more_bits", self.in_more_bits),
            mock.patch.object(type(self.sentinel._context), "compute_dtype", return_value="bfloat16"),
            mock.patch.object(self.sentinel, "_disagrees", self.disagrees),
        ):
            for step in range(STEPS):
                self.progress.steps = step
                self.now += self.costs["step"]
                if self.sentinel.due():
                    before = self.now
                    self.checked.append(step)
                    self.sentinel.check(self.recorded, ((), {}), self.tier)
                    assert self.now > before
                if self.told is not None:
                    break
        return self

    @property
    def share(self):
        """The part of the run's time that checks took."""
        return (self.now - STEPS * self.costs["step"]) / self.now


def rounding_that_grows(step):
    """As a loss gets small: 3.5 times at 8,000 steps, where right code is past what it was allowed before."""
    return 0.004 if step < 8_000 else 0.014


WORLDS = pytest.mark.parametrize("costs", [BERT, SMALL], ids=["bert", "small"])
LENGTHS = pytest.mark.parametrize("told", [True, False], ids=["told", "open"])


@LENGTHS
@WORLDS
def test_over_20_000_steps_the_share_is_kept(costs, told):
    world = World(costs, rounding=lambda step: 0.004, told=told).play()
    status = world.sentinel.status
    assert world.told is None
    assert (status.suspicions, status.disagreed) == (0, "")
    assert status.checks >= 2
    assert world.share <= 0.01
    assert world.checked[0] == 99 if told else (world.checked[0] + 1) * 0.01 * costs["step"] >= costs["plain"]


@LENGTHS
@WORLDS
def test_a_suspicion_of_right_code_is_part_of_the_share(costs, told):
    world = World(costs, rounding=rounding_that_grows, told=told).play()
    assert world.told is None
    assert world.share <= 0.012
    if costs is SMALL:
        assert (world.sentinel.status.suspicions, world.sentinel.status.waits) == (1, "")


@pytest.mark.parametrize(
    ("costs", "factor", "told", "within"),
    [
        (BERT, 1.5, True, 8_000),  # far past its limit, so that it is looked into whatever that costs
        (SMALL, 1.5, True, 6_600),
        (SMALL, 1.5, False, 10_000),
    ],
)
def test_a_fault_that_begins_mid_run_is_found(costs, factor, told, within):
    def fault(step):
        return factor if step >= FAULT_AT else 1.0

    world = World(costs, rounding=lambda step: 0.004, fault=fault, told=told).play()
    assert FAULT_AT <= world.told <= FAULT_AT + within


@LENGTHS
@pytest.mark.parametrize(("costs", "looks"), [(BERT, 0), (SMALL, 1)], ids=["bert", "small"])
def test_a_fault_past_its_limit_by_little_is_said_where_the_share_does_not_pay_for_all_that_would_tell(
    costs, looks, told, caplog
):
    def fault(step):
        return 1.05 if step >= 100 else 1.0

    world = World(costs, rounding=lambda step: 0.004, fault=fault, told=told).play()
    assert world.share <= 0.01
    assert (world.told, world.sentinel.status.suspicions) == (None, 1)
    assert len(world.sentinel._evidence) == looks
    assert "once the share of time pays for it" in str(world.sentinel.status)
    assert ("a greater share, sentinel=, tells sooner" in caplog.text) == (looks > 0 or told)


def test_a_greater_share_tells_of_a_fault_past_its_limit_by_little():
    def fault(step):
        return 1.05 if step >= FAULT_AT else 1.0

    world = World(SMALL, rounding=lambda step: 0.004, fault=fault, share=0.1).play()
    assert FAULT_AT <= world.told <= FAULT_AT + 2_000


def test_a_budget_goes_over_from_tier_to_tier():
    budget = Budget(0.01, None)
    budget.take_pace(1.0)
    budget.steps = 1_000
    budget.note("code", 4.0)
    budget.enter(1_000)
    budget.take_pace(0.5)
    budget.steps = 100
    assert budget.lacks("code", 1_100, first=True, repeats=False) == pytest.approx(4.0 + 4.0 - 10.0 - 0.5)


def test_of_two_steps_in_one_loop_each_has_its_own_part_of_the_run():
    budget = Budget(0.01, 10_000)
    budget.take_pace(1.0)
    budget.steps = 250  # of the 1,000 steps of the run
    budget.guess("recording", 25.0)
    assert budget.lacks("recording", 1_000, first=True, repeats=False) == pytest.approx(25.0 - 25.0)
