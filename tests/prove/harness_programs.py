"""Programs for the harness: two networks that an allocator calls between the steps, and some that go wrong."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import hotloop

sys.path.insert(0, str(Path(__file__).parents[1] / "testing"))
from two_networks import Ranker, batches


def allocator(ranker=None, infer=True):
    """A gist encoder and a lens, called once batched in training and many times by a greedy allocator."""
    ranker = ranker or Ranker()

    def allocate(items, chosen, target):
        return ranker.allocate(items[:1])

    given = batches(8)
    models = (ranker.gist, ranker.lens)
    return hotloop.Workload(models, ranker.optimizer, ranker.step, given, infer=allocate if infer else None)


def trained_only():
    """The same program without an ``infer`` of its own."""
    return allocator(infer=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x):
        return torch.tanh(self.drop(self.layer(x)))


class Writes(Net):
    """Writes into its input, which no CUDA graph captures."""

    def forward(self, x):
        x.add_(1)
        return super().forward(x)


class Program:
    """A network; ``keep`` holds the output of each call, as a list of losses or a cache of embeddings does."""

    def __init__(self, kind=Net, keep=False, call=lambda model, x: model(x)):
        torch.manual_seed(0)
        self.model, self.call, self.kept, self.keep = kind(), call, [], keep
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x):
        loss = F.mse_loss(self.call(self.model, x.clone()), x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def infer(self, x):
        self.model.eval()
        output = self.call(self.model, x.clone())
        self.model.train()
        if self.keep:
            self.kept.append(output)
        return output

    def workload(self):
        draw = torch.Generator().manual_seed(1)
        given = [torch.randn(4, 8, generator=draw) for _ in range(4)]
        return hotloop.Workload(self.model, self.optimizer, self.step, given, infer=self.infer)


def plain():
    return Program().workload()


def writes():
    return Program(Writes).workload()


def keeps():
    return Program(keep=True).workload()


def bypassed():
    return Program(call=lambda model, x: model.forward(x)).workload()


def failing():
    def call(model, x):
        raise KeyError("the user's own")

    return Program(call=call).workload()


def without_room():
    """A program that runs out of memory when it is compiled only."""

    def call(model, x):
        output = model(x)
        if any(one.state == "compiled" for one in hotloop.status(model).components.values()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return output

    return Program(call=call).workload()
