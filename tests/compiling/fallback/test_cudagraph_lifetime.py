"""What leaves a CUDA graph may be held: copies at the boundary, steps that are marked, and their counters."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop._torch.settings import captures
from hotloop.compiling.fallback.step_marks import copied_together
from hotloop.testing import cudagraph_emulation

PRESET = "reduce-overhead"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


def x(seed):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def emulation():
    with cudagraph_emulation() as running:
        yield running


def both(make=Net, **settings):
    """Give a model compiled under CUDA graphs, and its eager twin."""
    model = make()
    twin = copy.deepcopy(model)
    return hotloop.compile(model, PRESET, **settings), twin


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def grads(model):
    return [parameter.grad for parameter in model.parameters()]


@dataclasses.dataclass
class Opaque:
    """What no one can look into by its type."""

    def __init__(self, scores):
        self.__dict__["_scores"] = scores

    def scores(self):
        return self._scores


def test_outputs_are_safe_that_are_stored_on_the_module_or_inside_any_object(emulation):
    class Remembers(Net):
        def forward(self, x):
            self.last = super().forward(x)
            return Opaque(self.last * 2)

    model, twin = both(Remembers)
    with torch.no_grad():
        kept = [(model(x(seed)).scores(), model.last, twin(x(seed)).scores(), twin.last) for seed in range(3)]
    assert all(torch.equal(a, c) and torch.equal(b, d) for a, b, c, d in kept)
    assert emulation.overwritten == []


def test_an_output_that_is_an_input_or_a_view_of_one_stays_one(emulation):
    class Rows(Net):
        def forward(self, x):
            return x, x[1:], self.one.weight, super().forward(x)

    model, _ = both(Rows)
    for _ in range(2):  # the second call uses what the first one found out
        given = x(0)
        with torch.no_grad():
            out, rows, weight, new = model(given)
        assert out is given or out.data_ptr() == given.data_ptr()
        assert rows.data_ptr() == given[1:].data_ptr()
        assert weight.data_ptr() == model.one.weight.data_ptr()
    assert hotloop.status(model).components["model"].outputs_copied == 2


def test_copies_stay_in_the_autograd_graph_and_keep_shape_and_strides():
    tensors = [torch.randn(3, 4, requires_grad=True).t() * 2, torch.randn(5)[::2], torch.arange(3)]
    copies = copied_together(tensors)
    for one, other in zip(copies, tensors, strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    assert copies[0].stride() == tensors[0].stride()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_compiled_module_that_a_backward_enters_again_is_right_and_counted(emulation, reentrant):
    model, twin = both()
    for seed in range(3):
        for each in (model, twin):
            given = x(seed).requires_grad_()
            checkpoint(each, checkpoint(each, given, use_reentrant=reentrant), use_reentrant=reentrant).sum().backward()
    assert same(grads(model), grads(twin))
    training = hotloop.status(model).components["model"].modes["training"]
    assert training["calls_in_backward"] == 2 * 3


def test_a_backward_that_keeps_its_graph_runs_outside_of_cuda_graphs_and_is_told(emulation):
    model, twin = both()
    for seed in range(3):
        for each in (model, twin):
            loss = each(x(seed)).square().sum()
            loss.backward(retain_graph=True)
            runs = emulation.runs
            loss.backward(retain_graph=True)
            assert emulation.runs == runs  # no graph of the emulation's ran
            loss.backward()
        assert same(grads(model), grads(twin))
        for each in (model, twin):
            each.zero_grad()
        del loss
    (reason,) = hotloop.status(model).components["model"].cudagraphs_skipped
    assert "retain_graph=True" in reason
    assert captures()
    assert emulation.overwritten == []
