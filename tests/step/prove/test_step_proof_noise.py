"""The proof where eager's own kernels differ from run to run: what does not stay is noise, what stays is declined."""

import dataclasses

import pytest
import torch
from step_sentinels import Jitter, Run, faulty, jittered
from test_step_proof import WrongTape, cpu, declined_with, training
from torch.optim.optimizer import register_optimizer_step_post_hook

import hotloop
from hotloop import events as ev
from hotloop._torch.dispatch import name_of
from hotloop.step.capture.optimizers import step_again
from hotloop.step.prove import proof
from hotloop.step.prove.outcomes import STEPS
from hotloop.step.prove.reference_runs import ReferenceRuns
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
    assert len(spreads) == 2


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
    monkeypatch.setattr(ReferenceRuns, "in_more_bits", lambda *_: None)
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
            fault.set(1.3 if len(proofs) % STEPS in wrong else 1.0)
            proofs.append(kwargs)
            return prove_step(*args, **kwargs)

        monkeypatch.setattr(proof, "prove_step", prove)
        Noisy("aot_eager", 30, before=before, sentinel=0)
    assert run[0].told(ev.TierDeclined)
    assert run[0].loop.status().tier == "eager"


class Attention(torch.nn.Module):
    """Its key's bias adds one number to all scores of a query, which softmax takes away: its gradient is rounding."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.out = torch.nn.Linear(32, 8)

    def forward(self, x):
        made = self.qkv(x)
        if made.requires_grad:
            made.register_hook(jittered)
        q, k, v = made.chunk(3, -1)
        return self.out(torch.softmax(q @ k.transpose(-1, -2) / 32**0.5, -1) @ v)


class WrongAdam(WrongTape):
    """Replays with an optimizer whose arguments are others."""

    @staticmethod
    def wrong(args, kwargs):
        return args, kwargs

    def run(self, operation, args, kwargs):
        if "adam" in name_of(operation):
            args, kwargs = self.wrong(args, dict(kwargs))
        return operation(*args, **kwargs)


def wrong_adam(change):
    return type("WrongAdam", (WrongAdam,), {"wrong": staticmethod(change)})


def halved(args, kwargs):
    return args, {**kwargs, "lr": kwargs["lr"] * 0.5}


def reversed_(args, kwargs):
    return args, {**kwargs, "maximize": not kwargs["maximize"]}


def undecayed(args, kwargs):
    return args, {**kwargs, "weight_decay": 0.0}


def stale(args, kwargs):
    """The gradients of another step: all zero."""
    return (args[0], [torch.zeros_like(one) for one in args[1]], *args[2:]), kwargs


def stuck(args, kwargs):
    """The count of steps of the one before."""
    return (*args[:5], [one.sub_(1) for one in args[5]]), kwargs


def train_with_noise(tape, monkeypatch, optimizer_of, noise, after=lambda _: None):
    monkeypatch.setattr(Jitter, "size", noise)
    monkeypatch.setattr(stand_in, "Tape", tape)
    torch.manual_seed(0)
    model = Attention()
    optimizer = optimizer_of(model.parameters())
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph", sentinel=0)

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            after(model)
            optimizer.zero_grad()
            return loss

        for _ in range(24):
            step(torch.randn(8, 16, 32))
        (found,) = [one for one in loop.status().tiers if one.name == "eager+graph"]
    return found


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, fused=True)


OPTIMIZERS = {
    "fused": adamw,
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "outside": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "scheduled": lambda parameters: torch.optim.lr_scheduler.LambdaLR(one := adamw(parameters), lambda _: 1.0) and one,
}


@pytest.mark.parametrize("noise", [1e-7, 1e-6])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_an_optimizer_makes_of_rounding_is_held_against_the_same_gradients(monkeypatch, optimizer, noise):
    """Two right replays step in unlike directions, by which the gradient of a part of one tensor is rounding."""
    found = train_with_noise(stand_in.Tape, monkeypatch, OPTIMIZERS[optimizer], noise)
    assert found.state == "in force", found.why


@torch.no_grad()
def clipped(model):
    for one in model.parameters():
        one.clamp_(-0.1, 0.1)


def zeroed(model):
    model.zero_grad(set_to_none=False)


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, nesterov=True)


def clips_by_hook(parameters):
    optimizer = adamw(parameters)

    def clip(one, *_):
        with torch.no_grad():
            for parameter in (each for group in one.param_groups for each in group["params"]):
                parameter.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clip)
    return optimizer


@pytest.mark.parametrize("noise", [1e-7, 1e-6])
def test_what_a_hook_of_the_optimizer_writes_is_not_its_own(monkeypatch, noise):
    found = train_with_noise(stand_in.Tape, monkeypatch, clips_by_hook, noise)
    assert found.state == "in force", found.why


def test_two_parameters_in_one_memory_are_held_against_the_reference(monkeypatch):
    def shared(parameters):
        parameters = list(parameters)
        twin = torch.nn.Parameter(parameters[0].detach())
        twin.register_hook(lambda grad: grad)
        return torch.optim.AdamW([*parameters, twin], lr=1e-3, fused=True)

    found = train_with_noise(stand_in.Tape, monkeypatch, shared, 1e-6, lambda model: model.qkv.weight.grad.mul_(1.0))
    assert found.state == "in force", found.why


def test_a_step_that_a_scaler_leaves_out_is_held_against_the_reference(monkeypatch):
    """The gradients overflow at one proof step, in a parameter that the step also writes itself."""
    monkeypatch.setattr(Jitter, "size", 1e-6)
    torch.manual_seed(0)
    model = Attention()
    extra = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([*model.parameters(), extra], lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph", sentinel=0, state=[scaler])

        @loop.step
        def step(x, by):
            loss = model(x).square().mean() + (extra * by).sum()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                extra.clamp_(-1, 1)
            optimizer.zero_grad()
            return loss.detach()

        for number in range(24):
            step(torch.randn(8, 16, 32), torch.tensor([float("inf") if number in {4, 9} else 1.0]))
        (found,) = [one for one in loop.status().tiers if one.name == "eager+graph"]
    assert found.state == "in force", found.why
    assert torch.isfinite(extra).all()


def test_the_step_that_is_taken_again_leaves_the_optimizer_alone():
    called = []
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, 4, 32)).sum().backward()
    optimizer.step()
    before = [dict(group) for group in optimizer.param_groups]
    values = [one.detach().clone() for one in model.parameters()]
    handle = register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        made = step_again(optimizer, list(model.parameters()), [one.grad for one in model.parameters()])
        assert not called
        assert [dict(group) for group in optimizer.param_groups] == before
        assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
        optimizer.step()
    finally:
        handle.remove()
    assert called
    assert all(torch.equal(one, parameter) for (one, _), parameter in zip(made, model.parameters(), strict=True))


@pytest.mark.parametrize("after", [clipped, zeroed])
@pytest.mark.parametrize("optimizer", [adamw, nesterov])
def test_what_is_not_the_optimizers_alone_is_held_against_the_reference(monkeypatch, after, optimizer):
    found = train_with_noise(stand_in.Tape, monkeypatch, optimizer, 1e-6, after)
    assert found.state == "in force", found.why


@pytest.mark.parametrize("change", [halved, reversed_, undecayed, stale, stuck])
@pytest.mark.parametrize("noise", [1e-7, 1e-6])
def test_noise_in_all_gradients_excuses_no_wrong_optimizer(monkeypatch, change, noise):
    found = train_with_noise(wrong_adam(change), monkeypatch, adamw, noise)
    assert found.state == "declined"
    assert "parameter " in found.why or "optimizer state of " in found.why


def test_where_memory_for_the_start_runs_out_the_step_has_not_begun(monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(proof, "parameters_of", full)
    usual = Run(None, 12)
    run = Run("aot_eager", 12, sentinel=0)
    assert "planted" in run.told(ev.TierDeclined)[0].reason
    assert run.loop.status().tier == "eager"
    assert all(torch.equal(a, b) for a, b in zip(usual.left(), run.left(), strict=True))
