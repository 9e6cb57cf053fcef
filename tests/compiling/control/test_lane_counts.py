"""What is counted of components under CUDA graphs, and that presets without them pay nothing."""

import json

import pytest
import torch
from torch import nn

import hotloop
from hotloop.report import components as shown
from hotloop.testing import cudagraph_emulation

PRESET = "reduce-overhead"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def x(seed):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def emulation():
    with cudagraph_emulation() as running:
        yield running


def test_counts_tell_the_pace_the_shapes_and_the_copies(emulation):
    model = hotloop.compile(Net(), PRESET)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for part in range(2):
            model(x(part)).sum().backward()
        with torch.no_grad():
            for _ in range(step):
                model(x(5)[:2])
        optimizer.step()
        optimizer.zero_grad()
    status = hotloop.status(model)
    one = status.components["model"]
    training, inference = one.modes["training"], one.modes["inference"]
    assert training["calls_per_step"] == {"2": 3}
    assert inference["calls_per_step"] == {"1": 1, "2": 1}
    assert training["shapes"] == {"4x6": 6}
    assert inference["shapes"] == {"2x6": 3}
    assert one.outputs_copied == 6 + 3 * 8 + 3
    assert one.bytes_copied == (6 * 24 + 6 * (2 * 36 + 2 * 6) + 3 * 12) * 4
    data = json.loads(json.dumps(status.to_dict()))["components"]
    facts = shown.components(data)[0].facts
    assert "33 outputs of CUDA graphs copied, 0.0 MiB" in facts
    assert "training: 2 calls a step, on 1 shape" in facts
