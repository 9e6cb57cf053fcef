"""Programs under the sentinel, and compiled code and recordings that go wrong while a run is on."""

from __future__ import annotations

import contextlib
import math
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as ev
from hotloop._torch import backends
from hotloop.step.loop import deciding
from hotloop.step.prove import schedule
from hotloop.testing import captured


class Net(nn.Module):
    """A block with gelu, BatchNorm and dropout."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.first, self.act, self.norm = nn.Linear(8, 12), nn.GELU(), nn.BatchNorm1d(12)
        self.drop, self.last = nn.Dropout(dropout), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.act(self.first(x)))))


def batches(steps, size=16):
    draws = torch.Generator().manual_seed(3)
    return [(torch.randn(size, 8, generator=draws), torch.randint(3, (size,), generator=draws)) for _ in range(steps)]


class Fault:
    """What is wrong: a factor, 1 until it is set. A tensor, so that recordings see it as well."""

    def __init__(self):
        self.factor = torch.ones(())
        self.fails = None

    def set(self, factor):
        self.factor.fill_(factor)


@contextlib.contextmanager
def faulty(operation="aten.gelu_backward"):
    """Have aot_eager multiply the result of one operation by a fault's factor, from the step on that sets it."""
    from torch._dynamo.backends.common import aot_autograd

    fault = Fault()

    def compiler(graph, inputs):
        names = [
            node.name
            for node in graph.graph.nodes
            if node.op == "call_function" and str(getattr(node.target, "overloadpacket", "")) == operation
        ]

        class Wrong(torch.fx.Interpreter):
            def run_node(self, node):
                result = super().run_node(node)
                if node.name not in names:
                    return result
                if isinstance(result, tuple):
                    return (result[0] * fault.factor.to(result[0].dtype), *result[1:])
                return result * fault.factor.to(result.dtype)

        def run(args):
            given = list(args)
            args.clear()
            if fault.fails is not None:
                raise fault.fails
            return Wrong(graph).run(*given) if names else graph.forward(*given)

        run._boxed_call = True
        return run

    made = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, inference_compiler=compiler)
    with mock.patch.object(backends, "aot_eager", return_value=made):
        yield fault


class Stale(captured.Tape):
    """A tape whose replays go wrong by a factor in one gradient, as a recording does whose memory was given away."""

    factor = 1.0

    def replay(self):
        super().replay()
        if type(self).factor != 1.0:
            with torch.no_grad():
                for operation, args, _, _ in self._operations:
                    if str(operation.overloadpacket).startswith("aten._fused_adamw_"):
                        args[0][0].add_(type(self).factor - 1.0)


class Jitter:
    """How much a kernel that is not deterministic differs from run to run, and what it differs by."""

    size, draws = 0.0, torch.Generator()


@torch.library.custom_op("hotloop_tests::jittered", mutates_args=())
def jittered(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + Jitter.size * torch.randn(x.shape, generator=Jitter.draws))


@contextlib.contextmanager
def checked_every(steps):
    """Have every so many steps checked, whatever that costs, and values compared after each look at operations."""

    def planned(self, seconds, _usual, **_):
        self.spent += seconds
        self._left, self._doubling, self.every = steps, math.inf, steps

    with (
        mock.patch.object(schedule.Schedule, "checked", planned),
        mock.patch.object(schedule, "FIRST", steps),
        mock.patch.object(deciding, "VALUES_EVERY", 1),
    ):
        yield


class Run:
    """One training run; its steps may be told to do something before a step."""

    def __init__(self, run, steps, *, autocast=None, before=None, dropout=0.1, size=16, noisy=False, **settings):
        torch.manual_seed(0)
        self.model = Net(dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2**-7, fused=True)
        model, optimizer = self.model, self.optimizer
        if noisy:
            model.first.weight.register_hook(jittered)

        def train_step(x, y):
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        self.loop = hotloop.Loop(model, optimizer, run=run, **settings) if run is not None else None
        step = self.loop.step(train_step) if self.loop is not None else train_step
        self.losses = []
        with hotloop.watch() as self.events:
            for number, (x, y) in enumerate(batches(steps, size)):
                if before is not None:
                    before(number)
                self.losses.append(step(x, y).detach())

    def told(self, kind=ev.SentinelDisagreed):
        return [one for one in self.events if isinstance(one, kind) and getattr(one, "certain", True)]

    @property
    def watched(self):
        return self.loop.status().sentinels[0]

    def left(self):
        state = [one for entry in self.optimizer.state.values() for one in entry.values()]
        return [*self.losses, *self.model.state_dict().values(), *state, torch.get_rng_state()]
