"""Tensors on the host in a step on a device: what a capture would read once, for good. The meta device stands for a GPU."""

import copy
import pickle
import warnings

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


def filled(write):
    """Return the body of a step that writes into a tensor of its own on the host, and moves it to the device."""

    def body(model, x):
        table = torch.zeros(4)
        write(table)
        return model(x) + table.to(DEVICE)

    return body


@pytest.mark.parametrize(
    "write",
    [
        lambda table: table.__setitem__(1, SCALE),
        lambda table: table.__setitem__(slice(None), MANY),
        lambda table: table.__setitem__([0, 1], MANY[:2]),
        lambda table: table.add_(MANY),
        lambda table: table.copy_(MANY),
        lambda table: table.fill_(SCALE),
        lambda table: table.masked_fill_(torch.ones(4, dtype=torch.bool), SCALE),
        lambda table: table.index_add_(0, torch.arange(4), MANY),
        lambda table: torch.mul(MANY, 2, out=table),
        lambda table: table.set_(MANY),
    ],
)
def test_data_written_into_a_tensor_of_the_steps_own_is_no_constant(write):
    seen = observed(filled(write), on_device())
    assert seen.constants == []
    assert "meets the device: its value is frozen" in seen.obstacles[0].reason


def test_numbers_written_into_a_tensor_of_the_steps_own_are_constants():
    seen = observed(filled(lambda table: table[1:].fill_(0.5).mul_(3)), on_device())
    assert (len(seen.constants), seen.obstacles) == (1, [])


@pytest.mark.parametrize(
    "body",
    [
        lambda: torch.tensor([SCALE, SCALE]),
        lambda: torch.as_tensor([[SCALE], [SCALE]]),
        lambda: torch.ones(2).new_tensor([*MANY]),
        lambda: torch.tensor(MANY.tolist()),
        lambda: torch.tensor((MANY * 2).numpy()),
    ],
)
def test_a_constant_of_values_that_are_read_from_outside_is_another_operation_once_they_change(body):
    """No operation shows such a read: what was made of it does."""

    def step(model, x):
        return model(x).sum() + body().to(DEVICE).sum()

    model, x = nn.Linear(4, 4, device=DEVICE), on_device()
    holdings = Holdings({"model": model}, {}, ())

    def lines():
        return trace_step(holdings, DEVICE, [x], lambda: step(model, x))[1].stream

    before = lines()
    assert lines() == before
    for one in (SCALE, MANY):
        one.add_(1)
    try:
        assert lines() != before
    finally:
        for one in (SCALE, MANY):
            one.sub_(1)


@pytest.mark.parametrize("size", [4, 1000])
@pytest.mark.parametrize("come", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_data_that_comes_where_a_constant_was_is_none(size, come):
    """Whose memory was let go would give it to the next, which no operation shows."""
    data = torch.ones(size)

    def body(model, x):
        for _ in range(20):
            torch.zeros(size).add_(1)
        return model(x).sum() + come(data).to(DEVICE).sum()

    seen = observed(body, on_device())
    assert seen.constants == []
    assert "meets the device: its value is frozen" in seen.obstacles[0].reason


def test_a_tensor_that_requires_a_gradient_is_no_constant():
    (found,) = look(lambda model, x: model(x) + torch.ones(4, requires_grad=True).to(DEVICE), on_device())
    assert found.reason == "a tensor made on the host is copied to the device"


def scaled(x: torch.Tensor, factor: torch.Tensor):
    return x / (torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float)) * factor)


def scripted(how, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and tracing tells of its constants
        return getattr(torch.jit, how)(*args)


@pytest.mark.parametrize(
    ("how", "factor", "known"),
    [
        ("script", lambda: torch.tensor(3.0), True),
        ("script", lambda: SCALE, False),
        ("trace", lambda: torch.tensor(3.0), False),
    ],
)
def test_what_torchscript_makes_on_the_host_is_the_steps_own(how, factor, known):
    """As DeBERTa scales: what a scripted function makes shows in no dispatch. A traced one may hold anybody's tensors."""
    function = scripted(how, scaled, *([(torch.ones(2, 4), torch.ones(()))] if how == "trace" else []))
    found = look(lambda model, x: function(model(x), factor()), on_device())
    assert (found == []) == known
    expected = torch.ones(4) / 36**0.5
    torch.testing.assert_close(function(torch.ones(4), torch.tensor(3.0)), expected)
    with unscripted():
        torch.testing.assert_close(function(torch.ones(4), factor=torch.tensor(3.0)), expected)


def ways(x: torch.Tensor):
    return x * 2.0 if torch.jit.is_scripting() else x * 3.0


def test_only_a_recording_runs_the_python_of_a_scripted_function():
    """The step that is audited is the program's own."""
    function, results = scripted("script", ways), []
    observed(lambda model, x: results.append(function(torch.ones(2))) or model(x), on_device())
    assert results[0].tolist() == [2.0, 2.0]
    with unscripted():
        assert function(torch.ones(2)).tolist() == [3.0, 3.0]


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
