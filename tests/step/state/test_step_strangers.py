"""Parameters that nobody gave to the loop: a step leaves gradients in them, for an optimizer that steps outside of it."""

from __future__ import annotations

import pytest
import torch
from step_programs import GRAPH, Classifier, batches
from torch import nn
from torch.nn import functional as F

from hotloop import events as ev
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


def test_what_a_stranger_holds_is_copied_for_no_proof(both):
    """A teacher may be as large as the model; a step that runs it without gradients writes none of it."""

    def taught(*, frozen):
        def program(run):
            teacher, model = Classifier().to(run.device).requires_grad_(not frozen), Classifier().to(run.device)
            optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

            @run.loop(model, optimizer).step
            def train_step(x, y):
                with torch.no_grad():
                    target = teacher(x).softmax(-1)
                loss = F.cross_entropy(model(x), target)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            for x, y in batches(run.device):
                run.note(train_step(x, y))
            return model, optimizer

        run = both.equal(program, replays=10)
        return [one.copied_bytes for one in run.told(ev.TierProven)]

    assert taught(frozen=False) == taught(frozen=True)


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


def test_a_parameter_that_the_optimizer_lets_go_of_is_a_stranger_from_then_on(both):
    """Trained by hand from a call of another shape on, whose recording has to leave its gradient."""

    def program(run):
        scale = nn.Parameter(torch.ones(8, device=run.device))
        model = Classifier().to(run.device)
        optimizer = torch.optim.SGD([{"params": list(model.parameters())}, {"params": [scale]}], lr=2**-6)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x * scale), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device, 36)):
            if number == 12:
                optimizer.param_groups[1]["params"].clear()
                scale.grad = None
            size = len(x) // (2 if number >= 12 else 1)
            run.note(train_step(x[:size], y[:size]))
            if number >= 12:
                run.note(scale.grad.clone())
                scale.grad = None
        return model, optimizer, scale

    run = both.alike(program, asked=GRAPH)
    assert run.status().tier == GRAPH
