"""Models that torch.jit has scripted or traced: trained as they are, with a cause for everything that is declined."""

from __future__ import annotations

import logging

import pytest
import torch
from step_programs import GRAPH
from torch.nn import functional as F

import hotloop
from hotloop.testing import captured_step_emulation

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning")


class Holding(torch.nn.Module):
    """A model of Python's, one part of which is scripted."""

    def __init__(self, part):
        super().__init__()
        self.part = part

    def forward(self, x):
        return self.part(x)


def scripted():
    return torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)))


def traced():
    return torch.jit.trace(
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)), data()[0]
    )


def inside():
    return Holding(scripted())


def data():
    return torch.linspace(-1, 1, 24).view(6, 4), torch.arange(6) % 4


def training(make, asked):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with captured_step_emulation(), hotloop.Loop(model, optimizer, run=asked, total_steps=100_000) as loop:

        @loop.step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [train_step(*data()) for _ in range(24)]
        return torch.stack(losses), loop.status()


@pytest.mark.parametrize("asked", ["auto", GRAPH, "aot_eager"])
@pytest.mark.parametrize("make", [scripted, traced, inside])
def test_a_scripted_model_trains_as_in_eager_and_is_told_of(caplog, make, asked):
    caplog.set_level(logging.INFO)
    eager, _ = training(make, "eager")
    ours, status = training(make, asked)
    assert torch.equal(eager, ours)
    assert status.tier == "eager"
    assert not [one for one in caplog.records if one.exc_info]
    if asked != "auto":  # which may stay eager before it has looked
        (declined,) = [one for one in status.tiers if one.name == asked]
        assert "scripted or traced by torch.jit. give the Python module that it was made of" in declined.why
