"""`auto` and pieces: offered once the whole step cannot be captured for what leaves its blocks alone."""

from __future__ import annotations

import pytest
import torch
from test_step_auto import planted, reasons
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.step.policy import candidates

TIMES = {"eager": 0.040, "eager+graph": 0.010, "pieces": 0.016}
SLOWER = {**TIMES, "pieces": 0.052}


@pytest.fixture(autouse=True)
def _no_store(monkeypatch):
    monkeypatch.setenv("HOTLOOP_CACHE_DIR", "")
    monkeypatch.setattr(candidates, "TRIES_PIECES", True)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.25)

    def forward(self, x):
        return x + self.dropout(self.outer(F.gelu(self.inner(x))))


def train(run, steps, times, *, blocks=3, reads=True):
    """Train for some steps, reading the loss in each; gives losses, the model and the loop."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(blocks)), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)
    loop = hotloop.Loop(model, optimizer, run=run, total_steps=100_000)
    planted(loop, times)
    if run == "auto":
        loop.policy.candidates.declined |= {"full", "regional"}

    @loop.step
    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if reads and loss.item() > 1e9:
            raise AssertionError
        optimizer.step()
        optimizer.zero_grad()
        return loss

    data = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(4, 8, generator=data), torch.randint(0, 4, (4,), generator=data)
        losses.append(step(x, y).item())
    return losses, model, loop


def test_blocks_are_captured_where_the_whole_step_cannot_be_and_training_is_eagers():
    eager = train("eager", 100, TIMES)
    with hotloop.testing.captured_step_emulation():
        losses, model, loop = train("auto", 100, TIMES)
        assert loop.status().tier == "pieces"
        assert loop._runners[0].pieces.recordings > 0
        loop.close()
    assert any("pieces against eager: faster" in line for line in reasons(loop))
    assert losses == pytest.approx(eager[0], rel=1e-4)
    for ours, theirs in zip(model.state_dict().values(), eager[1].state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_where_they_are_slower_eager_goes_on_and_their_memory_is_given_back():
    with hotloop.testing.captured_step_emulation():
        _, _, loop = train("auto", 120, SLOWER)
        assert loop.status().tier == "eager"
        assert loop._runners[0].pieces.recordings == 0
        assert any("pieces against eager: no faster" in line for line in reasons(loop))
        loop.close()


def test_a_step_that_is_captured_whole_is_never_offered_pieces():
    with hotloop.testing.captured_step_emulation():
        _, _, loop = train("auto", 100, TIMES, reads=False)
        assert loop.status().tier == "eager+graph"
        assert "pieces" not in loop.policy.candidates.names()
        loop.close()


def test_a_model_without_repeated_blocks_is_not_offered_pieces():
    with hotloop.testing.captured_step_emulation():
        _, _, loop = train("auto", 40, TIMES, blocks=1)
        assert loop.status().tier == "eager"
        assert "pieces" not in loop.policy.candidates.names()
        loop.close()


def test_auto_leaves_them_to_who_asks(monkeypatch):
    """Until a GPU has run them."""
    monkeypatch.setattr(candidates, "TRIES_PIECES", False)
    with hotloop.testing.captured_step_emulation():
        _, _, loop = train("auto", 40, TIMES)
        assert "pieces" not in loop.policy.candidates.names()
        loop.close()
