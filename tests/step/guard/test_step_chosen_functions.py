"""Functions that are chosen by type, or that a module of torch's is told to call: a change is in force in the next step."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.testing import captured_step_emulation


def by_type():
    @functools.singledispatch
    def scaled(loss):
        return loss * 1.0

    model = nn.Linear(8, 4)
    return (
        model,
        lambda x: scaled(model(x).square().mean()),
        lambda: scaled.register(torch.Tensor)(lambda one: one * 0.2),
    )


def method_by_type():
    class Scale:
        @functools.singledispatchmethod
        def scaled(self, loss):
            return loss * 1.0

    scale, model = Scale(), nn.Linear(8, 4)
    register = Scale.scaled.register
    return (
        model,
        lambda x: scale.scaled(model(x).square().mean()),
        lambda: register(torch.Tensor, lambda _, one: one * 0.2),
    )


def activation():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return layer, lambda x: layer(x[:, None]).square().sum(), lambda: setattr(layer, "activation", F.gelu)


def distance():
    def shorter(one, other):
        return (one - other).abs().sum(-1) * 0.1

    model, criterion = nn.Linear(8, 4), nn.TripletMarginWithDistanceLoss(distance_function=F.pairwise_distance)
    change = functools.partial(setattr, criterion, "distance_function", shorter)
    return model, lambda x: criterion(model(x), model(0.5 * x), model(-x)), change


def train(make, *, captured):
    """Train, change a function after half of the steps; return the losses, and how many steps were replays before."""
    torch.manual_seed(0)
    model, loss_of, change = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x):
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    loop = hotloop.Loop(model, optimizer, run="eager+graph", sentinel=0) if captured else None
    step = loop.step(step) if loop is not None else step
    losses, replays = [], 0
    for number in range(24):
        if number == 12:
            change()
        losses.append(step(torch.randn(6, 8)).clone())
        replays += loop is not None and number < 12 and loop.last_ran() == ("eager+graph", "run")
    if loop is not None:
        loop.close()
    return torch.stack(losses), replays


@pytest.mark.parametrize("make", [by_type, method_by_type, activation, distance])
def test_a_function_that_was_changed_is_called_in_the_very_next_step(make):
    losses, _ = train(make, captured=False)
    with captured_step_emulation():
        ours, replays = train(make, captured=True)
    assert replays >= 2
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=1e-6)
