"""Parts of a model that no code of a step names: what changes there between steps is none of the recording's."""

from __future__ import annotations

import abc
import builtins
import contextlib
import gc
import pathlib
import sys
import types
import weakref

import pytest
import torch
from step_programs import GRAPH
from torch import nn

import hotloop
from hotloop.testing import captured_step_emulation

PART = "part"


class Metric(nn.Module):
    """Counts between steps, in an attribute and in a tensor that takes the place of another, as torchmetrics' do."""

    def __init__(self):
        super().__init__()
        self.calls, self.scale, self.total = 0, 1.0, torch.zeros(())

    def forward(self, outputs):
        self.calls, self.total = self.calls + 1, self.total + outputs.detach().mean()
        return outputs * self.scale


class Model(nn.Module, abc.ABC):
    def __init__(self):
        super().__init__()
        self.net, self.part, self.names = nn.Linear(6, 3), Metric(), [PART]

    def forward(self, inputs):
        return self.net(inputs)

    def validate(self, inputs):
        return self.part(self(inputs))


def scaled(outputs, part):
    return outputs * part.scale


def train(step_of, between, asked, steps=12):
    """Give the losses of a run, between whose steps the model is changed, and its loop."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = hotloop.Loop(model, optimizer, run=asked)
    outputs_of = step_of(model)

    @loop.step
    def step(inputs, targets):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(outputs_of(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    losses = []
    for index in range(steps):
        torch.manual_seed(index)
        losses.append(step(torch.randn(4, 6), torch.randn(4, 3)).item())
        between(model, index)
    return losses, loop


def plainly(model):
    return model


def test_a_metric_of_the_validation_leaves_the_recording_in_force():
    def validates(model, index):
        if index % 5 == 4:
            with torch.no_grad():
                model.validate(torch.randn(4, 6))
            model.part.scale = float(index)

    with captured_step_emulation():
        losses, loop = train(plainly, validates, GRAPH, steps=80)
    assert losses == train(plainly, validates, "eager", steps=80)[0]
    tiers = {tier.name: tier for tier in loop.status().tiers}
    assert loop.status().tier == GRAPH
    assert not tiers[GRAPH].why
    assert loop.record.document["steps"][-1]["running"] == GRAPH
    assert "recorded anew" not in str(loop.status())


def named(model):
    return lambda inputs: scaled(model(inputs), model.part)


def closed_over(model):
    part = model.part
    return lambda inputs: scaled(model(inputs), part)


def inside_what_is_closed_over(model):
    parts = {"first": [model.part]}
    return lambda inputs: scaled(model(inputs), parts["first"][0])


def among_the_children(model):
    return lambda inputs: scaled(model(inputs), list(model.children())[1])


def among_the_modules(model):
    return lambda inputs: scaled(model(inputs), next(one for one in model.modules() if isinstance(one, Metric)))


def by_a_name_that_is_kept(model):
    return lambda inputs: scaled(model(inputs), getattr(model, model.names[0]))


def by_a_name_that_is_made(model):
    return lambda inputs: scaled(model(inputs), getattr(model, "".join(reversed("trap"))))


def as_a_submodule(model):
    return lambda inputs: scaled(model(inputs), model.get_submodule(PART))


def of_the_table(model):
    return lambda inputs: scaled(model(inputs), model._modules["".join(reversed("trap"))])


def of_the_attributes(model):
    return lambda inputs: scaled(model(inputs), vars(model)["_modules"][model.names[0]])


def by_a_hook(model):
    part = model.part
    model.register_forward_hook(lambda _module, _inputs, outputs: scaled(outputs, part))
    return plainly(model)


def by_a_method_of_the_model(model):
    model.net.register_forward_hook(lambda _module, inputs, outputs: scaled(outputs, model.part))
    return model.forward


def of_library(function):
    """Give a function as if a library had it, whose code is not read."""
    file = str(pathlib.Path(torch.__file__).parent / "library.py")
    return types.FunctionType(function.__code__.replace(co_filename=file), {**vars(builtins), "__name__": "torch"})


def by_a_library(model):
    def scaled_of(model, outputs):
        return outputs * model.part.scale

    scales = of_library(scaled_of)
    return lambda inputs: scales(model, model(inputs))


def by_a_library_that_goes_through_all(model):
    def scaled_of(model, outputs):
        for one in model.modules():
            outputs = outputs * getattr(one, "scale", 1.0)
        return outputs

    scales = of_library(scaled_of)
    return lambda inputs: scales(model, model(inputs))


class Scales(Metric):
    def forward(self, outputs):
        return outputs * self.scale


def called_by_a_library(model):
    model.part = Scales()
    calls = [of_library(lambda parts, outputs: parts[0](outputs))]
    held = {id(model.part): model.part}
    return lambda inputs: calls[0](list(held.values()), model(inputs))


def by_code_that_is_made(model):
    names = {"model": model}
    exec("def scaled(outputs): return outputs * model.part.scale", names)
    return lambda inputs: names["scaled"](model(inputs))


def by_another_name_of_getattr(model):
    get = getattr
    return lambda inputs: scaled(model(inputs), get(model, "".join(reversed("trap"))))


class Renames(Model):
    others = {"head": PART}

    def __getattr__(self, name):
        return super().__getattr__(self.others.get(name, name))

    def forward(self, inputs):
        return scaled(self.net(inputs), self.head)


def by_a_getattr_of_the_model(model):
    model.__class__ = Renames
    return model


WAYS = [
    named,
    closed_over,
    inside_what_is_closed_over,
    among_the_children,
    among_the_modules,
    by_a_name_that_is_kept,
    by_a_name_that_is_made,
    as_a_submodule,
    of_the_table,
    of_the_attributes,
    by_a_hook,
    by_a_method_of_the_model,
    by_a_library,
    by_a_library_that_goes_through_all,
    called_by_a_library,
    by_code_that_is_made,
    by_another_name_of_getattr,
    by_a_getattr_of_the_model,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_part_that_the_step_reads_in_any_way_is_in_force_in_the_very_next_step(way):
    def scales(model, index):
        if index == 8:
            model.part.scale = 0.25

    with captured_step_emulation():
        losses, loop = train(way, scales, GRAPH)
    assert losses == train(way, scales, "eager")[0]
    assert loop.record.document["steps"][8]["running"] == GRAPH


@contextlib.contextmanager
def listeners_place_taken():
    """A profiler of the user's: up to Python 3.11 there is one place for one, from 3.12 on there are two tools."""
    if sys.version_info < (3, 12):
        sys.setprofile(lambda *_: None)
        try:
            yield
        finally:
            sys.setprofile(None)
        return
    for tool in (3, 4):
        sys.monitoring.use_tool_id(tool, "theirs")
    try:
        yield
    finally:
        for tool in (3, 4):
            sys.monitoring.free_tool_id(tool)


