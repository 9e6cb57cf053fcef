"""Checks of a proven tier: what goes wrong in a run is found, right code never is, and training is not touched."""

from __future__ import annotations

import dataclasses
import math
from unittest import mock

import pytest
import torch
from step_sentinels import Jitter, Run, Stale, checked_every, faulty

import hotloop
from hotloop import events as ev
from hotloop.errors import ConfigError
from hotloop.prove.verify import verify
from hotloop.step.prove import check, schedule
from hotloop.step.prove.outcomes import Outcome
from hotloop.step.state import trial_run
from hotloop.step.tiers import ASKED, parse, tier_of_setting
from hotloop.testing import captured, captured_step_emulation

BF16 = torch.bfloat16
PERIOD = 10
FROM = 25
"""The step from which code is wrong."""


def goes_wrong(fault, factor, start=FROM):
    return lambda step: fault.set(factor) if step == start else None


def equal_to_eager(run, steps):
    return all(torch.equal(a, b) for a, b in zip(Run(None, steps).left(), run.left(), strict=True))


def test_compiled_code_that_goes_wrong_is_found_and_left():
    with faulty() as fault, checked_every(PERIOD):
        run = Run("aot_eager", 60, before=goes_wrong(fault, 1.001))
    (told,) = run.told()
    assert FROM <= told.step <= FROM + PERIOD
    assert told.tier == "aot_eager"
    assert told.value > told.limit
    (declined,) = run.told(ev.TierDeclined)
    assert told.step < declined.step <= told.step + 6
    assert "does not agree with eager" in declined.reason
    assert run.loop.status().tier == "eager"
    assert "did not agree with eager" in str(run.loop.status())
    run.loop.close()
    verdicts = {one["kind"]: one for one in run.loop.record.document["verdicts"]}
    assert verdicts["sentinel_disagreed"]["verdict"] == "disagreed"
    assert verdicts["sentinel_disagreed"]["tensor"] == told.tensor
    assert run.loop.record.document["measurements"]["sentinel_checks"] >= 2


def test_code_that_is_wrong_from_its_50th_call_on_is_found_within_100_steps_by_default():
    with faulty() as fault:
        run = Run("aot_eager", 100, before=goes_wrong(fault, 1.01, 50))
    assert run.loop.status().tier == "eager"
    assert run.told()


def test_code_that_is_wrong_at_every_20th_call_is_found_within_500_steps_by_default():
    # However slow the machine is: early checks may cost a second in all.
    with faulty() as fault, mock.patch.object(schedule, "_GRACE", math.inf):
        run = Run("aot_eager", 500, before=lambda step: fault.set(1.01 if step % 20 == 0 else 1.0))
    assert [one.step % 20 for one in run.told()] == [0, 0]
    assert "a step that was also run eagerly does not agree" in run.told(ev.TierDeclined)[0].reason
    assert run.loop.status().tier == "eager"


@pytest.mark.campaign
def test_under_bfloat16_a_backward_wrong_by_1_percent_is_found():
    with faulty("aten.mm") as fault, checked_every(PERIOD):
        run = Run("aot_eager", 70, autocast=BF16, size=256, before=goes_wrong(fault, 1.01))
    (declined,) = run.told(ev.TierDeclined)
    assert FROM <= declined.step <= FROM + 2 * PERIOD
    assert run.loop.status().tier == "eager"


@pytest.mark.campaign
def test_nan_is_found_and_never_stays():
    with faulty() as fault, checked_every(1):
        run = Run("aot_eager", 40, before=goes_wrong(fault, math.nan))
    (told,) = run.told()
    assert told.measure == "finite"
    assert told.step == FROM
    assert run.loop.status().tier == "eager"
    assert all(torch.isfinite(one).all() for one in run.losses)  # eager's outcome of that step was the one that stayed


@pytest.mark.campaign
@pytest.mark.parametrize("autocast", [None, BF16], ids=["float32", "bfloat16"])
def test_right_code_is_never_told_on(autocast):
    with checked_every(1):
        run = Run("aot_eager", 150, autocast=autocast)
    assert run.told() == []
    assert run.told(ev.TierDeclined) == []
    assert run.watched.checks > 100
    assert run.loop.status().tier == "aot_eager"


@pytest.mark.parametrize("tier", ["aot_eager", "eager+graph", "aot_eager+graph"])
def test_checks_train_as_eager_does(tier):
    """With dropout, BatchNorm and AdamW, to the last bit."""
    with captured_step_emulation(), checked_every(7):
        run = Run(tier, 40)
    assert run.watched.checks >= 3
    assert run.told() == []
    assert equal_to_eager(run, 40)


@pytest.fixture
def stale(monkeypatch):
    """A recording that goes wrong by a factor from one step on."""
    monkeypatch.setattr(captured, "Tape", Stale)
    monkeypatch.setattr(Stale, "factor", 1.0)
    return lambda step: setattr(Stale, "factor", 1.2 if step >= FROM else 1.0)


