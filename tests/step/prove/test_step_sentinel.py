"""The sentinel: what goes wrong in a run is found within its period, right code never is, and training is not touched."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from unittest import mock

import pytest
import torch
from step_sentinels import Jitter, Run, Stale, checked_every, faulty

import hotloop
from hotloop import events as ev
from hotloop.errors import ConfigError
from hotloop.prove.verify import verify
from hotloop.step.prove import attribution, sentinel
from hotloop.step.prove.rounding_evidence import in_more_bits
from hotloop.step.state import trial_run
from hotloop.step.tiers import ASKED, Tier, parse, tier_of_setting
from hotloop.testing import captured, captured_step_emulation

BF16 = torch.bfloat16
PERIOD = 10
FROM = 25
"""The step from which code is wrong."""


def goes_wrong(fault, factor):
    return lambda step: fault.set(factor) if step == FROM else None


def test_compiled_code_that_goes_wrong_is_found_within_a_period_and_left():
    with faulty() as fault, checked_every(PERIOD):
        run = Run("aot_eager", 60, before=goes_wrong(fault, 1.0001))
    (told,) = run.told()
    assert FROM <= told.step <= FROM + PERIOD + 6
    assert told.tier == "aot_eager"
    assert told.value > told.limit
    assert not told.region
    assert run.loop.status().tier == "eager"
    assert "did not agree with eager" in str(run.loop.status())
    assert "first." in run.watched.disagreed or "all tensors" in run.watched.disagreed
    run.loop.close()
    verdicts = {one["kind"]: one for one in run.loop.record.document["verdicts"]}
    assert verdicts["sentinel_disagreed"]["verdict"] == "disagreed"
    assert verdicts["sentinel_disagreed"]["tensor"] == told.tensor
    assert "sentinel step does not agree" in verdicts["tier_declined"]["reason"]
    assert run.loop.record.document["measurements"]["sentinel_checks"] >= 3


@pytest.mark.campaign
def test_under_bfloat16_a_backward_wrong_by_1_percent_is_found():
    with faulty("aten.mm") as fault, checked_every(PERIOD):
        run = Run("aot_eager", 70, autocast=BF16, size=256, before=goes_wrong(fault, 1.01))
    (told,) = run.told()
    assert FROM <= told.step <= FROM + PERIOD + 6 + 6  # in more bits, and in other roundings
    assert not told.region
    assert run.loop.status().tier == "eager"


@pytest.mark.campaign
def test_nan_counts_at_once():
    with faulty() as fault, checked_every(1):
        run = Run("aot_eager", 40, before=goes_wrong(fault, math.nan))
    (told,) = run.told()
    assert told.measure == "finite"
    assert told.step == FROM
    assert run.watched.suspicions == 0
    assert all(torch.isfinite(one).all() for one in run.losses)  # eager's outcome of that step was the one that stayed


@pytest.mark.campaign
@pytest.mark.parametrize("autocast", [None, BF16], ids=["float32", "bfloat16"])
def test_right_code_is_never_told_on(autocast):
    with checked_every(1):
        run = Run("aot_eager", 150, autocast=autocast)
    assert run.told() == []
    assert run.told(ev.TierDeclined) == []
    assert run.watched.checks > 130
    assert run.loop.status().tier == "aot_eager"


@pytest.mark.parametrize("tier", ["aot_eager", "eager+graph", "aot_eager+graph"])
def test_the_sentinel_trains_as_eager_does(tier):
    """With dropout, BatchNorm and AdamW, to the last bit."""
    eager = Run(None, 40).left()
    with captured_step_emulation(), checked_every(7):
        run = Run(tier, 40)
    assert run.watched.checks >= 3
    assert run.told() == []
    assert all(torch.equal(a, b) for a, b in zip(eager, run.left(), strict=True))


def test_a_recording_that_goes_stale_is_dropped_for_the_step_itself():
    def spoil(step):
        Stale.factor = 1.01 if step >= FROM else 1.0

    try:
        with captured_step_emulation(), mock.patch.object(captured, "Tape", Stale), checked_every(PERIOD):
            run = Run("eager+graph", 60, before=spoil)
    finally:
        Stale.factor = 1.0
    (told,) = run.told()
    assert FROM <= told.step <= FROM + PERIOD + 6
    assert told.region.startswith("the recording")
    assert "parameter" in told.reason
    assert run.loop.status().tier == "eager"


@pytest.mark.parametrize("stale", [False, True])
def test_kernels_that_differ_more_than_they_did_are_no_fault_of_a_recording(stale):
    """Gradients that are rounding and nothing else differ by more and more of themselves as a model learns."""

    def spoil(step):
        Jitter.size = 2e-6 * 20 ** min(1 if stale else 2, step // FROM)  # each suspicion has its own measurements
        Stale.factor = 1.01 if stale and step >= FROM + 20 else 1.0

    try:
        with (
            captured_step_emulation(),
            mock.patch.object(captured, "Tape", Stale),
            mock.patch.object(sentinel.noise, "MOST", 1),
            checked_every(PERIOD),
        ):
            run = Run("eager+graph", 90, before=spoil, noisy=True)
    finally:
        Stale.factor, Jitter.size = 1.0, 0.0
    assert run.watched.suspicions >= (1 if stale else 2)
    if stale:
        (told,) = run.told()
        assert FROM + 20 <= told.step <= FROM + 20 + PERIOD + 30
        assert told.region.startswith("the recording")
    else:
        assert run.told() == []
        assert run.loop.status().tier == "eager+graph"


@pytest.mark.parametrize("stale", [False, True])
def test_a_parameter_whose_gradient_is_all_rounding_is_held_to_what_the_optimizer_can_add(stale):
    """Adam makes a full step of such a gradient, in any direction; twenty steps at once it does not make."""

    def spoil(step):
        Stale.factor = 1.2 if stale and step >= FROM else 1.0

    try:
        with (
            captured_step_emulation(),
            mock.patch.object(captured, "Tape", Stale),
            mock.patch.object(Jitter, "size", 3e-3),
            checked_every(PERIOD),
        ):
            run = Run("eager+graph", 60, before=spoil, dropout=0.0, noisy=True)
    finally:
        Stale.factor = 1.0
    told = run.told()
    assert len(told) == stale
    if stale:
        assert told[0].tensor == "parameter first.weight"
        assert told[0].region.startswith("the recording")
    else:
        assert run.watched.checks >= 3
        assert run.loop.status().tier == "eager+graph"


def test_wrong_code_in_a_recording_is_told_from_a_wrong_recording():
    with captured_step_emulation(), faulty() as fault, checked_every(PERIOD):
        run = Run("aot_eager+graph", 60, before=goes_wrong(fault, 1.001))
    (told,) = run.told()
    assert told.tier == "aot_eager+graph"
    assert not told.region
    declined = run.told(ev.TierDeclined)[-1]
    assert declined.tier == "aot_eager"
    assert "hotloop verify FILE.py:FUNCTION --preset aot_eager names" in declined.hint
    assert run.loop.status().tier == "eager+graph"


def test_the_remedy_names_what_hotloop_verify_takes():
    named = [parse(name) for name in ASKED if parse(name).compiles]
    assert len(named) == 6
    for tier in named:
        preset = attribution._verify(tier).partition("--preset ")[2].partition(" ")[0]
        assert verify._checked(preset, 3, "auto", 1.0)[1]["preset"].name == tier.settings["preset"]
    assert "PRESET)" in attribution._verify(tier_of_setting(hotloop.Preset(name="mine", backend="aot_eager")))


def test_a_wrong_recording_of_right_code_is_left_and_the_code_stays():
    def spoil(step):
        Stale.factor = 1.01 if step >= FROM else 1.0

    try:
        with captured_step_emulation(), mock.patch.object(captured, "Tape", Stale), checked_every(PERIOD):
            run = Run("aot_eager+graph", 60, before=spoil)
    finally:
        Stale.factor = 1.0
    (told,) = run.told()
    assert told.region.startswith("the recording")
    assert "hotloop verify" not in run.told(ev.TierDeclined)[-1].hint  # it compiles code, and records nothing
    assert run.loop.status().tier == "aot_eager"


@pytest.mark.campaign
def test_one_odd_step_is_looked_into_and_forgiven():
    seen = []

    def once(step):
        factor = 1.001 if step == PERIOD + 5 else 1.0
        fault.set(factor)
        seen.append(factor)

    with faulty() as fault, checked_every(1):
        run = Run("aot_eager", 40, before=once)
    assert 1.001 in seen
    assert run.watched.suspicions == 1
    assert run.told() == []
    assert run.loop.status().tier == "aot_eager"


@pytest.mark.campaign
def test_limits_that_were_wrong_once_are_learnt_and_a_fault_beyond_them_is_found():
    """Code within eager's own rounding, which is past the normal limits: looked into once, by two steps."""
    wide = []

    def coarse(runs, call):
        """Be as far from eager as if eager's rounding were half a percent."""
        wide.append(runs.context.progress.steps)
        return {name: None if value is None else value * 1.005 for name, value in in_more_bits(runs, call).items()}

    factors = {FROM: 1.001, FROM + 30: 1.1}
    with (
        faulty() as fault,
        checked_every(1),
        mock.patch.object(sentinel, "in_more_bits", coarse),
    ):
        run = Run("aot_eager", 80, before=lambda step: fault.set(factors[step]) if step in factors else None)
    assert run.watched.suspicions == 2
    (told,) = run.told()
    assert FROM + 30 <= told.step <= FROM + 30 + 10  # three in more bits, three more, three by roundings
    assert wide[:3] == [
        FROM + 1,
        FROM + 2,
        FROM + 31,
    ]  # two steps cleared it, and no check before the fault needed more


