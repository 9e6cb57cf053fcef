"""Batches of several sizes: a short last batch never takes the full batches to slower, dynamic code."""

import pytest
import torch
from compiling_models import one, rows, train
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop._torch import backends


class Graphs:
    """A compiler that notes for which size each graph was made (None: any), and what sizes ran on it."""

    def __init__(self):
        self.made, self.ran = [], []

    def __call__(self, graph, inputs):
        sizes = [one.shape[0] for one in inputs if isinstance(one, torch.Tensor) and not isinstance(one, nn.Parameter)]
        dynamic = any(isinstance(one, torch.SymInt) for one in (*inputs, *sizes))
        number = len(self.made)
        self.made.append(None if dynamic else sizes[-1])
        run = backends.eager(graph, inputs)

        def noting(*args):
            sized = [arg.shape[0] for arg in args if isinstance(arg, torch.Tensor) and not arg.requires_grad]
            self.ran.append((number, sized[-1]))
            return run(*args)

        return noting


@pytest.fixture
def graphs(monkeypatch):
    found = Graphs()
    monkeypatch.setattr(backends, "aot_eager", lambda: found)
    return found


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).relu()


def test_a_short_last_batch_leaves_the_full_ones_on_their_static_graph(graphs):
    model = hotloop.compile(Plain(), "aot_eager")
    train(model, [rows(size, seed=seed) for seed, size in enumerate((32, 32, 7, 32, 32, 7, 32))])
    assert graphs.made == [32, 7]
    assert [number for number, size in graphs.ran if size == 32] == [0] * 5
    assert (one(model).compiles, one(model).recompiles) == (2, 1)


def test_further_sizes_share_one_graph_for_any_size(graphs):
    model = hotloop.compile(Plain(), "aot_eager")
    train(model, [rows(size, seed=size) for size in (32, 7, 9, 11, 13, 32, 7)])
    assert graphs.made == [32, 7, None]
    assert graphs.ran[-2:] == [(0, 32), (1, 7)]


def test_another_size_is_told_as_the_recompile_that_it_is():
    model = hotloop.compile(Plain(), "aot_eager")
    with hotloop.watch() as events:
        train(model, [rows(size) for size in (32, 7, 9)])
    found = [event.reason for event in events if isinstance(event, ev.Recompiled)]
    assert [reason.partition(". ")[2] for reason in found] == ["expected 32, actual 7", "expected 32 or 7, actual 9"]
