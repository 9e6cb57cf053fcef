"""Where dynamo hands the program another value than torch does, and the program fails on it, eager has the last word."""

from __future__ import annotations

import copy
import random
import signal
import sys

import numpy as np
import pytest
import torch
from torch import nn

import hotloop
from hotloop.compiling.control import call


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


def test_a_call_of_which_a_graph_has_run_is_not_repeated():
    class Late(Sized):
        def forward(self, x):
            return super().forward(self.net(x))

    model = Late()
    hotloop.compile(model, preset="aot_eager")
    with pytest.raises(TypeError, match=r"prod\(\)"):
        model(torch.randn(2, 3, 4, 5))
    assert model.calls == 1


def test_what_failed_on_a_stand_in_in_training_runs_eagerly_without_gradients_too():
    """There, another size would be a graph of sizes that has run by then, after which nothing is repeated."""
    model, x = Sized(), torch.randn(2, 3, 4, 5)
    hotloop.compile(model, preset="aot_eager")
    model(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x[..., :3]), model.net(x[..., :3]) * 12)


def test_a_module_whose_buffers_have_no_values_yet_is_called_as_eager():
    model = nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 2))
    hotloop.compile(model, "aot_eager")
    assert model(torch.randn(3, 4)).shape == (3, 2)


@pytest.mark.parametrize(
    "error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_without_memory_for_copies_of_the_buffers_the_call_goes_on(monkeypatch, error):
    def full(self, module):
        raise error

    monkeypatch.setattr(call.Before, "__init__", full)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    hotloop.compile(model, "aot_eager")
    assert model(torch.randn(3, 4)).shape == (3, 2)
    assert hotloop.status(model).components["model"].compiles == 1


@pytest.fixture
def traced():
    """Run a function, with an interrupt at its nth bytecode in ours; return whether it was raised."""
    own = signal.getsignal(signal.SIGUSR1)

    def interrupt(*_):
        raise KeyboardInterrupt

    def run(function, at):
        bytecodes = 0

        def trace(frame, event, _argument):
            nonlocal bytecodes
            if "hotloop" not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                bytecodes += 1
                if bytecodes == at:
                    signal.raise_signal(signal.SIGUSR1)
            return trace

        signal.signal(signal.SIGUSR1, interrupt)
        sys.settrace(trace)
        try:
            function()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    yield run
    signal.signal(signal.SIGUSR1, own)


def test_an_interrupt_while_a_call_is_put_back_waits_until_it_is(traced):
    def whole(model):
        return model.calls, model.seen == [1], model.mean.item(), torch.get_rng_state().sum().item()

    model, at, raised = Tracks(wrong=False), 0, True
    model.seen.append(1)
    while raised:
        at += 1
        before, first = call.Before(model), whole(model)
        model.calls, model.seen, _ = 7, [], model.mean.add_(1)
        torch.rand(3)
        second = whole(model)
        raised = traced(before.restore, at)
        assert whole(model) in (first, second)
        before.restore()
    assert at > 300
