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


@pytest.mark.parametrize(("asked", "at"), [(GRAPH, 2), (GRAPH, 3), (GRAPH, 4), ("aot_eager", 3), ("aot_eager", 14)])
def test_a_tensor_of_nobody_that_is_written_in_some_calls_only_declines_with_its_name(both, asked, at):
    """A call that writes it while it is proven or checked writes it twice: nothing could put it back in between."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        average, writes = torch.zeros(4, 12, device=run.device), torch.zeros(1, dtype=torch.bool)

        @run.loop(model, optimizer, sentinel=0.5).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if memoryview(writes.numpy())[0]:
                average.lerp_(model.head.weight.detach(), 0.5)
            return loss

        for number, (x, y) in enumerate(batches(run.device, 24)):
            writes.fill_(number >= at)
            run.note(train_step(x, y))
        return model, optimizer

    run = both.alike(program, asked=asked)
    (told,) = run.declined
    assert "the step writes into train_step.average in some calls only" in told.reason
    assert "state=" in told.hint


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
