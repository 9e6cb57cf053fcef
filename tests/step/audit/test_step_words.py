"""What a decline says to do is what is left to do."""

import logging

import torch
from torch import nn

import hotloop
from hotloop.step.audit.strangers import _name_it
from hotloop.step.audit.values import sparse_gradients


class Outer(torch.optim.SGD):
    """Keeps the optimizer that it steps where no attribute names it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.held = [torch.optim.SGD(self.param_groups, lr=0.1)]


def declined(model, optimizer, run_step, batch):
    with hotloop.Loop(model, optimizer, run="aot_eager") as loop:
        step = loop.step(run_step)
        for _ in range(8):
            step(batch())
        return next(tier.why for tier in loop.status().tiers if tier.name == "aot_eager")


def test_a_step_that_adds_a_parameter_group_is_told_to_add_it_between_two_steps():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x):
        if len(optimizer.param_groups) == 1 and optimizer.state:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    why = declined(model, optimizer, step, lambda: torch.ones(2, 4))
    assert "add and remove parameter groups between two steps" in why
    assert "scheduler" not in why


def test_a_sparse_gradient_that_is_cleared_is_not_told_to_be_cleared():
    class Held:
        def gradients(self):
            return {}

    (told,) = sparse_gradients(Held(), {"embedding.weight"})
    assert "zero_grad" not in told.hint
    assert "torch.optim.SparseAdam" in told.hint


def test_an_optimizer_that_no_attribute_names_is_named_by_its_kind():
    outer = Outer([nn.Parameter(torch.ones(2))])
    assert "give the SGD that it steps beside it" in _name_it(outer.held[0], [outer])


def test_a_failure_of_hotloops_names_its_cause(caplog):
    model = nn.Linear(4, 1)
    with hotloop.Loop(model, run="auto") as loop, caplog.at_level(logging.WARNING, "hotloop"):

        def fails():
            raise ZeroDivisionError("ours")

        loop.stepping.disable_on_error(fails)
    assert "hotloop failed: ZeroDivisionError: ours at test_step_words.py:" in caplog.text
    assert "Steps run eager from now on" in caplog.text
