"""The cost of undo: saving a step's start, as a share of the step; and the cost of run="eager" for a call.

usage: OMP_NUM_THREADS=1 python benchmarks/undo.py [BLOCKS]

A network with 53 BatchNorms (of a ResNet-50's shape, written out here) and a transformer encoder are trained, each with
its gradients dropped after every step and with gradients that are accumulated, which have to be copied. A step with the
saving of its start before it alternates with one without, in blocks of a few steps; the share is the median, over the
blocks, of the difference against the step without, with its 95% interval. The saving is timed alone beside it, which is
the sharper figure where the step's own noise is larger than it. Goal: 0.5% of the step where gradients are dropped.

``run="eager"`` is a function that does nothing, called through a loop and directly. Goal: 2 µs.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time

import torch
from ledger import best, processor
from torch import nn

import hotloop
from hotloop.measure import ratio_interval
from hotloop.step.state.undo import StepStart

BLOCKS = 41
SAVINGS = 200
CALLS = 50_000


class Bottleneck(nn.Module):
    """Three convolutions, each with a BatchNorm, around a shortcut."""

    def __init__(self, inside, outside, stride=1):
        super().__init__()
        middle = outside // 4
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(inside, middle, 1, bias=False),
                nn.Conv2d(middle, middle, 3, stride, 1, bias=False),
                nn.Conv2d(middle, outside, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList([nn.BatchNorm2d(middle), nn.BatchNorm2d(middle), nn.BatchNorm2d(outside)])
        self.shortcut = nn.Sequential()
        if inside != outside or stride != 1:
            shape = nn.Conv2d(inside, outside, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shape, nn.BatchNorm2d(outside))

    def forward(self, x):
        """Return ``x`` plus the output of the convolutions."""
        y = x
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(y))
            y = y.relu() if index < 2 else y
        return (y + self.shortcut(x)).relu()


class Residual(nn.Module):
    """A ResNet-50: 53 BatchNorms, 159 buffers, 161 parameters."""

    def __init__(self):
        super().__init__()
        self.start = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        blocks, inside = [], 64
        for stage, (count, outside) in enumerate(((3, 256), (4, 512), (6, 1024), (3, 2048))):
            for index in range(count):
                blocks.append(Bottleneck(inside, outside, 2 if stage and not index else 1))
                inside = outside
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(2048, 1000)

    def forward(self, x):
        """Return the scores of 1,000 classes."""
        x = nn.functional.max_pool2d(self.start(x), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class Encoder(nn.Module):
    """A transformer encoder of 6 layers with dropout: no buffers, 75 parameters."""

    def __init__(self, width=256, words=2000):
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, ids):
        """Return a score for each word at each place."""
        return self.head(self.layers(self.words(ids))).transpose(1, 2)


def workloads():
    """Return each model with its batch, small: the smaller the step, the larger the share."""
    yield "ResNet-50, 4 images of 128 px", Residual(), torch.randn(4, 3, 128, 128), torch.randint(1000, (4,))
    yield "encoder, 8 sequences of 64", Encoder(), torch.randint(2000, (8, 64)), torch.randint(2000, (8, 64))


def seconds(function, count):
    began = time.perf_counter()
    for _ in range(count):
        function()
    return (time.perf_counter() - began) / count


def cost(model, x, y, blocks, *, keeps):
    """Return the cost of saving the start of a step, with gradients that are kept (``keeps``) and without."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    loop = hotloop.Loop(model, optimizer, run="eager")
    start = StepStart(loop.context.holdings, [loop.context.device])

    def step():
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keeps)

    def saved():
        start.save(gradients=True)
        step()

    step(), saved(), step()
    once = seconds(step, 2)
    steps = max(1, round(0.4 / once))
    pairs = []
    for block in range(blocks):  # the order alternates, since a machine drifts
        order = (step, saved) if block % 2 else (saved, step)
        found = {function: seconds(function, steps) for function in order}
        pairs.append((found[saved], found[step]))
    alone = min(seconds(lambda: start.save(gradients=True), SAVINGS) for _ in range(5))
    loop.close()
    with_it, without = zip(*pairs, strict=True)
    low, high = ratio_interval(with_it, without)
    typical = statistics.median(without)
    return {
        "buffers": len(list(model.buffers())),
        "parameters": len(list(model.parameters())),
        "step_ms": 1e3 * typical,
        "save_us": 1e6 * alone,
        "save_share": alone / typical,
        "side_by_side_share": statistics.median(a / b for a, b in pairs) - 1,
        "interval_95": [low - 1, high - 1],
    }


def eager_call():
    """Return the µs that ``run="eager"`` adds to a call of a step that does nothing."""
    model = nn.Linear(2, 2)
    loop = hotloop.Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), run="eager")

    def step(x, *, update=True):
        return x if update else None

    owned, x = loop.step(step), torch.ones(1)
    directly, through = best((lambda: step(x, update=True), lambda: owned(x, update=True)), 15, CALLS)
    loop.close()
    return {"directly": directly, "through_a_loop": through, "difference": through - directly}


def main():
    blocks = int(sys.argv[1]) if len(sys.argv) > 1 else BLOCKS
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": processor(),
        "blocks": blocks,
        "microseconds_of_run_eager": eager_call(),
        "undo": {},
    }
    for name, model, x, y in workloads():
        for keeps, what in ((False, "gradients dropped"), (True, "gradients kept and copied")):
            found["undo"][f"{name}, {what}"] = cost(model, x, y, blocks, keeps=keeps)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
