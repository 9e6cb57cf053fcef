"""Small programs for `hotloop.verify`, and compilers that are wrong in one operation, so that eager stays right."""

from __future__ import annotations

import contextlib
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop._torch import backends


class Block(nn.Module):
    """A residual MLP; where a kind asks for it, with gelu instead of tanh."""

    def __init__(self, width, *, gelu):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act = nn.GELU() if gelu else nn.Tanh()

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, some of them with gelu, then BatchNorm, dropout and a head."""

    def __init__(self, *, gelus=(1,), dropout=0.0, width=16, blocks=2):
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width, gelu=number in gelus) for number in range(blocks))
        self.norm, self.drop = nn.BatchNorm1d(width), nn.Dropout(dropout)
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.drop(self.norm(x)))


def batches(count=6, size=32):
    draws = torch.Generator().manual_seed(1)
    return [(torch.randn(size, 16, generator=draws), torch.randint(5, (size,), generator=draws)) for _ in range(count)]


def workload(model=None, *, autocast=None, optimizer=None, data=None, **settings):
    torch.manual_seed(0)
    model = model if model is not None else Net(**settings)
    optimizer = optimizer(model.parameters()) if optimizer else torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(x, y):
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return hotloop.Workload(model, optimizer, step, batches() if data is None else data)


@contextlib.contextmanager
def wrong(operation="aten.gelu_backward", factor=1.00001, add=0.0, *, alone=None):
    """Make aot_eager compile one operation wrongly: its result, or the first of them, is too large by a factor.

    ``alone`` says what happens to a graph that is GELU and nothing else: ``"compile"`` fails, or it fails when it
    is ``"run"``.
    """
    from torch._dynamo.backends.common import aot_autograd

    planted = []

    def spoiled(graph, inputs):
        refused = alone if _only_gelu(graph) else None
        if refused == "compile":
            raise RuntimeError("not alone")
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and str(getattr(node.target, "overloadpacket", "")) == operation:
                planted.append(node)
                _spoil(graph.graph, node, factor, add)
        graph.recompile()

        def run(args):
            if refused == "run":
                raise RuntimeError("not alone")
            return graph.forward(*args)

        run._boxed_call = True
        return run

    compiler = aot_autograd(fw_compiler=spoiled, bw_compiler=spoiled, inference_compiler=spoiled)
    with mock.patch.object(backends, "aot_eager", return_value=compiler):
        yield planted


def _only_gelu(graph):
    called = {str(getattr(node.target, "overloadpacket", "")) for node in graph.graph.nodes if node.op != "output"}
    return bool(called - {""}) and called - {""} <= {"aten.gelu", "aten.gelu_backward"}


def _spoil(graph, node, factor, add):
    import operator

    users = list(node.users)
    if users and all(one.target is operator.getitem for one in users):  # an operation with several results: the first
        for one in users:
            if one.args[1] == 0:
                _spoil(graph, one, factor, add)
        return
    with graph.inserting_after(node):
        scaled = graph.call_function(torch.ops.aten.mul.Scalar, (node, factor))
    last = scaled
    if add:
        with graph.inserting_after(scaled):
            last = graph.call_function(torch.ops.aten.add.Scalar, (scaled, add))
    node.replace_all_uses_with(last, delete_user_cb=lambda user: user is not scaled)
