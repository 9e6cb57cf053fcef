"""Little training programs, run twice from one seed: eager from the start, and owned by a `hotloop.Loop`.

A test writes its program once, as its user would, around a `Run` that stands for the loop; `Both` runs it both ways and
holds one against the other.
"""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import math
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as ev
from hotloop.testing import captured_step_emulation

GRAPH = "eager+graph"
PROVING = 8
"""How often the Python of a step runs in all where nothing is recorded twice: eager, survey, warm-up and its repeat,
capture and its reference, and two more references."""
STEPS = 20
"""Six of them lead to a proven recording, so 14 are replays."""


class Run:
    """One run of a program."""

    def __init__(self, device, asked):
        self.device, self._asked = device, asked
        self.results = []
        self.events = []
        self.loops = []
        self.statuses = []
        self._replays = collections.Counter()
        self._calls = collections.Counter()

    @property
    def owned(self):
        return self._asked is not None

    def loop(self, model, optimizer, **settings):
        """Make the loop of the program, by default without checks; without a loop, steps stay as they are."""
        settings.setdefault("sentinel", 0)
        loop = hotloop.Loop(model, optimizer, run=self._asked, **settings) if self.owned else None
        self.loops.append(loop)
        return _Steps(self, loop)

    def note(self, *values):
        """Keep what a step gave, as the user holds it: read only at the end of the run."""
        self.results.append(values)
        return values[0]

    def replays(self, name="train_step"):
        """Give how many calls of a step ran none of its Python."""
        return self._replays[name]

    def calls(self, name="train_step"):
        """Give how often the Python of a step ran."""
        return self._calls[name]

    def status(self, index=0):
        """Give the status as it was when the program had ended."""
        return self.statuses[index]

    def told(self, kind):
        return [one for one in self.events if isinstance(one, kind)]

    @property
    def declined(self):
        return self.told(ev.TierDeclined)

    @property
    def dropped(self):
        return [one.reason for one in self.told(ev.CaptureDropped)]

    @property
    def outside(self):
        """Names of the optimizers that ran beside the last recording."""
        return self.told(ev.Captured)[-1].outside


class _Steps:
    """What `Loop` is to a program: decorates steps. Counts how often their Python runs."""

    def __init__(self, run, loop):
        self._run, self.owner = run, loop

    def step(self, function):
        count, name = self._run._calls, function.__name__
        python = array.array("b")  # whose content is no plain value of the step's
        ran = python.append

        @functools.wraps(function)
        def counted(*args, **kwargs):
            ran(0)
            return function(*args, **kwargs)

        if self.owner is None:
            return function
        owned = self.owner.step(counted)

        def call(*args, **kwargs):
            before = len(python)
            try:
                return owned(*args, **kwargs)
            finally:
                count[name] = len(python)
                self._run._replays[name] += len(python) == before

        return call


