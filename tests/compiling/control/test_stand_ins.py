"""Where dynamo hands the program another value than torch does, and the program fails on it, eager has the last word."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

import hotloop


class Sized(nn.Module):
    """Computes with its input's shape as a tensor: dynamo has a ``torch.Size`` there."""

    def __init__(self):
        super().__init__()
        self.net, self.calls, self.wrong = nn.Conv2d(3, 3, 1), 0, False

    def forward(self, x):
        self.calls += 1
        size = torch._shape_as_tensor(x)[2:4]
        torch._dynamo.graph_break()
        if self.wrong:
            raise ValueError("the user's own")
        times = int(torch.prod(size))
        return self.net(x) * times


@pytest.mark.parametrize("preset", ["aot_eager", "default"])
def test_a_call_that_fails_on_a_stand_in_runs_eagerly_with_its_cause(preset):
    model, x = Sized(), torch.randn(2, 3, 4, 5)
    theirs = model(x)
    hotloop.compile(model, preset=preset)
    for _ in range(2):
        torch.testing.assert_close(model(x), theirs)
    part = hotloop.status(model).components["model"]
    assert part.state == "eager"
    cause = next(cause for cause in part.causes if cause.stage == "trace")
    assert "TypeError" in cause.reason
    assert "torch.prod(size)" in cause.source
    assert "under @torch.compiler.disable" in cause.hint


def test_an_error_that_eager_raises_as_well_is_the_users():
    model, x = Sized(), torch.randn(2, 3, 4, 5)
    hotloop.compile(model, preset="aot_eager")
    model.wrong = True
    with pytest.raises(ValueError, match="the user's own") as caught:
        model(x)
    assert caught.value.__context__ is None


class Tracks(nn.Module):
    """Changes itself in eager code before a stand-in, or an error of the user's, is met."""

    def __init__(self, *, wrong):
        super().__init__()
        self.net, self.wrong, self.calls, self.seen, self.counts = nn.Linear(4, 4), wrong, 0, [], {"calls": 0}
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    @torch._dynamo.disable
    def track(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean())
        self.replaced = self.replaced + 1
        self.calls += 1
        self.counts["calls"] += 1
        self.seen += [float(torch.rand(())), random.random(), np.random.rand()]  # noqa: NPY002

    def forward(self, x):
        self.track(x)
        if self.wrong:
            raise self.wrong
        size = torch._shape_as_tensor(x)[1:2]
        torch._dynamo.graph_break()
        times = torch.prod(size)
        return self.net(x) * times + self.mean


@pytest.mark.parametrize("preset", ["aot_eager", "default"])
@pytest.mark.parametrize("wrong", [None, TypeError("the user's own"), ValueError("the user's own")])
def test_what_a_call_changed_before_it_failed_is_changed_once(preset, wrong):
    eager = Tracks(wrong=wrong)
    ours = copy.deepcopy(eager)
    hotloop.compile(ours, preset=preset)
    for at in range(3):
        results = []
        for model in (eager, ours):
            torch.manual_seed(at)
            random.seed(at)
            np.random.seed(at)  # noqa: NPY002
            try:
                results.append(model(torch.randn(2, 4)))
            except (TypeError, ValueError) as error:
                assert error is model.wrong  # noqa: PT017 - of both alike
                results.append(torch.rand(()))
        torch.testing.assert_close(*results)
        assert (ours.calls, ours.counts, ours.seen) == (eager.calls, eager.counts, eager.seen)
        assert (ours.mean, ours.replaced) == (eager.mean, eager.replaced)


class Late(nn.Module):
    """Fails on a stand-in in some calls only, after a graph that moves BatchNorm and draws for dropout has run."""

    def __init__(self, p=0.3):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(p)
        self.last = nn.Linear(4, 4)
        self.fails, self.calls, self.sizes = False, 0, []

    def forward(self, x):
        x = self.drop(self.norm(self.first(x)))
        size = torch._shape_as_tensor(x)[1:2]
        torch._dynamo.graph_break()
        self.calls += 1
        self.sizes.append(x.shape[0])
        if self.fails:
            x = x * torch.prod(size)
        return self.last(torch.relu(x))


class Writes(Late):
    """Changes what cannot be put back, before it fails."""

    def __init__(self, write):
        super().__init__()
        self.write, self.plain = write, torch.zeros(4)

    @torch._dynamo.disable
    def written(self, x):
        self.write(self, x)

    def forward(self, x):
        self.written(x)
        return super().forward(x)


@pytest.mark.parametrize(
    "write",
    [
        lambda model, x: model.first.weight.detach().add_(1),
        lambda model, x: x.mul_(2),
        lambda model, x: model.plain.add_(1),
        lambda model, x: model.last(x).sum().backward(),
    ],
)
def test_a_call_that_changed_what_cannot_be_put_back_is_not_repeated(write):
    model = Writes(write)
    hotloop.compile(model, "aot_eager")
    for _ in range(2):
        model(torch.randn(2, 4))
    model.fails, model.calls = True, 0
    with pytest.raises(TypeError, match=r"prod\(\)") as caught:
        model(torch.randn(2, 4))
    assert model.calls == 1
    (note,) = caught.value.__notes__
    assert "the call cannot be repeated: " in note
    assert "HOTLOOP_DISABLE=1" in note
