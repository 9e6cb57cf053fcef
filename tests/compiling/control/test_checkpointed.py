"""What a checkpointed forward did, its recomputation does: compiled or eager, whatever has happened in between."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import hotloop
from hotloop._torch.module import get_entry

STEPS = 9


class Block(nn.Module):
    """Counts its calls in an attribute, so that each call is other code to dynamo."""

    def __init__(self, *, breaks=False):
        super().__init__()
        self.into, self.out, self.calls, self.breaks = nn.Linear(8, 8), nn.Linear(8, 8), 0, breaks

    def forward(self, x):
        x = self.out(torch.tanh(self.into(x)))
        if self.calls >= 0:
            x = nn.functional.gelu(x)
        self.calls += 1
        if self.breaks:
            torch._dynamo.graph_break()
            x = torch.tanh(self.out(x) * 1.5)
        return x.sin()


class Net(nn.Module):
    def __init__(self, *, times=1, **settings):
        super().__init__()
        self.blocks, self.times = nn.ModuleList(Block(**settings) for _ in range(2)), times

    def forward(self, x):
        for block in [*self.blocks] * self.times:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def trained(settings, *, preset=None, early_stop=True):
    """Train for some steps; return the losses, the parameters, and the status."""
    torch.manual_seed(0)
    model = Net(**settings)
    for block in model.blocks if preset else ():
        hotloop.compile(block, preset=preset)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        with set_checkpoint_early_stop(early_stop):
            loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(one.detach() for one in model.parameters())], hotloop.status(model) if preset else None


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("settings", "early_stop", "limit"),
    [
        ({}, True, 2),
        ({}, True, 3),
        ({}, False, 3),
        ({}, False, 4),
        ({"times": 2}, True, 3),
        ({"breaks": True}, True, 3),
    ],
    ids=str,
)
def test_a_recompile_limit_may_be_reached_between_a_forward_and_its_recomputation(
    monkeypatch, settings, early_stop, limit
):
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", limit)
    theirs, _ = trained(settings)
    ours, status = trained(settings, preset="aot_eager", early_stop=early_stop)
    torch.testing.assert_close(ours, theirs)
    parts = status.components.values()
    for part in parts:
        assert part.frames_compiled > 0
        assert part.frames_eager > 0, "a block that changes with each call was compiled at each"
        assert part.state == "partial"
    assert any("recompile limit" in cause.reason for part in parts for cause in part.causes)


@pytest.mark.parametrize("late", [True, False])
def test_a_component_that_changes_its_way_after_a_forward_is_recomputed_as_it_ran(late):
    block = Block()
    hotloop.compile(block, preset="aot_eager")
    lane = get_entry(block)._training
    lane.eager = late
    x = torch.randn(4, 8, requires_grad=True)
    made = checkpoint(block, x, use_reentrant=False)
    lane.eager = not late
    made.sum().backward()
    assert x.grad is not None
    assert hotloop.status(block).components["model"].frames_eager == (2 if late else 0)