def test_where_nobody_can_listen_all_parts_are_looked_at():
    def scales(model, index):
        if index == 8:
            model.part.scale = 0.25

    with captured_step_emulation(), listeners_place_taken():
        losses, _ = train(by_a_library, scales, GRAPH)
    assert losses == train(by_a_library, scales, "eager")[0]


def test_a_part_that_is_replaced_is_not_kept():
    gone = []

    def replaces(model, index):
        if index == 8:
            gone.append(weakref.ref(model.part))
            model.part = Metric()

    with captured_step_emulation():
        losses, loop = train(named, replaces, GRAPH, steps=24)
        assert losses == train(named, replaces, "eager", steps=24)[0]
        assert loop.status().tier == GRAPH
        gc.collect()
        assert gone[0]() is None


def test_a_step_that_moves_a_part_through_a_library_is_declined():
    """What a library does in a step is not read: that the part moved is seen."""

    def move(model):
        for one in model.modules():
            if hasattr(one, "calls"):
                one.calls += 1

    moves = of_library(move)

    def step_of(model):
        def outputs_of(inputs):
            moves(model)
            return model(inputs)

        return outputs_of

    with captured_step_emulation():
        losses, loop = train(step_of, lambda *_: None, GRAPH)
    assert losses == train(step_of, lambda *_: None, "eager")[0]
    why = {tier.name: tier.why for tier in loop.status().tiers}[GRAPH]
    assert "the step changes Python state: model.part.calls" in why
