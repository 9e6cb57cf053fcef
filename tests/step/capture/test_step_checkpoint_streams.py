"""Checkpointed blocks that draw random numbers: a recording draws in each recomputation what its forward drew."""

from __future__ import annotations

import contextlib

import pytest
import torch
from step_programs import Classifier, batches
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.step import tiers
from hotloop.testing import captured_step_emulation


class Block(nn.Module):
    """A block with several draws, or with none."""

    def __init__(self, share=0.3):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.share = share

    def forward(self, x):
        hidden = F.dropout(F.gelu(self.one(x)), self.share) if self.share else F.gelu(self.one(x))
        return x + (F.dropout(self.two(hidden), 0.2) if self.share else self.two(hidden))


class Checkpointed(nn.Module):
    """Blocks that are checkpointed, with draws between them, in the ways that models do it."""

    def __init__(self, way):
        super().__init__()
        self.way, self.first, self.head = way, nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList([Block(), Block(0.0), Block()])
        if way == "wrapped":
            self.blocks = nn.ModuleList(map(checkpoint_wrapper, self.blocks))

    def forward(self, x):
        hidden = self.first(x)
        if self.way == "nested":
            return self.head(F.dropout(checkpoint(self.all, hidden, use_reentrant=False), 0.1))
        for block in self.blocks:
            hidden = F.dropout(hidden, 0.1)
            hidden = block(hidden) if self.way == "wrapped" else self.checkpointed(block, hidden)
        return self.head(hidden)

    def checkpointed(self, block, hidden):
        return checkpoint(block, hidden, use_reentrant=self.way == "reentrant")

    def all(self, hidden):
        for block in self.blocks:
            hidden = checkpoint(block, F.dropout(hidden, 0.1), use_reentrant=False)
        return F.dropout(hidden, 0.1)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


def training(model_of, settings=None, between=lambda *_: None):
    """Give a program that trains a model; ``between(index, model, optimizer)`` is called between two steps."""

    def program(run):
        model = model_of().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer, **(settings or {})).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for index, (x, y) in enumerate(batches(run.device)):
            run.note(train_step(x, y))
            between(index, model, optimizer)
        return model, optimizer

    return program


@pytest.mark.parametrize("way", ["plain", "reentrant", "nested", "wrapped"])
def test_blocks_that_draw(both, way):
    both.equal(training(lambda: Checkpointed(way)), exact=True)


def test_the_sentinel_agrees(both):
    both.equal(training(lambda: Checkpointed("plain"), {"sentinel": 0.5}), exact=True, replays=6)


@contextlib.contextmanager
def set_back(device):
    """Read the state, and set it: from then on the step draws the same again, and so does the next step."""
    on_gpu = device.type == "cuda"
    state = (torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state()).clone()
    yield
    (torch.cuda.set_rng_state if on_gpu else torch.random.set_rng_state)(state)


@contextlib.contextmanager
def forked(_):
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("block", [set_back, forked])
def test_a_step_that_draws_the_same_twice(both, block):
    def program(run):
        model = Classifier(dropout=0.5).to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            with block(x.device):
                one = F.dropout(x, 0.5)
            other = F.dropout(x, 0.5)
            loss = F.cross_entropy(model(one + other), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss, one, other

        for x, y in batches(run.device):
            run.note(*train_step(x, y))
        return model, optimizer

    run = both.equal(program, exact=True)
    assert all(torch.equal(one, other) for _, one, other in run.results)
    assert not torch.equal(run.results[-1][1] == 0, run.results[-2][1] == 0)


def test_a_state_that_was_read_outside_of_the_step_is_declined(both):
    def program(run):
        model = Classifier(dropout=0.5).to(run.device)
        optimizer = adamw(model)
        owner = torch.cuda if run.device.type == "cuda" else torch.random
        kept = owner.get_rng_state()

        @run.loop(model, optimizer).step
        def train_step(x, y):
            owner.set_rng_state(kept)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device, 12):
            run.note(train_step(x, y))
        return model, optimizer

    both.declines(
        program, reason="sets the random state to one that it did not read itself", source="owner.set_rng_state(kept)"
    )


def trained(asked, steps=14):
    torch.manual_seed(0)
    model = Checkpointed("plain")
    optimizer = adamw(model)

    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with captured_step_emulation(), hotloop.Loop(model, optimizer, run=asked) as loop:
        step = loop.step(train_step)
        losses = torch.stack([step(x, y).clone() for x, y in batches("cpu", steps)])
        return losses, loop.status().tier, torch.get_rng_state()


@pytest.mark.campaign  # dynamo compiles each block
def test_compiled_blocks_in_checkpointed_regions(monkeypatch):
    monkeypatch.setitem(tiers.BASES, "regional", {"preset": "aot_eager", "regions": "blocks"})
    losses, tier, position = trained("regional+graph")
    assert tier == "regional+graph"
    eager, _, eagers = trained("eager")
    assert torch.equal(losses, eager)
    assert torch.equal(position, eagers)
