"""Tensors on the host in a step on a device: what a capture would read once, for good. The meta device stands for a GPU."""

import numpy as np
import pytest
import torch
from torch import nn

from hotloop._torch.scripted import unscripted
from hotloop.step.audit.op_trace import trace_step
from hotloop.step.state.holdings import Holdings

DEVICE = torch.device("meta")
SCALE = torch.tensor(0.5)
MANY = torch.ones(4)


def observed(body, *inputs):
    model = nn.Linear(4, 4, device=DEVICE)
    _, seen = trace_step(Holdings({"model": model}, {}, ()), DEVICE, list(inputs), lambda: body(model, *inputs))
    return seen


def look(body, *inputs):
    return observed(body, *inputs).obstacles


def on_device():
    return torch.ones(2, 4, device=DEVICE)


@pytest.mark.parametrize(
    "body",
    [
        lambda model, x: model(x) * SCALE,
        lambda model, x: model(x) * (SCALE * 2).exp(),
        lambda model, x: model(x) + MANY.to(DEVICE),
        lambda model, x: torch.where(x > 0, SCALE, x),
        lambda model, x: x.clone().copy_(MANY),
    ],
)
def test_one_from_outside_that_meets_the_device_is_told_with_its_line(body):
    (found,) = look(body, on_device())
    assert found.reason == "a tensor on the host that is no argument meets the device: its value is frozen"
    assert found.hint.startswith("move it to the device")
    assert found.file == __file__
    assert found.line == body.__code__.co_firstlineno


def test_one_that_meets_an_argument_on_the_host_is_told_as_well():
    """In a capture the argument is on the device."""
    (found,) = look(lambda model, x: model((x * MANY).to(DEVICE)), torch.ones(2, 4))
    assert "meets the device" in found.reason


@pytest.mark.parametrize(
    ("body", "held"),
    [
        (lambda model, x: model(x) + torch.arange(4.0).to(DEVICE), True),
        (lambda model, x: model(x) + (torch.arange(4) * 2).to(DEVICE, torch.float32), True),
        (lambda model, x: model(x) + torch.tensor([1.0, 2.0, 3.0, 4.0]).to(DEVICE), True),
        (lambda model, x: model(x).clone().copy_(torch.arange(4.0)), False),
        (lambda model, x: model(x).sum() + torch.ones(1 << 23).to(DEVICE).sum(), False),
    ],
)
def test_one_made_in_the_step_is_kept_by_a_recording_if_it_is_moved_and_small(body, held):
    seen = observed(body, on_device())
    (found,) = seen.constants if held else seen.obstacles
    assert found.reason == "a tensor made on the host is copied to the device"
    assert bool(seen.constants) == held


def scaled(x: torch.Tensor, factor: int):
    return x / torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * factor)


def test_what_torchscript_makes_on_the_host_is_the_steps_own():
    """As DeBERTa scales: what a scripted function makes shows in no dispatch, so its Python is run."""
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(scaled)
    assert look(lambda model, x: scripted(model(x), 3), on_device()) == []
    expected = torch.ones(4) / 12**0.5
    torch.testing.assert_close(scripted(torch.ones(4), 3), expected)
    with unscripted():
        torch.testing.assert_close(scripted(torch.ones(4), factor=3), expected)


@pytest.mark.parametrize("data", [np.ones(40, dtype=np.float32), [1.0] * 40])
def test_an_array_or_a_long_list_is_data_and_no_constant(data):
    seen = observed(lambda model, x: model(x).sum() + torch.tensor(data).to(DEVICE).sum(), on_device())
    (found,) = seen.obstacles
    assert "meets the device: its value is frozen" in found.reason
    assert seen.constants == []


@pytest.mark.parametrize(("number", "held"), [(4, True), (36, False)])
def test_python_numbers_are_copied_and_a_recording_makes_few_of_them_on_the_device(number, held):
    """torch hides the copy, which waits for the device, and shows what it has made; on the meta device it copies none."""

    def tensor(numbers, device):
        return torch.ops.aten.lift_fresh(torch.empty(len(numbers), device=device))

    seen = observed(lambda model, x: model(x).sum() + tensor([1.0] * number, DEVICE).sum(), on_device())
    (found,) = seen.constants if held else seen.obstacles
    assert found.reason == "Python numbers are copied to the device: torch.tensor(..., device=...)"
    assert not (seen.obstacles if held else seen.constants)


def nothing(device):
    """What ``torch.tensor([], device=...)`` shows of itself: transformers begins each cache of keys and values with it."""
    return torch.ops.aten.lift_fresh(torch.empty(0, device=device))


@pytest.mark.parametrize(
    ("body", "given"),
    [
        (lambda model, x: torch.cat([nothing(DEVICE), model(x).flatten()]), on_device()),
        (lambda model, x: torch.cat([torch.empty(0).to(DEVICE), model(x).flatten()]), on_device()),
        (lambda model, x: model(x.to(DEVICE)), torch.ones(2, 4)),
        (lambda model, x: model((x.float() * 2).to(DEVICE)), torch.ones(2, 4)),
        (lambda model, x: model(x) * torch.tensor(0.5), on_device()),
        (lambda model, x: model(x) * torch.tensor(0.5).exp(), on_device()),
        (lambda model, x: (model(x), MANY * 2)[0], on_device()),
    ],
)
def test_arguments_constants_and_what_stays_on_the_host_are_no_obstacle(body, given):
    assert look(body, given) == []


def test_an_optimizer_may_keep_its_counts_on_the_host():
    model = nn.Linear(4, 4, device=DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.25), foreach=False)

    def step():
        model(on_device()).sum().backward()
        optimizer.step()

    step()
    _, seen = trace_step(Holdings({"model": model}, {"optimizer": optimizer}, ()), DEVICE, [], step)
    assert seen.obstacles == []


def test_on_the_cpu_nothing_is_elsewhere():
    model = nn.Linear(4, 4)
    _, seen = trace_step(
        Holdings({"model": model}, {}, ()), torch.device("cpu"), [], lambda: model(torch.ones(2, 4)) * SCALE
    )
    assert seen.obstacles == []
