"""Runs small training scripts that change what their step reads, eagerly and captured, and says what came of it.

A script is a generator. It first yields ``model, loss`` or ``model, optimizer, step`` (and what is called after each step), and goes
on at each of `CHANGES`, between two steps, as a script does at a validation.
"""

from __future__ import annotations

import dataclasses
import inspect

import torch
from torch import nn
from torch.nn import functional as F

import hotloop
import hotloop.step.loop.status
from hotloop import events as ev
from hotloop.testing import captured_step_emulation

STEPS, CHANGES = 56, (24, 40)
"""Six steps lead to a proven recording, so that there are replays before, between and after the changes."""


class Mlp(nn.Module):
    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, width), nn.Dropout(dropout), nn.Linear(width, 4)

    def features(self, x):
        return F.relu(self.first(x))

    def forward(self, x):
        return self.last(self.drop(self.features(x)))


class Cnn(nn.Module):
    """Convolutions with BatchNorm; a batch's eight numbers are two channels of 2x2."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.block, self.norm_2 = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x.view(-1, 2, 2, 2) if x.dim() == 2 else x)))
        x = x + F.relu(self.norm_2(self.block(x)))
        return self.head(x.mean((2, 3)))


class Gpt(nn.Module):
    """Two layers of causal attention over eight tokens of eleven."""

    def __init__(self, words=11, width=8, layers=2):
        super().__init__()
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(8, width)
        self.blocks = nn.ModuleList(GptBlock(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.embed(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class GptBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + F.gelu(self.mlp(self.norm_2(x)))


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, -1)
        return self.decoder(mean + (spread / 2).exp() * torch.randn_like(mean)), mean, spread


def tokens(x):
    return (x * 3).long().abs() % 11


def language_loss(logits, ids, **settings):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), **settings)


def adamw(parameters, lr=2**-6, **settings):
    """Adam as a recording has it, so that eager and replays agree bit by bit."""
    return torch.optim.AdamW(parameters, lr=lr, fused=True, **settings)


def sgd(parameters, lr=2**-4, **settings):
    return torch.optim.SGD(parameters, lr=lr, fused=True, **settings)


def usual_step(loss_of, optimizer):
    def train_step(x, y):
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train_step


def scripts(module):
    return {name: one for name, one in vars(module).items() if inspect.isgeneratorfunction(one)}


@dataclasses.dataclass
class Outcome:
    """What came of a script; and how it got there.

    ``right, replayed`` or ``right, declined``: as eager, bit by bit. ``late``: a later check noticed a change, and the status
    says which steps may have used the old value. ``wrong``: nothing was noticed.
    """

    kind: str
    drops: list[str]
    declined: list[str]
    replays: int
    stale: tuple[hotloop.step.loop.status.StaleSteps, ...]
    matters: bool
    """Whether the changes make a difference in eager: a script where they make none tells nothing."""


def train(script, *, captured=False, changes=True):
    torch.manual_seed(0)
    running = script()
    parts = next(running)
    if len(parts) == 2:
        optimizer = adamw(parts[0].parameters())
        parts = (parts[0], optimizer, usual_step(parts[1], optimizer))
    model, optimizer, step, *after = parts
    loop = None
    if captured:
        loop = hotloop.Loop(model, optimizer, run="eager+graph", total_steps=STEPS)
        step = loop.step(step)
    draws = torch.Generator().manual_seed(1)
    left, late, stale = [], 0, ()
    for number in range(STEPS):
        if changes and number in CHANGES:
            next(running, None)
        x = torch.randn(6, 8, generator=draws, dtype=torch.float32)
        left.append(step(x, torch.randint(4, (6,), generator=draws)).clone())
        for function in after:
            function()
        late += captured and number >= CHANGES[1] and loop.last_ran() == ("eager+graph", "run")
    if captured:
        stale = loop.status().stale
        loop.close()
    running.close()
    for one in model if isinstance(model, tuple) else (model,):
        left += [value.detach().clone() for value in one.state_dict().values()]
    return left, late, stale


def equal(some, others):
    return len(some) == len(others) and all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(some, others, strict=True)
    )


def outcome(script):
    """Run a script eagerly, without its changes, and captured."""
    eager = train(script)[0]
    matters = not equal(eager, train(script, changes=False)[0])
    with captured_step_emulation(), hotloop.watch() as events:
        ours, late, stale = train(script, captured=True)
    drops = [one.reason for one in events if isinstance(one, ev.CaptureDropped)]
    declined = [one.reason for one in events if isinstance(one, ev.TierDeclined)]
    right = "right, replayed" if late else "right, declined"
    kind = right if equal(eager, ours) else "late" if stale else "wrong"
    return Outcome(kind, drops, declined, late, stale, matters)


def script_of(trick):
    """Return the script whose loss is weighted by what a trick reads."""

    def script():
        read, change = trick()
        model = Mlp()
        yield model, lambda x, y: F.cross_entropy(model(x), y) * read()
        change()
        while True:
            yield

    return script
