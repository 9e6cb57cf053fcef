"""The proof where eager's own kernels differ from run to run: what does not stay is noise, what stays is declined."""

import dataclasses

import pytest
import torch
from step_sentinels import Jitter, Run, faulty, jittered
from test_step_proof import WrongTape, cpu, declined_with, training

import hotloop
from hotloop import events as ev
from hotloop._torch.dispatch import name_of
from hotloop.measure import Limits, differences
from hotloop.step import code_proofs, proof, variant
from hotloop.step.outcomes import compare_kinds, rough
from hotloop.testing import captured as stand_in

__all__ = ["cpu"]

SPREAD = 1e-5
"""How far eager is said to be from itself, of each tensor; a recording may be 8 times as far."""


class Flips(WrongTape):
    """Makes a gradient too long by a part of itself, at some of its replays."""

    by, at, replays = 0.0, (), 0

    def replay(self):
        self.replays += 1
        super().replay()

    def after(self, operation, made):
        if self.replays in self.at and name_of(operation) == "aten.native_layer_norm_backward":
            made[2].mul_(1 + self.by)


def flips(by, *at):
    return type("Flips", (Flips,), {"by": by, "at": at})


@pytest.fixture
def spreads(monkeypatch):
    """Have eager be said to be apart from itself; gives how often it was asked."""
    asked, spread_of = [], proof.spread_of

    def spread(*args):
        result, found = spread_of(*args)
        asked.append(found)
        return result, {
            name: dataclasses.replace(one, relative=SPREAD, rms_difference=SPREAD * 1e-2) for name, one in found.items()
        }

    monkeypatch.setattr(proof, "spread_of", spread)
    return asked


def proven(both, tape, monkeypatch):
    monkeypatch.setattr(stand_in, "Tape", tape)
    run = both.alike(training(), exact=True)
    return not run.declined


def test_a_flip_at_one_proof_step_is_noise_and_not_measured_again(cpu, spreads, monkeypatch):
    assert proven(cpu, flips(3e-4, 1), monkeypatch)
    assert len(spreads) == 1


def test_a_small_fault_at_each_replay_is_measured_again_and_declined(cpu, spreads):
    declined_with(cpu, training(), "does not agree", "gradient of norm.bias", tape=flips(3e-4, *range(1, 20)))
    assert len(spreads) == variant.SPREADS


def test_a_fault_at_two_of_three_replays_is_declined(cpu, spreads):
    declined_with(cpu, training(), "gradient of norm.bias", tape=flips(3e-4, 1, 2))


def test_a_fault_that_is_far_beyond_the_noise_is_declined_though_it_does_not_stay(cpu, spreads):
    declined_with(cpu, training(), "gradient of norm.bias", tape=flips(1e-2, 2))


def test_without_noise_a_flip_is_a_fault(cpu):
    declined_with(cpu, training(), "gradient of norm.bias", tape=flips(3e-4, 1))


def test_noise_that_a_later_measure_shows_is_allowed_after_all(cpu, monkeypatch):
    """The first two runs happen to be alike; then every replay of the proof is as far off as eager turns out to be."""
    spread_of, found_so = proof.spread_of, []

    def spread(*args):
        result, found = spread_of(*args)
        by = 1e-4 if found_so else 0.0
        found_so.append(by)
        return result, {name: dataclasses.replace(one, relative=by, rms_difference=by) for name, one in found.items()}

    monkeypatch.setattr(proof, "spread_of", spread)
    assert proven(cpu, flips(3e-4, 1, 2), monkeypatch)
    assert found_so == [0.0, 1e-4]


class NoUpdate(WrongTape):
    """Leaves the optimizer out of each replay."""

    def run(self, operation, args, kwargs):
        return None if "sgd" in name_of(operation) else operation(*args, **kwargs)


