"""Presets with CUDA graphs of their own in a loop: what steps return and leave is the user's, under the emulation."""

import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.testing import cudagraph_emulation


def train(run):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    loop = hotloop.Loop(model, optimizer, run=run, sentinel=1.0)

    @loop.step
    def train_step(x, y, update):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return {"loss": loss, "logits": logits}

    held, gradients = [], []
    for number in range(24):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(6, 8, generator=generator), torch.randint(4, (6,), generator=generator)
        held.append(train_step(x, y, number % 2 == 1))
        if number % 2 == 0:
            gradients.append([parameter.grad for parameter in model.parameters()])
    return held, gradients, model, loop


def test_what_steps_return_and_leave_may_be_held_and_equals_eager():
    reference = train("eager")
    with cudagraph_emulation():
        found = train("reduce-overhead")
        assert found[3].status().tier == "reduce-overhead"
        for ours, theirs in zip(found[0], reference[0], strict=True):
            torch.testing.assert_close(ours["loss"].detach(), theirs["loss"].detach())
            torch.testing.assert_close(ours["logits"].detach(), theirs["logits"].detach())
        for ours, theirs in zip(found[2].parameters(), reference[2].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)
    assert all(torch.isfinite(one).all() for several in found[1] for one in several)
