"""Small programs that once trained otherwise with hotloop than without, reduced to what shows the fault.

Each takes a mode to run in, and returns what it has trained and counted; `PROGRAMS` names the mode that went wrong.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import queue
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.testing import captured_step_emulation

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, CHANGE = 24, 14


@dataclasses.dataclass
class Program:
    """A step of a model, what changes between two steps, and what else it leaves."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[..., Any]
    change: Callable[[], Any] = lambda: None
    leaves: Callable[[], Any] = lambda: None
    after: Callable[[float], Any] = lambda _: None


def ordinary(model, change=lambda: None, *, criterion=F.cross_entropy, leaves=lambda: None, rate=0.1):
    """Return a program with an ordinary step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step(x, y):
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Program(model, optimizer, step, change, leaves)


def run(make, mode):
    """Run a program, and return its losses, its weights, what else it leaves, and the tier before it changed."""
    torch.manual_seed(0)
    made, losses, tier = make(), [], "eager"
    numbers = torch.Generator().manual_seed(1)
    with captured_step_emulation():
        loop = hotloop.Loop(made.model, made.optimizer, run=mode, total_steps=STEPS)
        step = loop.step(made.step)
        for at in range(STEPS):
            if at == CHANGE:
                tier = loop.status().tier
                made.change()
            batch = torch.randn(12, 8, generator=numbers), torch.randint(0, 3, (12,), generator=numbers)
            losses.append(float(step(*batch)))
            made.after(losses[-1])
        loop.close()
    return (losses, list(made.model.parameters()), made.leaves()), tier


def moving_slice():
    """A queue of which each step writes another slice."""
    model, bank, at = nn.Linear(8, 8), torch.randn(8, 64), torch.zeros(1, dtype=torch.long)
    made = ordinary(model, leaves=lambda: bank)

    def step(x, _):
        keys = model(x)
        loss = F.cross_entropy(keys @ bank, torch.zeros(12, dtype=torch.long))
        loss.backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        start = int(at)
        bank[:, start : start + 12] = keys.detach().T
        at.add_(12).remainder_(48)
        return loss.detach()

    made.step = step
    return made


def decorated_criterion():
    """A value in the closure of a function that `functools.wraps` has given an attribute."""
    state = {"weight": 1.0}

    def weighted(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args) * state["weight"]

        return wrapper

    return ordinary(
        nn.Linear(8, 3),
        lambda: state.update(weight=0.25),
        criterion=weighted(F.cross_entropy),
    )


def decorated_step():
    """A value in the closure of a decorated step."""
    state, made = {"weight": 1.0}, ordinary(nn.Linear(8, 3))
    plain = made.step

    @functools.wraps(plain)
    def step(x, y):
        return plain(x * state["weight"], y)

    made.step, made.change = step, lambda: state.update(weight=0.25)
    return made


def function_with_an_attribute():
    """A list in the closure of a function that has an attribute."""
    weights = [1.0]

    def criterion(guess, y):
        return F.cross_entropy(guess, y) * weights[0]

    criterion.name = "weighted"
    return ordinary(nn.Linear(8, 3), lambda: weights.__setitem__(0, 0.25), criterion=criterion)


def bound_method(name, kind, take):
    """A collection that the step reads through a method of it, kept in a variable."""

    def make():
        values = kind()
        values[0] = 1.0
        read = getattr(values, name.partition(".")[2])
        return ordinary(
            nn.Linear(8, 3),
            lambda: values.__setitem__(0, 0.25),
            criterion=lambda guess, y: F.cross_entropy(guess, y) * take(read()),
        )

    make.__name__ = name
    return make


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.layer.strength * gradient, None


class _Reversal(nn.Module):
    strength = 0.1

    def forward(self, x):
        return _Reverse.apply(x, self)


def object_on_ctx():
    """Gradient reversal: the backward reads an attribute of an object on ``ctx``."""
    model = nn.Sequential(nn.Linear(8, 16), _Reversal(), nn.Linear(16, 3))
    return ordinary(model, lambda: setattr(model[1], "strength", 1.0))


def loss_function_of_a_library():
    """transformers' own way to set a loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    silent = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=1, n_head=2, **silent))

    def scaled(logits, labels, **_):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * 0.25

    made = ordinary(model, lambda: setattr(model, "loss_function", scaled))

    def step(x, _):
        ids = (x.abs() * 9).long().clamp(max=29)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        made.optimizer.step()
        made.optimizer.zero_grad()
        return loss.detach()

    made.step = step
    return made


def hook_of_the_optimizer():
    """A hook that counts the optimizer's steps: a declined proof must leave its count as eager does."""
    made, count = ordinary(nn.Linear(8, 3)), collections.Counter()
    average = copy.deepcopy(made.model)

    @torch.no_grad()
    def hook(*_):
        count["steps"] += 1
        share = 1 - min(0.999, (1 + count["steps"]) / (10 + count["steps"]))
        for mean, one in zip(average.parameters(), made.model.parameters(), strict=True):
            mean.lerp_(one, share)

    made.optimizer.register_step_post_hook(hook)
    made.leaves = lambda: (count["steps"], list(average.parameters()))
    return made


