"""What is compiled leaves no weak reference to a parameter: torch swaps none that has any."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

import hotloop


@pytest.fixture(autouse=True)
def _swaps():
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


def trained(how):
    """Train a model whose weights are loaded, by swapping them, before the tenth step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if how == "compile":
        hotloop.compile(model, "aot_eager")
    if how == "loop":
        loop = hotloop.Loop(model, optimizer, run="aot_eager", total_steps=20)
        step = loop.step(step)
    for number in range(14):
        if number == 10:
            gc.collect()
            assert [weakref.getweakrefcount(one) for one in model.parameters()] == [0] * 4
            if how == "loop":
                assert loop.status().tier == "aot_eager"
            model.load_state_dict({name: one.mul(0.5) for name, one in model.state_dict().items()}, assign=True)
        step(torch.randn(12, 8), torch.arange(12) % 3)
    if how == "compile":
        assert hotloop.status(model).components["model"].state == "compiled"
    return [one.detach() for one in model.parameters()]


@pytest.mark.parametrize("how", ["compile", pytest.param("loop", marks=pytest.mark.campaign)])
def test_parameters_are_swapped_after_a_compiled_step(how):
    torch.testing.assert_close(trained(how), trained("eager"), rtol=1e-5, atol=1e-6)