@pytest.mark.parametrize("noise", [0.0, 1e-5, 1e-3])
def test_large_noisy_gradients_leave_no_room_for_parameters_that_are_not_updated(monkeypatch, noise):
    """The spread of a kind of tensors is its own: here gradients are a hundred million times what a step changes."""
    monkeypatch.setattr(Jitter, "size", noise)
    monkeypatch.setattr(stand_in, "Tape", NoUpdate)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    for parameter in model.parameters():
        parameter.register_hook(jittered)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, fused=True)
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph", sentinel=0)

        @loop.step
        def step(x):
            loss = 1000 * model(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(24):
            step(torch.randn(64, 64))
        (declined,) = [one for one in loop.status().tiers if one.name == "eager+graph"]
    assert declined.state == "declined"
    assert "parameter " in declined.why


@pytest.mark.parametrize("wrong", [(1,), (2,), (1, 2)])
def test_a_little_noise_hides_no_code_that_is_wrong_at_some_steps(monkeypatch, wrong):
    monkeypatch.setattr(code_proofs, "in_more_bits", lambda *_: None)
    monkeypatch.setattr(Jitter, "size", 1e-7)
    run, proofs = [], []
    prove_step = proof.prove_step

    class Noisy(Run):
        def __init__(self, *args, **settings):
            run.append(self)
            super().__init__(*args, **settings)

    def before(step):
        if step == 0:
            run[0].model.first.weight.register_hook(jittered)

    with faulty() as fault:

        def prove(*args, **kwargs):
            fault.set(1.3 if len(proofs) % proof.STEPS in wrong else 1.0)
            proofs.append(kwargs)
            return prove_step(*args, **kwargs)

        monkeypatch.setattr(code_proofs, "prove_step", prove)
        Noisy("aot_eager", 30, before=before, sentinel=0)
    assert run[0].told(ev.TierDeclined)
    assert run[0].loop.status().tier == "eager"


def test_noise_that_an_earlier_run_saw_counts_though_this_ones_repeats_are_equal(cpu, monkeypatch):
    spread_of = proof.spread_of
    seen = {}

    def spread(*args):
        result, found = spread_of(*args)
        seen.update({name: dataclasses.replace(one, relative=1e-4, rms_difference=1e-4) for name, one in found.items()})
        return result, found

    note_spread = variant.Variant.note_spread
    monkeypatch.setattr(proof, "spread_of", spread)
    monkeypatch.setattr(
        variant.Variant, "note_spread", lambda self, found, _=None: note_spread(self, found, dict(seen))
    )
    assert proven(cpu, flips(3e-4, 1), monkeypatch)


@pytest.mark.parametrize(
    ("planted", "times"),
    [
        ("", 1.0),
        ("parameter a", 100.0),
        ("optimizer state of a: exp_avg", 500.0),
        ("parameter e", -1.0),
        ("parameter e", 0.0),
        ("optimizer state of e: exp_avg", 1.5),
        ("optimizer state of e: step", 0.9),
        ("parameter b", 1.1),
        ("optimizer state of b: exp_avg", 1.3),
    ],
)
def test_what_an_optimizer_makes_of_rounding_is_bounded(planted, times):
    """The gradient of ``a`` is rounding, so the two sides have stepped in unlike directions; that of ``e`` has noise."""
    draws = torch.Generator().manual_seed(0)
    size, rate, names = 64, 1e-3, "abcde"

    def values():
        made = {f"gradient of {name}": fixed[name].clone() for name in names}
        made["gradient of a"] = 0.05 * torch.randn(size, generator=draws)
        made["gradient of e"] *= 1 + 3e-3 * torch.randn(size, generator=draws)
        for name in names:
            gradient = made[f"gradient of {name}"]
            made[f"parameter {name}"] = start[f"parameter {name}"] - rate * gradient / (gradient.abs() + 0.01)
            made[f"optimizer state of {name}: exp_avg"] = 0.1 * gradient
            made[f"optimizer state of {name}: step"] = torch.tensor(7.0)
        return made

    start = {f"parameter {name}": 0.05 * torch.randn(size, generator=draws) for name in names}
    fixed = {name: torch.randn(size, generator=draws) for name in names}
    ours, theirs = values(), values()
    spread = differences(ours, values())[0]
    if planted:  # by so many times an update is longer, or a state
        base = start.get(planted, torch.zeros(()))
        theirs[planted] = base + times * (theirs[planted] - base)
    assert list(rough(spread)) == ["a", "e"]
    found = compare_kinds(ours, theirs, start, Limits.rounding(), spread)
    wrong = [failure.name for one in found.values() for failure in one.failures]
    assert wrong == ([planted] if planted else [])


@pytest.mark.parametrize(("noise", "given"), [(1e-3, "abcd"), (0.1, "")])
def test_an_optimizer_is_judged_by_most_of_its_parameters(noise, given):
    """A little noise in all of them leaves each a little room, and the one that is all rounding its own."""
    fixed = {f"gradient of {name}": torch.randn(64, generator=torch.Generator().manual_seed(0)) for name in "abcd"}
    again = {name: one * (1 + noise * torch.randn(64)) for name, one in fixed.items()}
    again["gradient of a"] = torch.randn(64)
    assert "".join(rough(differences(fixed, again)[0])) == given


def test_where_memory_for_the_start_runs_out_the_step_has_not_begun(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(proof, "_parameters", full)
    usual = Run(None, 12)
    run = Run("aot_eager", 12, sentinel=0)
    assert "planted" in run.told(ev.TierDeclined)[0].reason
    assert run.loop.status().tier == "eager"
    assert all(torch.equal(a, b) for a, b in zip(usual.left(), run.left(), strict=True))