def simple_queue():
    """Batches that the step takes from a queue of Python's: none is lost."""
    waiting, made = queue.SimpleQueue(), ordinary(nn.Linear(8, 3))
    for _ in range(2 * STEPS):
        waiting.put(torch.randn(12, 8))
    plain = made.step
    made.step, made.leaves = lambda _, y: plain(waiting.get(), y), waiting.qsize
    return made


def long_queue(name, make, take, rest=len):
    """Return a program whose step takes its batches from a long container or a file: none is lost."""

    def made():
        waiting, made = make([torch.randn(12, 8) for _ in range(400)]), ordinary(nn.Linear(8, 3))
        plain = made.step
        made.step, made.leaves = lambda _, y: plain(take(waiting), y), lambda: rest(waiting)
        return made

    made.__name__ = f"long_queue_{name}"
    return made


def lines_of_a_file(batches):
    """Return an open file with a number for each batch."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.writelines(f"{float(one.mean())}\n" for one in batches)
    opened = Path(file.name).open()  # noqa: SIM115 - the step reads on in it
    Path(file.name).unlink()
    return opened


def lines_left(file):
    """Count the lines that nobody has read."""
    with file:
        return len(file.readlines())


def swapped_tensors():
    """torch swaps a tensor that the step reads."""
    weight = torch.ones(3)
    return ordinary(
        nn.Linear(8, 3),
        lambda: torch.utils.swap_tensors(weight, torch.tensor([1.0, 4.0, 0.2])),
        criterion=lambda guess, y: F.cross_entropy(guess, y, weight=weight),
    )


def group_added_in_the_step():
    """A step that gives its optimizer a further parameter while hotloop looks at it."""
    made, extra = ordinary(nn.Linear(8, 3)), nn.Parameter(torch.ones(1))
    plain, calls = made.step, itertools.count()

    def step(x, y):
        if next(calls) == 1:
            made.optimizer.add_param_group({"params": [extra]})
            made.model.gain = extra
        return plain(x * getattr(made.model, "gain", 1), y)

    made.step = step
    return made


def every_tenth():
    """A step that counts its calls, and does otherwise in each tenth."""
    calls, model = itertools.count(), nn.Linear(8, 3)

    def criterion(guess, y):
        loss = F.cross_entropy(guess, y)
        return loss + model.weight.square().sum() if next(calls) % 10 == 9 else loss

    return ordinary(model, criterion=criterion)


def branch_that_never_runs():
    """A value that is named only in a branch that never runs, and changes between any two steps."""
    notes, made = {"in_step": False, "loss": 0.0}, ordinary(nn.Linear(8, 3))
    plain = made.step

    def step(x, y):
        loss = plain(x, y)
        if notes["in_step"]:
            notes["loss"] += loss.item()
        return loss

    made.step = step
    made.after = lambda loss: notes.update(loss=notes["loss"] + loss)
    made.leaves = lambda: notes["loss"]
    return made


def forks_nothing():
    """Dropout where `fork_rng` is told by position to fork nothing."""
    model, dropout = nn.Linear(8, 3), nn.Dropout(0.1)

    def criterion(guess, y):
        with torch.random.fork_rng([], False):
            return F.cross_entropy(dropout(guess), y)

    return ordinary(model, criterion=criterion)


CAPTURED, COMPILED, DECLINED = ("eager+graph", "eager+graph"), ("aot_eager", "aot_eager"), ("eager+graph", "eager")
PROGRAMS = {
    moving_slice: COMPILED,
    decorated_criterion: CAPTURED,
    decorated_step: CAPTURED,
    function_with_an_attribute: CAPTURED,
    bound_method("list.copy", lambda: [0], lambda each: each[0]): CAPTURED,
    bound_method("dict.copy", dict, lambda each: each[0]): CAPTURED,
    bound_method("deque.copy", lambda: collections.deque([0]), lambda each: each[0]): CAPTURED,
    bound_method("list.__iter__", lambda: [0], next): CAPTURED,
    object_on_ctx: CAPTURED,
    loss_function_of_a_library: CAPTURED,
    hook_of_the_optimizer: DECLINED,
    simple_queue: ("aot_eager", "eager"),
    long_queue("deque", collections.deque, collections.deque.popleft): ("aot_eager", "eager"),
    long_queue("list", list, list.pop): ("aot_eager", "eager"),
    long_queue("dict", lambda all_: dict(enumerate(all_)), lambda each: each.popitem()[1]): ("aot_eager", "eager"),
    long_queue(
        "file",
        lines_of_a_file,
        lambda each: torch.full((12, 8), float(each.readline())),
        lines_left,
    ): (
        "aot_eager",
        "eager",
    ),
    swapped_tensors: CAPTURED,
    group_added_in_the_step: DECLINED,
    every_tenth: DECLINED,
    forks_nothing: CAPTURED,
    branch_that_never_runs: CAPTURED,
}
"""Each program, the mode that it runs in, and the tier in force before it changes: one in ``eager`` was declined."""
