"""Remedies for what a step is handed, reads, returns and notes: each is followed, and the step then captured."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from step_programs import Both, engines
from step_remedies import OFTEN, STEPS, check, rows, trained
from torch import nn
from torch.nn import functional as F


@pytest.fixture
def cpu():
    with engines("cpu"):
        yield Both("cpu")


def an_argument_that_requires_gradients(run, followed):
    def loss_of(model, x):
        x = x.clone().requires_grad_() if followed else x
        return model(x).square().mean()

    return trained(run, loss_of, lambda _: (torch.randn(5, 4, requires_grad=not followed),))


def a_result_with_its_graph(run, followed):
    carried = [torch.zeros(5, 3)]
    model = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def loss_of(model, x, hidden):
        carry = model[1](x)
        return (model[0](x) + hidden).square().mean(), carry.detach() if followed else carry

    def around(result):
        carried[0] = result[1]

    return trained(run, loss_of, lambda _: (torch.randn(5, 4), carried[0]), model=model, around=around)


def a_changed_dict(run, followed):
    def loss_of(model, batch):
        batch = dict(batch) if followed else batch
        return F.cross_entropy(model(batch["x"]), batch.pop("y"))

    return trained(run, loss_of, lambda _: ({"x": torch.randn(5, 4), "y": torch.arange(5) % 3},))


def an_attribute_of_an_argument(run, followed):
    def loss_of(model, x):
        made = model(x)
        if followed:
            return made.square().mean(), made.detach()
        x.made = made.detach()
        return made.square().mean()

    return trained(run, loss_of, rows)


def a_backward_outside(run, followed):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)

    @run.loop(model, optimizer).step
    def train_step(x):
        loss = model(x).square().mean()
        if followed:
            loss.backward()
        return loss.detach() if followed else loss

    for _ in range(STEPS):
        loss = train_step(*rows())
        if not followed:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def a_python_number(run, followed):
    def loss_of(model, x):
        loss = model(x).square().mean()
        return loss, loss.detach() * 0 + 0.5 if followed else 0.5

    return trained(run, loss_of, rows)


@dataclasses.dataclass
class Made:
    value: torch.Tensor


class Box:
    def __init__(self, value):
        self.value = value


def an_object_of_its_own(run, followed):
    kind = Made if followed else Box

    def around(result):
        run.note(result[1].value)

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6)

    @run.loop(model, optimizer).step
    def train_step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, kind(loss.detach())

    for _ in range(STEPS):
        around(train_step(*rows()))
    return model


def a_value_that_is_read(run, followed):
    read = []

    def loss_of(model, x):
        loss = model(x).square().mean()
        return loss, loss.detach() if followed else torch.tensor([loss.item()])

    return trained(run, loss_of, rows, around=lambda result: read.append(result[1].item()))


def what_is_noted(run, followed):
    losses = []

    def noting(model, x):
        loss = model(x).square().mean()
        losses.append(loss.detach())
        return loss

    if not followed:
        return trained(run, noting, rows)
    return trained(run, lambda model, x: model(x).square().mean(), rows, around=losses.append)


def a_tensor_in_the_place_of_another(run, followed):
    model = nn.Linear(4, 3)
    model.average = torch.zeros(3)

    def loss_of(model, x):
        made = model(x)
        mean = made.detach().mean(0)
        if followed:
            model.average.lerp_(mean, 0.25)
        else:
            model.average = model.average.lerp(mean, 0.25)
        return (made - model.average).square().mean()

    return trained(run, loss_of, rows, model=model)


def a_value_that_changes(run, followed):
    settings = {"scale": 1.0}

    def arguments(number):
        settings["scale"] = 1.0 + number
        return (*rows(), torch.tensor(settings["scale"])) if followed else rows()

    if followed:
        return trained(run, lambda model, x, scale: (model(x) * scale).square().mean(), arguments)
    return trained(run, lambda model, x: (model(x) * settings["scale"]).square().mean(), arguments)


def an_argument_of_another_kind(run, followed):
    def loss_of(model, x):
        return model(x if followed else torch.from_numpy(x)).square().mean()

    return trained(run, loss_of, lambda _: rows() if followed else (rows()[0].numpy(),))


def a_number_that_is_new_each_time(run, followed):
    def loss_of(model, x, scale):
        return (model(x) * scale).square().mean()

    def arguments(number):
        return *rows(), torch.tensor(1.0 + number) if followed else 1.0 + number

    return trained(run, loss_of, arguments, steps=OFTEN)


def a_draw_of_pythons(run, followed):
    def loss_of(model, x):
        return (model(x) * (torch.rand((), device=x.device) if followed else random.random())).square().mean()

    return trained(run, loss_of, rows)


def a_draw_of_numpys(run, followed):
    def loss_of(model, x):
        scale = torch.rand((), device=x.device) if followed else float(np.random.rand())  # noqa: NPY002
        return (model(x) * scale).square().mean()

    return trained(run, loss_of, rows)


def a_generator_of_its_own(run, followed):
    generator = torch.Generator().manual_seed(1)

    def loss_of(model, x):
        return model(x + torch.randn(x.shape, generator=None if followed else generator)).square().mean()

    return trained(run, loss_of, rows)


def a_seed_in_the_step(run, followed):
    def loss_of(model, x):
        if not followed:
            torch.manual_seed(1)
        return model(F.dropout(x)).square().mean()

    return trained(run, loss_of, rows)


def a_file_that_is_written(run, followed, path):
    def loss_of(model, x):
        loss = model(x).square().mean()
        if followed:
            return loss, loss.detach()
        path.write_text("a step")
        return loss

    return trained(run, loss_of, rows, around=lambda _: path.write_text("a step") if followed else None)


REMEDIES = {
    an_argument_that_requires_gradients: ("an argument requires gradients", "inside the step, on a copy"),
    a_result_with_its_graph: ("an argument requires gradients", "return hidden.detach()"),
    a_changed_dict: ("the step changes the dict", "batch = dict(batch)"),
    an_attribute_of_an_argument: ("which is an attribute of its argument", "return what has to be noted"),
    a_backward_outside: ("whose backward it leaves to the caller", "call loss.backward() inside the step"),
    a_python_number: ("the step returns a Python number", "return a tensor instead"),
    an_object_of_its_own: ("the step returns", "a tuple or a dataclass"),
    a_value_that_is_read: ("a value is read on the host", "return the tensor, and read it outside the step"),
    what_is_noted: ("the step changes Python state", "return what has to be noted"),
    a_tensor_in_the_place_of_another: ("the step changes Python state", ".lerp_()"),
    a_value_that_changes: ("changes again and again", "pass it as a tensor argument"),
    an_argument_of_another_kind: ("cannot be compared from call to call", "pass tensors"),
    a_number_that_is_new_each_time: ("another one in each of", "pass it as a tensor, torch.tensor("),
    a_draw_of_pythons: ("the step draws from", "torch.rand(..., device=...)"),
    a_draw_of_numpys: ("the step draws from", "torch.rand(..., device=...)"),
    a_generator_of_its_own: ("", "draw from torch's own stream, without generator="),
    a_seed_in_the_step: ("", "seed before the loop, once"),
}


@pytest.mark.parametrize("program", REMEDIES, ids=lambda program: program.__name__)
def test_a_program_is_declined_and_captured_once_it_does_what_the_remedy_says(cpu, program):
    reason, hint = REMEDIES[program]
    check(cpu, program, reason, hint)


def test_a_file_is_written_outside(cpu, tmp_path):
    def program(run, followed):
        return a_file_that_is_written(run, followed, tmp_path / "a.txt")

    check(cpu, program, "", "do it outside the step")