def test_code_that_fails_in_a_checked_step_is_undone_like_any_other():
    with faulty() as fault, checked_every(PERIOD):

        def breaks(step):
            fault.fails = RuntimeError("illegal kernel") if step == FROM else None

        # The step that fails is a checked one.
        with mock.patch.object(sentinel.Sentinel, "due", lambda self: self._context.progress.steps == FROM):
            run = Run("aot_eager", 40, before=breaks)
    eager = Run(None, 40).left()
    assert all(torch.equal(a, b) for a, b in zip(eager, run.left(), strict=True))
    (undone,) = run.told(ev.StepUndone)
    assert undone.step == FROM
    assert "illegal kernel" in undone.reason
    assert run.loop.status().tier == "eager"


def test_where_no_copy_of_the_state_fits_the_sentinel_ends_and_the_tier_stays():
    before = trial_run.Snapshot

    def full(program):
        if program.step.__name__ == "train_step" and full.on:
            raise torch.OutOfMemoryError("no memory for a copy")
        return before(program)

    full.on = False
    with checked_every(PERIOD), mock.patch.object(trial_run, "Snapshot", full):
        run = Run("aot_eager", 40, before=lambda step: setattr(full, "on", step > FROM))
    assert run.loop.status().tier == "aot_eager"
    assert "memory" in run.loop._runners[0].sentinel.status.off
    assert run.told(ev.TierDeclined) == []
    assert all(torch.equal(a, b) for a, b in zip(Run(None, 40).left(), run.left(), strict=True))


