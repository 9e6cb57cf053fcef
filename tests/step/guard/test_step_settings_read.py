"""Settings of an optimizer that the step's own code reads: frozen where no recording has them on the device."""

from __future__ import annotations

import functools

import pytest
import torch
from step_programs import Classifier, batches
from torch.nn import functional as F

STEPS, AT = 30, 16
"""Long enough to be captured anew after the change."""
adagrad = functools.partial(torch.optim.Adagrad, lr=0.05)
"""Its step runs outside of a recording."""
fused = functools.partial(torch.optim.AdamW, lr=2**-6, fused=True)


def training(optimizer_of, factor_of, change, *, steps=STEPS):
    """A program whose loss is multiplied by ``factor_of(optimizer)``; ``change(optimizer, number)`` is between steps."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = optimizer_of(model.parameters())
        optimizer.coefficient = 1.0

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y) * factor_of(optimizer)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device, steps)):
            change(optimizer, number)
            run.note(train_step(x, y))
        return model, optimizer

    return program


def rate_of(optimizer):
    return optimizer.param_groups[0]["lr"]


def once(set_it):
    def change(optimizer, number):
        if number == AT:
            set_it(optimizer)

    return change


def set_rate(optimizer):
    optimizer.param_groups[0]["lr"] = 0.01


@pytest.mark.parametrize(
    ("optimizer_of", "factor_of", "set_it", "name"),
    [
        (adagrad, rate_of, set_rate, "param_groups"),
        (fused, lambda one: one.defaults.get("factor", 1.0), lambda one: one.defaults.update(factor=2.0), "defaults"),
        (fused, lambda one: one.coefficient, lambda one: setattr(one, "coefficient", 2.0), "coefficient"),
    ],
)
def test_what_the_step_reads_of_an_optimizer_is_in_force_in_the_next_step(both, optimizer_of, factor_of, set_it, name):
    run = both.equal(training(optimizer_of, factor_of, once(set_it)), replays=6)
    assert len(run.dropped) == 1
    assert name in run.dropped[0]


def test_a_rate_that_the_step_does_not_read_is_no_reason_to_record_anew(both):
    assert not both.equal(training(adagrad, lambda one: len(one.param_groups), once(set_rate))).dropped


def test_a_rate_that_changes_at_each_step_and_is_read_declines_the_capture(both):
    def fall(optimizer, number):
        optimizer.param_groups[0]["lr"] = 0.05 / (1 + number)

    run = both.alike(training(adagrad, rate_of, fall), exact=True)
    assert "param_groups" in run.declined[0].reason


def test_a_rate_of_an_optimizer_that_the_loop_was_not_given_is_in_force_in_the_next_step(both):
    """As of a second network that is trained elsewhere."""
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)

    def change(_, number):
        other.param_groups[0]["lr"] = 1.0 if number < AT else 2.0

    run = both.equal(training(fused, lambda _: rate_of(other), change), replays=6)
    assert len(run.dropped) == 1
    assert "param_groups" in run.dropped[0]
