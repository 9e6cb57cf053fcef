"""Tensors that a program swaps between two steps: torch swaps none of which anybody holds a weak reference."""

from __future__ import annotations

import gc
import weakref
from unittest import mock

import pytest
import torch
from step_programs import Classifier, batches
from torch import nn
from torch.nn import functional as F

from hotloop.step import context
from hotloop.step.ranks.peers import Alone
from hotloop.step.rescue import Rescue
from hotloop.step.state.holdings import Holdings
from hotloop.step.state.program import Program
from hotloop.step.tiers import Tier

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _swaps():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def loaded(model, weights):
    model.load_state_dict({name: one.mul(0.5) for name, one in model.state_dict().items()}, assign=True)


def converted(model, weights):
    model.double()


def swapped(model, weights):
    torch.utils.swap_tensors(weights, weights.flip(0).mul_(3).detach())


def parameter(model, weights):
    torch.utils.swap_tensors(model.head.bias, nn.Parameter(torch.arange(4.0, device=weights.device)))


def program(change, at, *, keeps):
    """A step that keeps its gradients until the next one, or not; the program changes a tensor before step ``at``."""

    def run_of(run):
        model = Classifier().to(run.device)
        weights = torch.tensor([1.0, 2.0, 4.0, 8.0], device=run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            if keeps:
                optimizer.zero_grad(set_to_none=False)
            kind = model.head.bias.dtype
            loss = F.cross_entropy(model(x), y, weight=weights.to(kind))
            loss.backward()
            optimizer.step()
            if not keeps:
                optimizer.zero_grad()
            return loss.detach()

        for number, (x, y) in enumerate(batches(run.device)):
            if number == at:
                change(model, weights)
            run.note(train_step(x.to(model.head.bias.dtype), y))
        gc.collect()
        run.held_of_gradients = [weakref.getweakrefs(one.grad) for one in model.parameters() if one.grad is not None]
        run.held = [*run.held_of_gradients, *(weakref.getweakrefs(one) for one in (*model.parameters(), weights))]
        return model

    return run_of


@pytest.mark.parametrize("change", [loaded, converted, swapped, parameter])
@pytest.mark.parametrize(("at", "keeps"), [(3, True), (12, False)])
def test_a_program_may_swap_what_a_recording_reads(both, change, at, keeps):
    run = both.alike(program(change, at, keeps=keeps))
    assert not any(run.held)
    assert run.replays()


def test_a_program_may_convert_a_model_whose_step_adds_to_the_gradients_it_finds(both):
    """A recording copies what it finds where it reads it."""

    def accumulated(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)

        @run.loop(model, optimizer).step
        def train_step(x, y, update):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        for number, (x, y) in enumerate(batches(run.device, 40)):
            if number == 31:
                model.double()
            run.note(train_step(x.to(model.head.bias.dtype), y, update=number % 2 == 1))
        run.held = [weakref.getweakrefs(one.grad) for one in model.parameters()]
        return model

    run = both.alike(accumulated)
    assert not any(run.held)
    assert run.replays()


def test_gradients_are_let_go_of_once_the_step_has_run():
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    step = context.DecoratedStep(mock.Mock(), Program(lambda: None, Holdings({"model": model}, {}), CPU, bool), str)
    step.context.holdings, step.context.peers = step.program.holdings, Alone()
    rescue = Rescue(step)
    assert rescue.guarded(lambda: bool(weakref.getweakrefs(model.weight.grad)), Tier("full"))  # amid the step
    assert not weakref.getweakrefs(model.weight.grad)