@pytest.mark.parametrize("off", [0, None, 0.0])
def test_without_a_sentinel_there_is_none(off):
    run = Run("aot_eager", 12, sentinel=off)
    assert run.loop._runners[0].sentinel is None
    assert run.loop.status().sentinels == ()


def test_eager_steps_are_not_checked():
    with checked_every(1):
        run = Run("auto", 12, sentinel=0.5)
    assert run.loop.status().sentinels == ()


@pytest.mark.parametrize("share", [-0.1, 1.5, "1%", True, math.nan])
def test_a_share_that_is_none_is_refused(share):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="sentinel"):
        hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), sentinel=share)


def test_the_period_follows_from_what_a_check_costs():
    run = Run("aot_eager", 8, sentinel=0.01)
    watched, tier = run.loop._runners[0].sentinel, Tier("aot_eager")
    usual = run.loop.account.tiers["aot_eager"]
    usual.samples.clear()
    usual.samples.append(0.010)
    usual._known = 0.010
    usual._known_at = 10**9
    watched._budget.steps, watched._budget.spent = 100, 0.0
    watched._plan(0.060, tier, "code")  # 50 ms more than a step
    assert watched.status.every == 500
    assert 450 <= watched._left <= 1350  # around 900: this check and the next one are 1% of 1,000 steps
    watched._budget.steps = 1000
    watched._plan(0.060, tier, "code")
    assert 250 <= watched._left <= 750
    watched._plan(0.0101, tier, "code")
    assert watched.status.every == sentinel.LEAST


def test_checks_come_at_every_phase_of_a_period_that_divides_theirs():
    """With a distance of 500 steps each, what a step does at every 100th would be seen always or never."""
    run = Run("aot_eager", 8, sentinel=0.01)
    watched = run.loop._runners[0].sentinel
    usual = run.loop.account.tiers["aot_eager"]
    usual.samples.clear()
    usual.samples.append(0.010)
    usual._known, usual._known_at = 0.010, 10**9
    before = torch.get_rng_state(), random.getstate()

    def checked():
        run.loop.steps, watched._budget.steps, watched._budget.spent = 0, 0, 0.0
        steps = []
        for _ in range(400):
            watched._plan(0.060, Tier("aot_eager"), "code")
            run.loop.steps += watched._left
            watched._budget.steps += watched._left
            steps.append(run.loop.steps)
        return steps

    steps = checked()
    assert steps == checked()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    phases = collections.Counter(step % 100 // 10 for step in steps)
    assert min(phases[one] for one in range(10)) >= 20  # of 40 in the mean
    assert abs(steps[-1] / 400 - 500) <= 10  # what checks cost is as if they came at even distances
    assert watched.status.every == 500


def test_two_steps_have_a_sentinel_each():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with checked_every(5):
        loop = hotloop.Loop(model, optimizer, run="aot_eager")

        def made(name, sign):
            def step(x):
                loss = sign * model(x).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            step.__name__ = name
            return loop.step(step)

        first, second = made("first", 1.0), made("second", 0.5)
        for number in range(60):
            (first if number % 3 else second)(torch.randn(4, 4))
    found = {one.function: one for one in loop.status().sentinels}
    assert found["first"].checks >= 4
    assert found["second"].checks >= 1
    assert all(dataclasses.asdict(one)["disagreed"] == "" for one in found.values())
