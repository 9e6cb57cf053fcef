"""`hotloop.own`, the one helper for modules that plain ``torch.compile`` compiled with CUDA graphs."""

import pytest
import torch
from torch import nn

import hotloop
from hotloop._torch import cudagraphs
from hotloop.testing import cudagraph_emulation


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def x(seed):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def emulation():
    with cudagraph_emulation() as running:
        yield running


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_own_gives_the_same_structure_and_copies_graph_memory_only(emulation):
    net = Net()
    compiled = torch.compile(net, backend=emulation.backend)
    given = x(0)
    with torch.no_grad():
        out = compiled(given)
        owned = hotloop.own({"out": out, "again": [out], "given": given, "weight": net.one.weight, "n": 3})
        assert owned["out"] is owned["again"][0] is not out
        assert owned["given"] is given
        assert owned["weight"] is net.one.weight
        assert owned["n"] == 3
        assert cudagraphs.marked() == -1
        expected = out.clone()
        compiled(x(1))
        assert torch.equal(owned["out"], expected)
        assert hotloop.own(given) is given


def test_own_keeps_autograd_and_marks_after_the_optimizer_step(emulation):
    net, twin = Net(), Net()
    compiled = torch.compile(net, backend=emulation.backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for seed in range(3):
        loss = hotloop.own(compiled(x(seed)).square())
        assert loss.requires_grad
        losses.append(hotloop.own(compiled(x(seed))))
        loss.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert cudagraphs.marked() < 0
    assert all(torch.isfinite(one).all() for one in losses)
    assert torch.equal(losses[0], twin(x(0)))
