"""Code that asks whether a capture is going on, as transformers' masks do, may take another kernel with other dropout."""

import contextlib
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.step.prove import rounding_evidence
from hotloop.testing import captured_step_emulation


class Trained(nn.Module):
    """Is at its optimum, where its gradients are rounding; while it is captured, sums in two halves."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Linear(64, 8, bias=False), factor

    def forward(self, x):
        weight = self.layer.weight
        if not torch.cuda.is_current_stream_capturing():
            return F.linear(torch.native_dropout(x, 0.1, True)[0], weight)
        x = torch.native_dropout(torch.native_dropout(x, 0.1, True)[0], 0.1, True)[0]
        halves = zip(x.chunk(2, dim=1), weight.chunk(2, dim=1), strict=True)
        return self.factor * sum(F.linear(*half) for half in halves)


class Dropping(nn.Module):
    """Drops another share while it is captured, which no random number explains."""

    def __init__(self, captured_share):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.captured_share = nn.Linear(64, 8, bias=False), captured_share

    def forward(self, x):
        share = self.captured_share if torch.cuda.is_current_stream_capturing() else 0.1
        return self.layer(torch.native_dropout(x, share, True)[0])


@contextlib.contextmanager
def prepared(model, x, y):
    """Yield the reference runs of a captured step that trains the model in 16 bits."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with captured_step_emulation(), hotloop.Loop(model, optimizer, run="aot_eager+graph", sentinel=None) as loop:

        @loop.step
        def step(x, y):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(2):
            step(x, y)
        yield loop._runners[0].code._runs


@pytest.fixture
def _no_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # torch without CUDA cannot tell


@pytest.mark.usefixtures("_no_capture")
@pytest.mark.parametrize(("factor", "expected"), [(1.0, True), (1.05, False)])
def test_where_gradients_are_rounding_the_step_in_more_bits_decides(factor, expected):
    """The two paths' gradients differ by as much as they are, and past the limits of 16 bits."""
    model, x = Trained(factor), torch.randn(32, 64)
    wanted = F.linear(x, model.layer.weight).detach()
    with prepared(model, x, wanted) as runs:
        before = torch.get_rng_state(), model.layer.weight.detach().clone()
        assert rounding_evidence.differs_by_chance(runs, ((x, wanted), {})) is expected
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(model.layer.weight, before[1])


@pytest.mark.usefixtures("_no_capture")
@pytest.mark.parametrize(("captured_share", "expected"), [(0.1, True), (0.5, False)])
def test_a_path_that_drops_another_share_is_another_step(captured_share, expected):
    x, y = torch.randn(32, 64), torch.randn(32, 8)
    with prepared(Dropping(captured_share), x, y) as runs:
        assert rounding_evidence.differs_by_chance(runs, ((x, y), {})) is expected


@pytest.mark.usefixtures("_no_capture")
def test_with_other_processes_no_step_is_run_in_more_bits(monkeypatch):
    """They may have no question to decide, and the collectives of this one would wait for them."""
    monkeypatch.setattr(rounding_evidence, "step_in_first", lambda *_: pytest.fail("a step is run in more bits"))
    model, x = Trained(1.0), torch.randn(32, 64)
    wanted = F.linear(x, model.layer.weight).detach()
    with prepared(model, x, wanted) as runs:
        runs.context = dataclasses.replace(runs.context, peers=object())
        assert not rounding_evidence.differs_by_chance(runs, ((x, wanted), {}))
