"""Accumulated, cleared and clipped gradients."""

from __future__ import annotations

import pytest
import torch
from step_programs import GRAPH, PROVING, Classifier, batches, plain_step
from torch import nn
from torch.nn import functional as F

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
