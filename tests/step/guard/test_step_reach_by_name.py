"""What a step reads by names that it keeps, and of objects that are not the program's own: watched before each replay."""

from __future__ import annotations

import dataclasses
import logging
import operator
import threading

import pytest
import torch
from step_programs import GRAPH
from torch import nn

import hotloop
from hotloop.testing import captured_step_emulation


class Settings:
    def __init__(self):
        self.weight, self.other = 1.0, 1.0

    def of(self, factor=1.0):
        return self.weight * factor


def attribute_getter():
    settings, get = Settings(), operator.attrgetter("weight")
    return lambda _: get(settings), lambda: setattr(settings, "weight", 0.25)


def of_something_else():
    held, get = Settings(), operator.attrgetter("held.weight")
    outer = Settings()
    outer.held = held
    return lambda _: get(outer), lambda: setattr(held, "weight", 0.25)


def method_caller():
    settings, call = Settings(), operator.methodcaller("of")
    return lambda _: call(settings), lambda: setattr(settings, "weight", 0.25)


def method_caller_with_a_keyword():
    settings, call = Settings(), operator.methodcaller("of", factor=2.0)
    return lambda _: call(settings), lambda: setattr(settings, "weight", 0.25)


def names_in_a_list():
    settings, names = Settings(), ["weight", "other"]
    return lambda _: sum(getattr(settings, name) for name in names), lambda: setattr(settings, "weight", 0.25)


def names_in_the_code():
    settings = Settings()

    def read(_):
        found = 0.0
        for name in ("weight", "other"):
            found += getattr(settings, name)
        return found

    return read, lambda: setattr(settings, "weight", 0.25)


def name_of_an_object():
    settings = Settings()
    settings.chosen = "weight"
    return lambda _: getattr(settings, settings.chosen), lambda: setattr(settings, "weight", 0.25)


def name_with_an_ending():
    settings, kinds = Settings(), ["we"]
    return lambda _: getattr(settings, f"{kinds[0]}ight"), lambda: setattr(settings, "weight", 0.25)


def name_that_is_added_to():
    settings, kinds = Settings(), ["we"]
    return lambda _: getattr(settings, kinds[0] + "ight"), lambda: setattr(settings, "weight", 0.25)


def name_that_is_filled_in():
    settings, kinds = Settings(), ["we"]
    return lambda _: getattr(settings, "%sight" % kinds[0]), lambda: setattr(settings, "weight", 0.25)  # noqa: UP031


def name_that_is_formatted():
    settings, kinds = Settings(), ["we"]
    return lambda _: getattr(settings, "{}ight".format(kinds[0])), lambda: setattr(settings, "weight", 0.25)  # noqa: UP032


def by_a_pattern():
    settings = Settings()

    def read(_):
        match settings:
            case Settings(weight=1.0):
                return 1.0
        return 0.25

    return read, lambda: setattr(settings, "weight", 0.25)


@dataclasses.dataclass
class Phase:
    factor: float = 1.0


def by_a_pattern_of_places():
    phase = Phase()

    def read(_):
        match phase:
            case Phase(factor):
                return factor
        return 0.0

    return read, lambda: setattr(phase, "factor", 0.25)


def of_a_tensor():
    tensor = torch.ones(())
    tensor.scale = 1.0
    return lambda _: tensor * tensor.scale, lambda: setattr(tensor, "scale", 0.25)


def event():
    stop = threading.Event()
    return lambda _: 0.25 if stop.is_set() else 1.0, stop.set


def level():
    logger = logging.getLogger("my.program.level")
    logger.setLevel(logging.INFO)
    return lambda _: 0.25 if logger.isEnabledFor(logging.DEBUG) else 1.0, lambda: logger.setLevel(logging.DEBUG)


def view():
    memory = bytearray([4])
    seen = memoryview(memory)
    return lambda _: seen[0] / 4, lambda: memory.__setitem__(0, 1)


READS = [
    attribute_getter,
    of_something_else,
    method_caller,
    method_caller_with_a_keyword,
    names_in_a_list,
    names_in_the_code,
    name_of_an_object,
    name_with_an_ending,
    name_that_is_added_to,
    name_that_is_filled_in,
    name_that_is_formatted,
    by_a_pattern,
    by_a_pattern_of_places,
    of_a_tensor,
    event,
    level,
    view,
]


def train(make, asked):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.scale = 1.0
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
    weight, change = make()
    losses = []
    with captured_step_emulation(), hotloop.Loop(model, optimizer, run=asked) as loop:

        @loop.step
        def train_step(x):
            loss = weight(model) * model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        generator = torch.Generator().manual_seed(1)
        for number in range(20):
            if number == 10:
                change()
            losses.append(train_step(torch.randn(3, 4, generator=generator)))
        return torch.stack(losses), loop.status()


@pytest.mark.parametrize("make", READS)
def test_a_change_is_in_force_in_the_very_next_step(make):
    ours, status = train(make, GRAPH)
    assert torch.equal(ours, train(make, "eager")[0])
    assert status.tier == GRAPH
    assert len(status.dropped) == 1


def of_the_models_parameter():
    found = {}

    def weight(model):
        found["parameter"] = model[0].weight
        return model[0].weight.scale

    return weight, lambda: setattr(found["parameter"], "scale", 0.25)


def test_what_is_kept_on_a_parameter_is_read_anew():
    ours, _ = train(of_the_models_parameter, GRAPH)
    assert torch.equal(ours, train(of_the_models_parameter, "eager")[0])


def test_a_text_that_names_something_else_keeps_nothing_from_being_captured():
    """Where code makes names as it runs all attributes count: a change of another costs a recording, and no more."""

    def make():
        settings, names = Settings(), ["weight", "no_attribute_of_these"]
        return lambda _: getattr(settings, names[0]), lambda: setattr(settings, "other", 7.0)

    ours, status = train(make, GRAPH)
    assert torch.equal(ours, train(make, "eager")[0])
    assert (status.tier, len(status.dropped)) == (GRAPH, 1)
