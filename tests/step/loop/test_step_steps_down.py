"""A preset that this machine cannot run, under a loop: what runs in its place, what it draws, and what is said of it."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch._inductor
from step_programs import batches
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events, presets
from hotloop._torch import backends
from hotloop.step.compiled import OF_MODES, as_eager_draws
from hotloop.testing import planted_failure


def train(run, steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=steps)

    @loop.step
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x, y in batches("cpu", steps):
        train_step(x, y)
    return loop


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the preset itself")
@pytest.mark.parametrize(("run", "below"), [("reduce-overhead", "default"), ("triton", "inductor")])
def test_what_runs_in_place_of_a_preset_draws_what_eager_draws(monkeypatch, run, below):
    asked = []

    def inductor(mode, options, dynamic):
        asked.append((mode, dict(options)))
        return backends.eager

    monkeypatch.setattr(backends, "inductor", inductor)
    loop = train(run)
    assert asked
    assert all(one == (None, {**presets.get(below).options, "fallback_random": True}) for one in asked)
    row = {one.name: one for one in loop.status().tiers}[run]
    assert (row.state, row.why) == ("in force", f"runs preset {below}: no GPU that torch can use")
    loop.close()


class Steps(nn.Linear):
    """A model whose step is another method than the call that is compiled."""

    def __init__(self):
        super().__init__(8, 4)

    def step(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(
    ("stage", "after", "remedy"),
    [
        ("forward compile", 0, "try another preset"),
        ("backward compile", 0, "try another preset"),
        ("forward run", 5, "compiled code is at fault: train on without this tier, or name another preset"),
        ("backward run", 5, "compiled code is at fault: train on without this tier, or name another preset"),
    ],
)
def test_what_compiled_code_fails_in_is_told_with_its_own_remedy(stage, after, remedy):
    with planted_failure(stage, after=after) as planted:
        loop = train("aot_eager", steps=8)
    assert planted.fired
    why = {one.name: one.why for one in loop.status().tiers}["aot_eager"]
    assert f"planted failure in {stage}" in why
    assert remedy in why, why
    loop.close()


def test_what_was_not_called_is_told_with_its_own_remedy():
    model = Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    with hotloop.Loop(model, optimizer, run="aot_eager", total_steps=8) as loop:

        @loop.step
        def train_step(x, y):
            loss = F.cross_entropy(model.step(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches("cpu", 8):
            train_step(x, y)
        why = {one.name: one.why for one in loop.status().tiers}["aot_eager"]
    assert "call the model itself" in why, why


@pytest.mark.parametrize("name", presets.NAMES)
def test_all_rungs_below_draw_what_eager_draws(name):
    made = as_eager_draws(presets.get(name))
    assert pickle.loads(pickle.dumps(made)) == made  # as a child gets it
    assert made.to_dict()["ladder"] == list(presets.get(name).ladder)
    asked = presets.get(name)
    for preset, one in zip((asked, *map(presets.get, asked.ladder)), (made, *made.ladder), strict=True):
        assert one.options.get("fallback_random", False) == (preset.backend == "inductor")
        assert (one.cudagraphs, one.autotunes, one.needs) == (preset.cudagraphs, preset.autotunes, preset.needs)


def test_modes_are_written_as_the_options_that_torch_makes_of_them():
    of_torch = torch._inductor.list_mode_options()
    assert set(OF_MODES) == {preset.mode for preset in map(presets.get, presets.NAMES) if preset.mode}
    assert {mode: of_torch[mode] for mode in OF_MODES} == OF_MODES


def test_a_model_that_trains_eager_once_the_tier_was_declined_is_not_said_to_be_called_past_its_compile():
    """The second model of a GAN was not called yet: its compile, taken off by then, was said to have no effect."""
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(one.parameters(), lr=2**-6) for one in (first, second)]
    loop = hotloop.Loop([first, second], optimizers, run="aot_eager")

    @loop.step
    def penalized(x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(second(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    @loop.step
    def plain(x):
        second(first(x)).sum().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()

    with hotloop.watch() as seen:
        for number, (x, _) in enumerate(batches("cpu", 16)):
            (penalized if number < 8 else plain)(x)
    loop.close()
    assert [event for event in seen if isinstance(event, events.NoEffect)] == []


@pytest.mark.campaign
@pytest.mark.parametrize("run", ["aot_eager", "full"])
def test_a_gradient_penalty_is_declined_for_what_it_is(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    loop = hotloop.Loop(model, optimizer, run=run)

    @loop.step
    def train_step(x, y):
        x = x.clone().requires_grad_()
        loss = F.cross_entropy(model(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for x, y in batches("cpu", 4):
        train_step(x, y)
    row = {one.name: one for one in loop.status().tiers}[run]
    loop.close()
    assert row.state == "declined"
    assert row.why.startswith("the step differentiates a gradient of compiled code, as a gradient penalty does")
    assert "does not support double backward" in row.why
    assert 'run="eager+graph"' in row.why
    assert "see the reason" not in row.why
