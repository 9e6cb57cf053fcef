"""Small programs for benches, each as its user would write it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import hotloop


def classifier():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def classifier_block():
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


def batches(sizes=(16,) * 4):
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 8, generator=draw), torch.randint(0, 4, (n,), generator=draw)) for n in sizes]


def program(data=None, model=None, before=lambda model: None):
    """A program whose step is a function over its own model."""
    model = model or classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        before(model)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, data or batches())


def make():
    return program()


def blocks():
    """A model of repeated blocks."""
    return program(model=nn.Sequential(nn.Linear(8, 4), nn.Sequential(*(classifier_block() for _ in range(4)))))


def ragged():
    return program(batches([size for odd in range(5, 13) for size in (16, 16, 16, odd)]))


def counting():
    """A step that changes Python state and depends on it: no proof can run the step twice."""
    seen = []

    def before(model):
        seen.append(len(seen))

    return program(before=before)


def failing():
    def before(model):
        raise KeyError("the user's own")

    return program(before=before)


def compiled():
    model = classifier()
    model.compile(backend="eager")
    return program(model=model)


class Trainer:
    """A step that is a method, so that it is copied with its model."""

    def __init__(self):
        self.model = classifier()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def workload(self):
        return hotloop.Workload(self.model, self.optimizer, self.step, batches())
