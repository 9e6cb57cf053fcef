"""Accumulated, cleared and clipped gradients."""

from __future__ import annotations

import pytest
import torch
from step_programs import GRAPH, PROVING, Classifier, batches, plain_step
from torch import nn
from torch.nn import functional as F

import hotloop

CLEARING = {
    "at the end": (False, True),
    "at the end, to zeros": (False, False),
    "at the start": (True, True),
    "at the start, to zeros": (True, False),
}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


@pytest.mark.parametrize("clearing", CLEARING)
def test_gradients_cleared_in_any_way(both, clearing):
    at_start, to_none = CLEARING[clearing]

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            if at_start:
                optimizer.zero_grad(set_to_none=to_none)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if not at_start:
                optimizer.zero_grad(set_to_none=to_none)
            return loss

        gradients = []
        for x, y in batches(run.device, 24):
            run.note(train_step(x, y))
            found = [one.grad for one in model.parameters()]
            gradients.append([None if one is None else one.clone() for one in found])
        return {"model": model, "optimizer": optimizer, "gradients": gradients}

    both.equal(program, exact=True)


@pytest.mark.parametrize("clearing", CLEARING)
@pytest.mark.parametrize("micro", [2, 4])
def test_accumulation_written_with_an_argument(both, micro, clearing):
    """Each kind of call is a recording of its own: first, middle and last of a group find other gradients."""
    at_start, to_none = CLEARING[clearing]

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y, *, first=False, update=False):
            if at_start and first:
                optimizer.zero_grad(set_to_none=to_none)
            loss = F.cross_entropy(model(x), y) / micro
            loss.backward()
            if update:
                optimizer.step()
                if not at_start:
                    optimizer.zero_grad(set_to_none=to_none)
            return loss

        for number, (x, y) in enumerate(batches(run.device, 16 * micro)):
            place = number % micro
            run.note(train_step(x, y, first=place == 0, update=place == micro - 1))
        return model, optimizer

    run = both.equal(program, exact=True, replays=8 * micro)
    assert run.calls() + run.replays() >= 16 * micro


def test_a_seldom_update_runs_compiled_though_its_calls_have_another_argument():
    """Its batches have the same shapes: nothing is compiled anew."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)
    loop = hotloop.Loop(model, optimizer, run="aot_eager", sentinel=None)

    @loop.step
    def train_step(x, y, update):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    for number, (x, y) in enumerate(batches(torch.device("cpu"), 80)):
        train_step(x, y, update=number % 8 == 7)
    steps = {one.name: one.steps for one in loop.status().tiers}
    assert steps["aot_eager"] == 80


def test_accumulation_whose_clearing_is_outside_the_step(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y, *, update):
            loss = F.cross_entropy(model(x), y) / 2
            loss.backward()
            if update:
                optimizer.step()
            return loss

        for number, (x, y) in enumerate(batches(run.device, 40)):
            run.note(train_step(x, y, update=number % 2 == 1))
            if number % 2 == 1:
                optimizer.zero_grad()
        return model, optimizer

    both.equal(program, exact=True, replays=24)


def test_several_backward_passes_in_one_step(both):
    def program(run):
        model = Classifier(dropout=0.25).to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            total = torch.zeros((), device=x.device)
            for part, target in zip(x.chunk(3), y.chunk(3), strict=True):
                loss = F.cross_entropy(model(part), target) / 3
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return total

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    assert both.equal(program, exact=True).calls() == PROVING


@pytest.mark.parametrize("fused", [True, None])
@pytest.mark.parametrize("way", ["norm", "norm foreach", "inf norm", "value", "one norm each"])
def test_clipping(both, way, fused):
    def clip(model):
        named = list(model.parameters())
        if way == "value":
            return nn.utils.clip_grad_value_(named, 0.0625)
        if way == "one norm each":
            return torch.stack([nn.utils.clip_grad_norm_([one], 0.0625) for one in named])
        kind = float("inf") if way == "inf norm" else 2.0
        return nn.utils.clip_grad_norm_(named, 0.125, norm_type=kind, foreach=True if way == "norm foreach" else None)

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=fused)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            norm = clip(model)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    assert both.equal(program, exact=fused is True).calls() == PROVING


def test_clipping_that_looks_for_infinities_declines(both):
    """error_if_nonfinite=True reads the norm on the host."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device, 12):
            run.note(train_step(x, y))
        return model, optimizer

    both.declines(program, reason="read on the host", source="error_if_nonfinite=True")


def test_gradients_that_the_user_changes_between_steps_are_what_the_next_one_finds(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y, *, update):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device, 40)):
            update = number % 2 == 1
            run.note(train_step(x, y, update=update))
            if not update and number % 4 == 0:
                for one in model.parameters():
                    one.grad.mul_(0.5)
            elif not update:
                for one in model.parameters():
                    one.grad = torch.ones_like(one)
        return model, optimizer

    both.equal(program, exact=True, replays=24)


def test_a_parameter_that_gets_no_gradient_keeps_none(both):
    def program(run):
        model = Classifier().to(run.device)
        model.unused = nn.Linear(3, 3).to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
            assert model.unused.weight.grad is None
        return model, optimizer

    assert both.equal(program, exact=True).status().tier == GRAPH


def as_one_tensor(first, second):
    second.grad = first.grad


def as_one_memory(first, second):
    second.grad.data = first.grad.data


def as_parts_that_overlap(first, second):
    memory = torch.cat([first.grad.flatten(), second.grad.flatten()])
    first.grad, second.grad = memory[:16].view(4, 4), memory[8:24].view(4, 4)


def as_parts_of_one(first, second):
    memory = torch.cat([first.grad.flatten(), second.grad.flatten()])
    first.grad, second.grad = memory[:16].view(4, 4), memory[16:].view(4, 4)


@pytest.mark.parametrize("share", [as_one_tensor, as_one_memory, as_parts_that_overlap, as_parts_of_one])
def test_gradients_that_become_one_between_two_calls(both, share):
    """What one backward adds to either is added to both; parts of one memory that do not overlap are as others."""

    def program(run):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-5)

        @run.loop(model, optimizer).step
        def train_step(x, update):
            loss = (model(x) - 1).square().mean()
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        for number in range(36):
            run.note(train_step(torch.randn(8, 4, device=run.device), number % 2 == 1))
            if number >= 24 and number % 2 == 0:
                share(model[0].weight, model[1].weight)
        return model

    run = both.alike(program)
    if share is as_parts_of_one:
        assert (run.declined, run.dropped) == ([], [])
    elif share is as_one_memory:
        assert "a tensor was given the memory of another one" in run.declined[0].reason
    else:
        assert run.dropped == ["which gradients are one tensor, or share memory,"]
