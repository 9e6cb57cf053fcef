"""A buffer that compiled code leaves another value in: only a checkpoint's recomputation is told as one."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hotloop


class Noted(nn.Module):
    """Notes its gradients' norm in a buffer as the backward runs; compiled code writes another value into it."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("norms", torch.zeros(()))

    def forward(self, x):
        if torch.compiler.is_compiling():
            self.norms.add_(1.0)
        hidden = self.a(x)
        hidden.register_hook(self.note)
        return hidden

    def note(self, gradient):
        self.norms.mul_(0.9).add_(gradient.norm() * 0.1)


class Recomputed(nn.Module):
    """Counts in a buffer within a checkpoint, which counts once more as it recomputes."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        return checkpoint(self.counted, x, use_reentrant=False)

    def counted(self, x):
        self.count.add_(1.0)
        return self.a(x).tanh()


@pytest.mark.parametrize(("make", "recounted"), [(Noted, set()), (Recomputed, {"model.count"})])
def test_only_what_a_checkpoint_writes_again_is_told_as_that(make, recounted):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hotloop.Loop(model, optimizer, run="aot_eager", sentinel=0) as loop:

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(8):
            step(torch.randn(4, 8))
        assert {name.rpartition(".")[2] for name in loop._runners[0].step.recounted} == {
            name.rpartition(".")[2] for name in recounted
        }
        why = next(tier.why for tier in loop.status().tiers if tier.name == "aot_eager")
    assert ("checkpoint" in why) == bool(recounted)
    if not recounted:
        assert "does not agree with eager" in why
