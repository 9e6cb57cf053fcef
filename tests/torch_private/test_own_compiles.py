"""Compiled functions run as plain Python in a block, but for the operators of torch that compile themselves in eager."""

import threading

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

from hotloop._torch.own_compiles import uncompiled

WIDTH = 4


class Branches(nn.Module):
    """A network whose branches close over their parameters, as everybody writes them."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.other(x), (x,))  # noqa: PLW0108


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()]


def alike(one, other):
    return all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(one, other, strict=True))


def test_a_compiled_function_runs_as_its_python():
    ran = []

    @torch.compile(backend="aot_eager")
    def doubled(x):
        if not torch.compiler.is_compiling():
            ran.append("python")
        return x * 2

    doubled(torch.ones(2))
    assert not ran
    with uncompiled():
        assert doubled(torch.ones(2)).tolist() == [2, 2]
    assert ran == ["python"]
    doubled(torch.ones(2))
    assert ran == ["python"]


def test_the_branches_of_a_condition_keep_their_gradients():
    """``torch.cond`` under ``force_eager`` alone trains nothing, or raises where its input requires a gradient."""
    torch.manual_seed(0)
    model = Branches()
    for x in (torch.ones(2, WIDTH), torch.ones(2, WIDTH, requires_grad=True)):
        right = gradients(model, x)
        with uncompiled():
            assert alike(gradients(model, x), right)
        assert sum(one is not None and bool(one.any()) for one in right) == len(right) // 2


def test_a_compiled_function_around_a_condition_keeps_its_gradients():
    torch.manual_seed(0)
    model = Branches()
    right = gradients(model, torch.ones(2, WIDTH))
    compiled = torch.compile(model, backend="aot_eager")
    with uncompiled():
        assert alike(gradients(compiled, torch.ones(2, WIDTH)), right)


def in_another_thread(run):
    """Run a function in a thread of its own; return what it gave."""
    found = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def runs_compiled():
    ran = []

    @torch.compile(backend="eager")
    def one_more(x):
        if not torch.compiler.is_compiling():
            ran.append("python")
        return x + 1

    one_more(torch.ones(2))
    return not ran


def test_another_thread_goes_on_compiled_and_trains_its_conditions():
    """torch's own setting is the whole process's: a condition trained in another thread lost its gradients meanwhile."""
    torch.manual_seed(0)
    model = Branches()
    right = gradients(model, torch.ones(2, WIDTH))
    assert runs_compiled()
    with uncompiled():
        assert alike(in_another_thread(lambda: gradients(model, torch.ones(2, WIDTH))), right)
        assert in_another_thread(runs_compiled)
        assert not runs_compiled()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_attention_that_the_program_compiles_stays_compiled_unless_asked():
    """Uncompiled it makes a number of each pair of tokens: a long text that trains compiled would not fit in memory."""
    ran = []

    def backend(graph, _):
        return lambda *args: ran.append("compiled") or graph(*args)

    x = torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    attention = torch.compile(flex_attention, backend=backend)
    right = attention(x, x, x)
    assert ran == ["compiled"]
    with uncompiled():
        assert torch.equal(attention(x, x, x), right)
    assert ran == ["compiled"] * 2
    with uncompiled(attention=True):
        torch.testing.assert_close(attention(x, x, x), right)
    assert ran == ["compiled"] * 2