class Both:
    """Runs programs eagerly and captured on one device, and compares all that they leave."""

    def __init__(self, device):
        self.device = torch.device(device)

    def run(self, program, asked=None, seed=0):
        """Run a program; gives the run, and everything that it left by name."""
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - the stream that old code draws from
        run = Run(self.device, asked)
        with hotloop.watch() as run.events:
            made = program(run)
        left = {"result": run.results, **(made if isinstance(made, Mapping) else dict(enumerate(_several(made))))}
        left = {name: contents(one) for name, one in left.items()}
        if run.device.type == "cuda":
            torch.cuda.synchronize()  # the time of the last step is known once the device has done it
        run.statuses = [loop.status() for loop in run.loops if loop is not None]
        left["torch's random position"] = torch.get_rng_state()
        left["other random positions"] = (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
        if self.device.type == "cuda":
            left["the GPU's random position"] = torch.cuda.get_rng_state()
        for loop in run.loops:
            if loop is not None:
                loop.close()
        return run, left

    def equal(self, program, *, exact=False, replays=12, seed=0):
        """Run a program both ways; it must end the same, captured, after so many replays. Gives the captured run."""
        run = self.alike(program, exact=exact, seed=seed)
        assert not run.declined, run.declined
        assert {status.tier for status in run.statuses} == {GRAPH}
        assert sum(run._replays.values()) >= replays, (run._replays, run.dropped)
        return run

    def alike(self, program, *, exact=False, seed=0, asked=GRAPH):
        """Run a program both ways; it must end the same, however it ran. Gives the run of the loop."""
        _, eager = self.run(program, seed=seed)
        run, ours = self.run(program, asked, seed=seed)
        same(eager, ours, exact=exact and self.device.type == "cpu")
        return run

    def declines(self, program, *, reason, source=None, hint="", file=None):
        """Run a program both ways; the capture must be declined, and it must end the same. Gives the event."""
        run = self.alike(program)
        assert run.declined, run.status()
        told = run.declined[0]
        assert reason in told.reason, told
        assert told.tier == GRAPH
        assert told.hint
        assert hint in told.hint, told
        if source is not None:
            assert told.file == (file or program.__code__.co_filename), told
            assert source in told.source, told
        assert run.status().tier == "eager"
        assert run.replays(told.function) == 0
        why = {one.name: one for one in run.status().tiers}[GRAPH]
        assert why.state == "declined"
        assert reason in why.why
        return told


def engines(device):
    """On a CPU the stand-in, on a GPU the real thing."""
    return captured_step_emulation() if device == "cpu" else contextlib.nullcontext()


def _several(made):
    return made if isinstance(made, tuple | list) else (made,)


def contents(value):
    """Give what something holds as plain nested containers; tensors are copied, so that nothing moves afterwards."""
    if isinstance(value, nn.Module):
        grads = {name: _copy(one.grad) for name, one in value.named_parameters()}
        asked = {name: one.requires_grad for name, one in value.named_parameters()}
        return {"state": contents(dict(value.state_dict())), "gradients": grads, "requires_grad": asked}
    if isinstance(value, torch.optim.Optimizer):
        groups = [{key: contents(one) for key, one in group.items() if key != "params"} for group in value.param_groups]
        return {"checkpoint": contents(value.state_dict()), "groups": groups}
    if isinstance(value, torch.Tensor):
        return _copy(value)
    if isinstance(value, Mapping):
        return {key: contents(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [contents(one) for one in value]
    return contents(value.state_dict()) if hasattr(value, "state_dict") else value


def _copy(tensor):
    return None if tensor is None else tensor.detach().clone()


def same(reference, found, *, exact, where=""):
    """Hold two nests against each other: types, structure, devices, dtypes, values."""
    assert type(reference) is type(found), f"{where}: {type(found).__name__}, not {type(reference).__name__}"
    if isinstance(reference, torch.Tensor):
        looks = [(one.dtype, one.device, one.shape, one.layout) for one in (reference, found)]
        assert looks[0] == looks[1], f"{where}: {looks[1]}, not {looks[0]}"
        whole = not reference.is_floating_point() or reference.dtype == torch.bool
        narrow = {torch.bfloat16: 2e-2, torch.float16: 4e-3}.get(reference.dtype, 2e-5)
        if reference.device.type == "cuda":
            narrow *= 5
        tolerance = 0.0 if exact or whole else narrow
        torch.testing.assert_close(
            found, reference, rtol=tolerance, atol=tolerance / 4, equal_nan=True, msg=lambda text: f"{where}: {text}"
        )
    elif isinstance(reference, dict):
        assert list(map(str, reference)) == list(map(str, found)), where
        for ours, theirs in zip(reference, found, strict=True):
            same(reference[ours], found[theirs], exact=exact, where=f"{where}[{ours!r}]")
    elif isinstance(reference, list | tuple):
        assert len(reference) == len(found), where
        for index, pair in enumerate(zip(reference, found, strict=True)):
            same(*pair, exact=exact, where=f"{where}[{index}]")
    elif isinstance(reference, float) and not exact:
        assert math.isclose(reference, found, rel_tol=2e-5), f"{where}: {found}, not {reference}"
    else:
        assert reference == found, f"{where}: {found}, not {reference}"


# -- content -----------------------------------------------------------------------------------------------------------


def batches(device, steps=STEPS, *, size=6, width=8, classes=4, seed=1):
    """Give batches that differ from step to step, drawn from a generator of their own."""
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(size, width, generator=draws)
        yield x.to(device), torch.randint(classes, (size,), generator=draws).to(device)


def sentences(device, steps=STEPS, *, size=3, length=5, words=11, seed=1):
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(words, (size, length), generator=draws).to(device)


def images(device, steps=STEPS, *, size=4, seed=1):
    draws = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(size, 2, 6, 6, generator=draws)
        yield x.to(device), torch.randint(4, (size,), generator=draws).to(device)


class Classifier(nn.Module):
    """Linear, normalisation, dropout."""

    def __init__(self, dropout=0.0, norm=nn.LayerNorm, width=8):
        super().__init__()
        self.inner = nn.Linear(width, 12)
        self.norm = norm(12)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.dropout(F.gelu(self.norm(self.inner(x)))))


class Writer(nn.Module):
    """Embedding, attention, and a head that is the embedding."""

    def __init__(self, words=11, width=8, dropout=0.0):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(16, width) / 4)
        self.attention = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.dropout = dropout

    def forward(self, ids):
        x = self.embedding(ids) + self.places[: ids.shape[1]]
        q, k, v = self.attention(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


class Pictures(nn.Module):
    """Convolution and BatchNorm, whose statistics a step moves."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(6, momentum=0.25)
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.norm_2(self.second(x)))
        return self.head(x.mean((2, 3)))


def plain_step(model, optimizer, loss=F.cross_entropy):
    """Give the step that most programs here have."""

    def train_step(x, y):
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value

    return train_step
