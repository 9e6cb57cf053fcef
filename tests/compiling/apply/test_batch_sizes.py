"""Batches of several sizes: a short last batch never takes the full batches to slower, dynamic code."""

import pytest
import torch
from compiling_models import Net, against_eager, one, rows, train
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


def test_lengths_that_vary_go_dynamic_as_torch_does(graphs):
    model = hotloop.compile(Plain(), "aot_eager")
    for length in (16, 24, 20, 18):
        model(torch.randn(4, length, 8))
    assert graphs.made == [4, None]


def test_the_second_trial_finds_the_code_of_both_sizes(graphs):
    for _ in range(2):
        model = hotloop.compile(Plain(), "aot_eager")
        train(model, [rows(size) for size in (32, 7, 32)])
    assert graphs.made == [32, 7]
    assert one(model).compiles == 0


def test_another_size_is_told_as_the_recompile_that_it_is():
    model = hotloop.compile(Plain(), "aot_eager")
    with hotloop.watch() as events:
        train(model, [rows(size) for size in (32, 7, 9)])
    found = [event.reason for event in events if isinstance(event, ev.Recompiled)]
    assert [reason.partition(". ")[2] for reason in found] == ["expected 32, actual 7", "expected 32 or 7, actual 9"]


@pytest.mark.parametrize("dynamic", [True, False])
def test_who_decided_on_dynamic_shapes_gets_them(graphs, dynamic):
    model = hotloop.compile(Plain(), "aot_eager", dynamic=dynamic)
    train(model, [rows(size) for size in (32, 7, 9, 32)])
    assert graphs.made == ([None] if dynamic else [32, 7, 9])


def test_all_sizes_train_as_eager_does():
    sizes = (8, 3, 8, 5, 6)
    status = against_eager(Net(), [rows(size, seed=seed) for seed, size in enumerate(sizes)])
    assert (status.state, status.compiles) == ("compiled", 3)
