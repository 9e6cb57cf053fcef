"""Parameters that nobody gave to the loop: a step leaves gradients in them, for an optimizer that steps outside of it."""

from __future__ import annotations

import pytest
import torch
from step_programs import GRAPH, Classifier, batches
from torch import nn
from torch.nn import functional as F

from hotloop.step.state.holdings import Holdings
from hotloop.step.state.program import Program
from hotloop.step.state.snapshot import Snapshot

KINDS = ("a module", "a parameter")


def trained_outside(kind, *, set_to_none, every):
    """A program whose step trains a classifier; what stands before it is trained by hand, every so many steps."""

    def program(run):
        first = nn.Linear(8, 8) if kind == "a module" else nn.ParameterList([torch.ones(8)])
        first, model = first.to(run.device), Classifier().to(run.device)
        scale = first[0] if kind == "a parameter" else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        outside = torch.optim.SGD(first.parameters(), lr=2**-4)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(first(x) if scale is None else x * scale), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device, 24)):
            run.note(train_step(x, y))
            if number % every == every - 1:
                outside.step()
                outside.zero_grad(set_to_none=set_to_none)
        return model, optimizer, first

    return program


@pytest.mark.parametrize("asked", [GRAPH, "aot_eager"])
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_for_an_optimizer_outside_is_eagers(both, kind, set_to_none, every, asked):
    """A proof would leave it twice, and a replay, which binds the gradients that it knows, none."""
    run = both.alike(trained_outside(kind, set_to_none=set_to_none, every=every), asked=asked)
    assert not run.declined
    assert run.status().tier == asked


def test_a_stranger_that_the_step_writes_keeps_no_step_from_being_undone():
    """MoCo's key encoder is moved before the forward pass, which may fail; what was found to be written goes back."""
    model, other = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    holdings = Holdings({"model": model}, {})
    holdings.strangers["other"] = other
    holdings.found.append(other.detach())
    start = Snapshot(Program(lambda: None, holdings, torch.device("cpu"), lambda: False), everything=False)
    start.save(gradients=True)
    other.data.mul_(0.5)
    with torch.no_grad():
        other.mul_(0.5)
    other.grad = torch.ones(2)
    assert not start.wrote()
    start.restore()
    assert other.tolist() == [1.0, 1.0]
    assert other.grad is None
