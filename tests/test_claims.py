"""What ``docs/evidence/claims.md`` says of torch.compile, where it is no matter of time: held against the torch that is there."""

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiles(sizes, dim=0, marked=False, **settings):
    """Give how often torch compiles a layer whose input has these sizes in one dimension."""
    torch.compiler.reset()
    counter = CompileCounter()
    layer = torch.compile(nn.Linear(4, 4), backend=counter, **settings)
    for number, size in enumerate(sizes):
        shape = [8, 8, 4]
        shape[dim] = size
        x = torch.randn(shape)
        if marked and number == 0:
            torch._dynamo.mark_dynamic(x, dim)
        layer(x)
    return counter.frame_count


LENGTHS = (20, 21, 35, 22, 50, 1, 36, 37, 38, 39, 40)


def test_how_often_varying_sizes_compile():
    assert compiles((32, 32, 7, 32)) == 2
    assert compiles(LENGTHS, 1) == 3  # the first, any, and 1
    assert compiles(LENGTHS, 1, dynamic=True) == 2  # any, and 1
    assert compiles(LENGTHS, 1, marked=True) == 2
    assert compiles(LENGTHS, 1, dynamic=False) == 8, "at torch's limit the others run eager"


def test_a_marked_size_that_the_code_fixes_fails():
    x = torch.randn(4, 20, 4)
    torch._dynamo.mark_dynamic(x, 1)
    with pytest.raises(Exception, match=r"marked .* as dynamic but your code specialized it"):
        torch.compile(lambda x: x.reshape(4, 20, 4) * 1, backend="eager")(x)


def test_explain_throws_away_what_was_compiled():
    counter = CompileCounter()
    mine = torch.compile(nn.Linear(4, 4), backend=counter)
    mine(torch.randn(2, 4))
    torch._dynamo.explain(nn.Linear(4, 4))(torch.randn(2, 4))
    mine(torch.randn(2, 4))
    assert counter.frame_count == 2


def test_suppress_errors_does_not_catch_a_backward_that_fails_to_compile():
    def fails(_graph, _inputs):
        raise RuntimeError("no backward")

    backend = aot_autograd(fw_compiler=lambda graph, _: graph.forward, bw_compiler=fails)
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(RuntimeError, match="no backward"):
        torch.compile(nn.Linear(4, 4), backend=backend)(torch.randn(2, 4)).sum().backward()


def test_code_with_breaks_is_reused_under_fullgraph():
    def breaks(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(breaks, backend="eager")(torch.ones(2))
    torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(2))
    torch.compiler.reset()
    with pytest.raises(Exception, match=r"graph_break|graph break"):
        torch.compile(breaks, backend="eager", fullgraph=True)(torch.ones(2))


@pytest.mark.parametrize(("rate", "expected"), [(1e-3, [2, 3, 4]), (torch.tensor(1e-3), [1, 2, 3])])
def test_a_compiled_optimizer_compiles_once_more_for_a_second_rate_and_for_each_new_optimizer(rate, expected):
    counter, found = CompileCounter(), []
    for _ in range(3):
        parameters = [nn.Parameter(torch.randn(4)) for _ in range(3)]
        for one in parameters:
            one.grad = torch.randn(4)
        optimizer = torch.optim.AdamW(parameters, lr=rate * 1)
        step = torch.compile(optimizer.step, backend=counter)
        for _ in range(4):
            step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        found.append(counter.frame_count)
    assert found == expected
