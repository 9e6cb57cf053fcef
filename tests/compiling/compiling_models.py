"""Toy models, one training run whose every trace can be compared bit by bit, and planted failures."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

import hotloop
from hotloop._torch import backends


class Net(nn.Module):
    """Two layers with a buffer that moves (BatchNorm) and random numbers (dropout)."""

    def __init__(self, width=8, p=0.3):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(p)
        self.last = nn.Linear(width, 8)

    def forward(self, x):
        return self.last(self.drop(self.norm(torch.relu(self.first(x)).sigmoid())))


class Broken(nn.Module):
    """Two such nets with a graph break between: two graphs."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Net(), Net()

    def forward(self, x):
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.two(x)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, d=8, p=0.0):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp, self.drop = (
            nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)),
            nn.Dropout(p),
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.out(torch.softmax(q @ k.mT, -1) @ v))
        return x + self.drop(self.mlp(x))


class Tied(nn.Module):
    """Embedding, nested blocks, a tied head and a buffer."""

    def __init__(self, layers=3, p=0.0, tied=True):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.register_buffer("scale", torch.full((), 0.5))
        self.blocks = nn.ModuleList([Block(8, p) for _ in range(layers)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, target=None):
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if target is None else F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Stack(nn.Module):
    """Blocks of one or more kinds between two layers; ``call`` says how each is called."""

    def __init__(self, *blocks, call=lambda block, x: block(x), end=True):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 8), nn.ModuleList(blocks), nn.Linear(8, 8)
        self.call, self.end = call, end

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x).tanh() if self.end else x


def part(body):
    """A block class whose forward is given."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x, *args, **kwargs):
            return body(self, x, *args, **kwargs)

    return Part


def tokens(batch=2, length=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (batch, length), generator=generator)


def rows(batch=4, width=8, seed=0):
    return torch.randn(batch, width, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Trace:
    """Everything that a training run leaves behind."""

    outputs: list
    gradients: list
    state: dict
    random: torch.Tensor

    def assert_equal(self, other, **tolerance):
        """Bit by bit, or within ``rtol`` and ``atol``; the random position always exactly."""
        check = (lambda a, b: torch.testing.assert_close(a, b, **tolerance)) if tolerance else assert_same
        for mine, its in zip(self.outputs, other.outputs, strict=True):
            check(mine, its)
        for mine, its in zip(self.gradients, other.gradients, strict=True):
            assert mine.keys() == its.keys()
            for name in mine:
                assert (mine[name] is None) == (its[name] is None), name
                if mine[name] is not None:
                    check(mine[name], its[name])
        assert self.state.keys() == other.state.keys()
        for name in self.state:
            check(self.state[name], other.state[name])
        assert torch.equal(self.random, other.random), "the random position differs"


def assert_same(a, b):
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(a, b), (a - b).abs().max()


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def total(output):
    """A scalar of whatever a model returns."""
    if isinstance(output, torch.Tensor):
        return output.square().sum()
    return sum(total(part) for part in (output.values() if isinstance(output, dict) else output))


def train(model, batches, lr=0.1, seed=1):
    """Train a step on each batch (a tensor, or a tuple of arguments), and give the trace."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    torch.manual_seed(seed)
    outputs, grads = [], []
    for batch in batches:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
        loss = total(output)
        loss.backward()
        outputs.append(loss.detach().clone())
        grads.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return Trace(outputs, grads, copy.deepcopy(model.state_dict()), torch.get_rng_state())


def one(model):
    """The status of a model that is one component."""
    (status,) = hotloop.status(model).components.values()
    return status


def against_eager(model, batches, preset="aot_eager", tolerance=None, **settings):
    """Train the model compiled and a copy eager, hold both to be the same, and give the status."""
    reference = train(copy.deepcopy(model), batches)
    hotloop.compile(model, preset, **settings)
    train(model, batches).assert_equal(reference, **(tolerance or {}))
    return one(model)


class Counter:
    """Stands for a compiler and counts what it is asked; ``fail(nth, graph)`` says which graphs it refuses."""

    def __init__(self, fail=lambda nth, graph: False, inner=None, error=None):
        self.calls, self.fail, self.error = 0, fail, error or RuntimeError("planted")
        self.inner = inner or backends.eager

    def __call__(self, graph, inputs):
        self.calls += 1
        if self.fail(self.calls, graph):
            raise self.error
        return self.inner(graph, inputs)


def real_aot_eager():
    return backends.private("torch._dynamo.backends.registry:lookup_backend")("aot_eager")


def aot(forward=None, backward=None):
    """aot_eager whose forward or backward compiler is given; None takes the graph as it is."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def plain(graph, inputs):
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=forward or plain, bw_compiler=backward or plain)


@contextlib.contextmanager
def lowered_anew():
    """Inductor answers no graph from its cache; the same C++ as before is not compiled again."""
    import torch._functorch.config
    import torch._inductor.config

    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@contextlib.contextmanager
def broken_lowering(operator):
    """Inductor fails to lower an operator, and does not answer from its cache."""
    from torch._inductor import lowering

    def bad(*args, **kwargs):
        raise RuntimeError("lowering bug")

    old = lowering.lowerings[operator]
    lowering.lowerings[operator] = bad
    try:
        with lowered_anew():
            yield
    finally:
        lowering.lowerings[operator] = old


def dies_as_kernel(message="kernel died", kind="RuntimeError"):
    """A function that fails when it runs, from a file that is no user's, as a generated kernel does."""
    space = {}
    exec(
        compile(f"def kernel(args):\n    raise {kind}({message!r})\n", "/tmp/torchinductor_x/kernel.py", "exec"), space
    )
    space["kernel"]._boxed_call = True
    return lambda graph, inputs: space["kernel"]