@pytest.mark.parametrize(("tier", "left"), [("eager+graph", "eager"), ("aot_eager+graph", "aot_eager")])
@pytest.mark.parametrize("noise", [0.0, 3e-3])
def test_a_recording_that_goes_wrong_is_left(stale, monkeypatch, tier, left, noise):
    """Also beside noise of a gradient that is all rounding, of which Adam makes a full step in any direction."""
    monkeypatch.setattr(Jitter, "size", noise)
    with captured_step_emulation(), checked_every(PERIOD):
        run = Run(tier, 60, before=stale, noisy=bool(noise), dropout=0.0)
    (told,) = run.told()
    assert FROM <= told.step <= FROM + PERIOD
    assert "first.weight" in told.reason
    assert run.loop.status().tier == left


def test_kernels_that_differ_more_than_they_did_are_no_fault_of_a_recording(monkeypatch):
    """Gradients that are rounding and nothing else differ by more and more of themselves as a model learns."""
    monkeypatch.setattr(Jitter, "size", 0.0)
    with captured_step_emulation(), checked_every(PERIOD):
        run = Run(
            "eager+graph",
            90,
            before=lambda step: setattr(Jitter, "size", 2e-6 * 20 ** min(2, step // FROM)),
            noisy=True,
        )
    assert run.told(ev.TierDeclined) == []
    assert run.loop.status().tier == "eager+graph"


def test_wrong_code_in_a_recording_is_left_with_its_recording():
    with captured_step_emulation(), faulty() as fault, checked_every(PERIOD):
        run = Run("aot_eager+graph", 60, before=goes_wrong(fault, 1.001))
    (told,) = run.told()
    assert told.tier == "aot_eager+graph"
    assert run.told(ev.TierDeclined)[-1].tier == "aot_eager"
    assert run.loop.status().tier == "eager+graph"


def test_one_odd_step_is_proven_again_and_forgiven():
    with faulty() as fault, checked_every(PERIOD):
        run = Run("aot_eager", 60, before=lambda step: fault.set(1.001 if step == 3 + 2 * PERIOD else 1.0))
    (told,) = run.told()
    assert told.step == 3 + 2 * PERIOD
    assert run.told(ev.TierDeclined) == []
    assert run.loop.status().tier == "aot_eager"


def test_what_is_far_off_twice_is_left_and_the_remedy_names_what_hotloop_verify_takes():
    """The order is given in words that `verify` knows."""
    named = [parse(name) for name in ASKED if parse(name).compiles]
    assert len(named) == 6
    for tier in named:
        preset = check._verify(tier).partition("--preset ")[2].partition(" ")[0]
        assert verify._checked(preset, 3, "auto", 1.0)[1]["preset"].name == tier.settings["preset"]
    assert "PRESET)" in check._verify(tier_of_setting(hotloop.Preset(name="mine", backend="aot_eager")))


def test_code_that_fails_in_a_checked_step_is_undone_like_any_other():
    def breaks(step):
        fault.fails = RuntimeError("illegal kernel") if step == FROM else None

    with (
        faulty() as fault,
        mock.patch.object(check.Check, "due", lambda self, **_: self._context.progress.steps == FROM),
    ):
        run = Run("aot_eager", 40, before=breaks)
    (undone,) = run.told(ev.StepUndone)
    assert undone.step == FROM
    assert "illegal kernel" in undone.reason
    assert run.loop.status().tier == "eager"
    assert equal_to_eager(run, 40)


def test_where_no_copy_of_the_state_fits_the_checks_end_and_the_tier_stays():
    before = trial_run.Snapshot

    def full(program):
        if program.step.__name__ == "train_step" and full.on:
            raise torch.OutOfMemoryError("no memory for a copy")
        return before(program)

    full.on = False
    with checked_every(PERIOD), mock.patch.object(trial_run, "Snapshot", full):
        run = Run("aot_eager", 40, before=lambda step: setattr(full, "on", step > FROM))
    assert run.loop.status().tier == "aot_eager"
    assert "memory" in run.watched.off
    assert run.told(ev.TierDeclined) == []
    assert equal_to_eager(run, 40)


@pytest.mark.parametrize(("tier", "share"), [("aot_eager", 0), ("aot_eager", None), ("auto", 0.5)])
def test_without_a_share_and_in_eager_nothing_is_checked(tier, share):
    assert Run(tier, 20, sentinel=share).loop.status().sentinels == ()


@pytest.mark.parametrize("share", [-0.1, 1.5, "1%", True, math.nan])
def test_a_share_that_is_none_is_refused(share):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="sentinel"):
        hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), sentinel=share)


def test_two_steps_have_checks_of_their_own():
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


def test_a_moved_random_stream_is_far_off():
    assert Outcome(None, {}, 0, on_host=False, random_moved=("torch's CPU generator",)).far_off
    assert not Outcome(None, {}, 0, on_host=False).far_off
