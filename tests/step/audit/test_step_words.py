"""What a decline says to do is what is left to do."""

import logging

import torch
from torch import nn

import hotloop
from hotloop.step.audit.auditor import _changed_settings
from hotloop.step.audit.strangers import _name_it
from hotloop.step.audit.values import sparse_gradients
from hotloop.step.watch.optimizers import frozen_settings, learning_rates


class Outer(torch.optim.SGD):
    """Keeps the optimizer that it steps where no attribute names it."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.held = [torch.optim.SGD(self.param_groups, lr=0.1)]


def test_a_step_that_adds_a_parameter_group_is_told_to_add_it_between_two_steps():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    before = [(frozen_settings(optimizer), learning_rates(optimizer))]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    after = [(frozen_settings(optimizer), learning_rates(optimizer))]
    (told,) = _changed_settings(before, after)
    assert told.hint == "add and remove parameter groups between two steps"
    optimizer.param_groups[0]["lr"] = 0.2
    (told,) = _changed_settings(after, [(frozen_settings(optimizer), learning_rates(optimizer))])
    assert told.hint.startswith("call scheduler.step() outside the step")


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
