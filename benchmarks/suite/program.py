"""A workload's program, the place where it is built, and the steps that several workloads share."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own custom

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import hotloop

BATCHES = 8
"""Different batches of a workload with a single shape, used in turns."""


@dataclasses.dataclass
class Program:
    """A workload's program: ``model`` and ``components`` may be compiled; ``padded`` puts a batch into buckets."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]
    batches: list[tuple[Any, ...]]
    components: Mapping[str, nn.Module] = dataclasses.field(default_factory=dict)
    buckets: Mapping[str, hotloop.Pad] | None = None
    padded: Callable[..., tuple[Any, ...]] | None = None

    def batch(self, index):
        """Return the arguments of a step by its number."""
        return self.batches[index % len(self.batches)]


class Place:
    """The device and size of a workload; draws its data from a generator of its own."""

    def __init__(self, device, size):
        self.device, self.size = torch.device(device), size
        self.draws = torch.Generator(self.device).manual_seed(1)

    def of(self, *, gpu, cpu):
        """Choose between the two sizes."""
        return gpu if self.size == "gpu" else cpu

    def build(self, make):
        """Make a model on the device, in training mode, from one seed."""
        torch.manual_seed(0)
        with self.device:
            return make().to(self.device).train()

    def autocast(self):
        """Return the precision context of a forward pass."""
        if self.size == "gpu":
            return functools.partial(torch.autocast, self.device.type, torch.bfloat16)
        return contextlib.nullcontext

    def normal(self, *shape):
        """Draw normal numbers."""
        return torch.randn(shape, generator=self.draws, device=self.device)

    def whole(self, low, high, *shape):
        """Draw whole numbers from low to below high."""
        return torch.randint(low, high, shape, generator=self.draws, device=self.device)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def pictures(place, model, *, gpu, cpu, classes=1000):
    """A classifier of pictures; ``gpu`` and ``cpu`` are the number of pictures in a batch and their side in pixels."""
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(x, y):
        with autocast():
            scores = model(x)
        scores = getattr(scores, "logits", scores)  # InceptionV3 has auxiliary ones beside them
        loss = F.cross_entropy(scores.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    number, pixels = place.of(gpu=gpu, cpu=cpu)
    batches = [(place.normal(number, 3, pixels, pixels), place.whole(0, classes, number)) for _ in range(BATCHES)]
    return Program(model, optimizer, train_step, batches)


def classifier(place, make, shape, classes):
    """Make the program of a model that gives scores."""
    model = place.build(make)
    optimizer, autocast = adamw(model.parameters()), place.autocast()

    def train_step(x, y):
        with autocast():
            scores = model(x)
        loss = F.cross_entropy(scores.float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batches = [(place.normal(*shape), place.whole(0, classes, shape[0])) for _ in range(BATCHES)]
    return Program(model, optimizer, train_step, batches)
