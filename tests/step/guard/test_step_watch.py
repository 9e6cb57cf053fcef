"""Python state that changes between two replays: it is in force in the next step, as in eager code, and is named."""

from __future__ import annotations

import dataclasses
import functools
import types

import numpy as np
import pytest
import torch
from step_programs import Classifier, batches
from torch.nn import functional as F

STEPS, AT = 26, 14
"""Long enough to be captured anew after the change."""


def changing(make_loss, change, model=Classifier, arguments=()):
    """A program whose loss is ``make_loss(model)(logits, y)``; ``change(model, loss)`` comes between two replays."""

    def program(run):
        live = model().to(run.device)
        optimizer = torch.optim.AdamW(live.parameters(), lr=2**-6, fused=True)
        loss_of = make_loss(live)

        @run.loop(live, optimizer).step
        def train_step(x, y, *rest):
            loss = loss_of(live(x), y, *rest)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        rest = tuple(make() for make in arguments)
        for number, (x, y) in enumerate(batches(run.device, STEPS)):
            if number == AT:
                change(live, loss_of if not rest else rest[0])
            run.note(train_step(x, y, *rest))
        return live, optimizer

    return program


def dropped(both, program, name):
    """The program ends as eager's, and its capture was dropped once, for what has this name."""
    run = both.equal(program, exact=True, replays=6)
    assert len(run.dropped) == 1
    assert name in run.dropped[0]


class Weighted:
    """A loss with a weight that is kept in some way."""

    def __init__(self, held, read):
        self.held, self.read = held, read

    def __call__(self, logits, y):
        return F.cross_entropy(logits, y) * self.read(self.held)


@dataclasses.dataclass(slots=True)
class Slots:
    weight: float = 1.0


class Hidden:
    def __init__(self):
        self._weight = 1.0

    @property
    def weight(self):
        return self._weight


class Inherits(Hidden):
    pass


def make_class():
    return type("Config", (), {"weight": 1.0})


def make_instance():
    return make_class()()


def of_attribute(held):
    return held.weight


def of_item(held):
    return float(held[0])


def set_item(held):
    held[0] = -1.0


def set_weight(held):
    held.weight = -1.0


HELD = {
    "a dataclass with slots": (Slots, of_attribute, set_weight),
    "a property": (Hidden, of_attribute, lambda held: setattr(held, "_weight", -1.0)),
    "an inherited property": (Inherits, of_attribute, lambda held: setattr(held, "_weight", -1.0)),
    "a class attribute": (make_class, of_attribute, set_weight),
    "a class attribute read through an object": (
        make_instance,
        of_attribute,
        lambda held: set_weight(type(held)),
    ),
    "an array": (lambda: np.array([1.0]), of_item, set_item),
    "a list": (lambda: [1.0], of_item, set_item),
    "the middle of a long list": (
        lambda: [1.0] * 1000,
        lambda held: held[500],
        lambda held: held.__setitem__(500, -1.0),
    ),
    "a set": (lambda: {1, 2}, lambda held: -1.0 if 3 in held else 1.0, lambda held: (held.discard(1), held.add(3))),
    "a deep one": (
        lambda: {"a": [{"b": {"c": [types.SimpleNamespace(d={"e": [1.0]})]}}]},
        lambda held: held["a"][0]["b"]["c"][0].d["e"][0],
        lambda held: held["a"][0]["b"]["c"][0].d["e"].__setitem__(0, -1.0),
    ),
    "a tuple of objects": (lambda: (Slots(),), lambda held: held[0].weight, lambda held: set_weight(held[0])),
}


@pytest.mark.parametrize("kind", HELD)
def test_what_a_loss_reads(both, kind):
    make, read, change = HELD[kind]
    dropped(both, changing(lambda _: Weighted(make(), read), lambda _, loss: change(loss.held)), "")


def test_the_code_that_a_loss_runs(both):
    def double(loss):
        loss.read = lambda held: 2 * held[0]

    dropped(both, changing(lambda _: Weighted([1.0], of_item), lambda _, loss: double(loss)), "read")


def test_a_scalar_of_the_same_value_is_no_change(both):
    def program(run):
        loss = Weighted([1.0], of_item)
        return changing(lambda _: loss, lambda *_: loss.held.__setitem__(0, float("1.0")))(run)

    assert not both.equal(program, exact=True).dropped


def test_a_list_in_place_of_an_equal_one_is_no_change_and_is_watched_from_then_on(both):
    def program(run):
        loss = Weighted([1.0], of_item)

        def change(*_):
            loss.held = [1.0]

        left = changing(lambda _: loss, change)
        return left(run)

    assert not both.equal(program, exact=True).dropped


class Configured(Classifier):
    """A model whose forward reads containers and objects in its attributes."""

    def __init__(self):
        super().__init__()
        self.table, self.items, self.config = {"w": 1.0}, [1.0], types.SimpleNamespace(w=1.0)
        self._private = 1.0

    def forward(self, x):
        factor = self.table["w"] * self.items[0] * self.config.w * self._private
        return super().forward(x) * (factor * self.extra if hasattr(self, "extra") else factor)


ON_MODELS = {
    "table": lambda model: model.table.__setitem__("w", -1.0),
    "items": lambda model: model.items.__setitem__(0, -1.0),
    "config.w": lambda model: setattr(model.config, "w", -1.0),
    "_private": lambda model: setattr(model, "_private", -1.0),
    "extra": lambda model: setattr(model, "extra", -1.0),
    "forward": lambda model: setattr(model, "forward", functools.partial(twice, model)),
}


def twice(model, x):
    return 2 * Configured.forward(model, x)


def plain(_):
    return F.cross_entropy


@pytest.mark.parametrize("name", ON_MODELS)
def test_what_a_model_reads(both, name):
    dropped(both, changing(plain, lambda model, _: ON_MODELS[name](model), model=Configured), name)


def test_a_class_whose_forward_is_replaced(both):
    def program(run):
        class Patched(Configured):
            def forward(self, x):
                return super().forward(x)

        def patch(*_):
            Patched.forward = twice

        return changing(plain, patch, model=Patched)(run)

    dropped(both, program, "forward")


def test_an_object_among_the_arguments(both):
    def make_loss(_):
        return lambda logits, y, config: F.cross_entropy(logits, y) * config.weight

    program = changing(make_loss, lambda _, config: set_weight(config), arguments=[Hidden2])
    dropped(both, program, "weight")


class Hidden2:
    def __init__(self):
        self.weight = 1.0


def test_the_mode_of_a_module_among_the_arguments(both):
    def make_loss(_):
        return lambda logits, y, drop: F.cross_entropy(drop(logits), y)

    program = changing(make_loss, lambda _, drop: drop.eval(), arguments=[torch.nn.Dropout])
    dropped(both, program, "training")


def test_the_mode_of_a_module_that_the_loop_was_not_given(both):
    """Its running statistics are moved once a step, also where a proof runs the step twice."""

    def program(run):
        norm = torch.nn.BatchNorm1d(4, affine=False).to(run.device)
        loss = changing(
            lambda _: lambda logits, y: F.cross_entropy(norm(logits), y), lambda *_: norm.eval(), model=Classifier
        )
        return (*loss(run), norm)

    dropped(both, program, ".training")


def test_a_large_array_declines_the_capture(both):
    def program(run):
        weights = np.ones(20_000)
        return changing(lambda _: Weighted(weights, of_item), lambda *_: weights.__setitem__(0, -1.0))(run)

    both.declines(program, reason="held (an array of 156 KiB)", hint="as a tensor")


def test_a_model_of_many_modules_does_not_hide_what_the_step_counts(both):
    class Many(Classifier):
        def __init__(self):
            super().__init__()
            self.more = torch.nn.ModuleList(torch.nn.Conv2d(1, 1, 1) for _ in range(600)).requires_grad_(False)

    def program(run):
        counted = []

        def loss(logits, y):
            counted.append(1)
            return F.cross_entropy(logits, y)

        left = changing(lambda _: loss, lambda *_: None, model=Many)(run)
        return (*left, torch.tensor(len(counted)))

    both.declines(program, reason="counted")


def test_too_much_to_watch_declines_the_capture(both):
    def program(run):
        many = [{"weight": 1.0} for _ in range(30_000)]
        return changing(lambda _: Weighted(many, lambda held: held[0]["weight"]), lambda *_: None)(run)

    both.declines(program, reason="more than 20,000 values")


def test_a_counter_that_the_step_names_nowhere_is_captured(both):
    class Counted(Weighted):
        epoch = 0

    def program(run):
        loss = Counted([1.0], of_item)

        def count(*_):
            loss.epoch += 1
            loss.another = loss.epoch

        return changing(lambda _: loss, count)(run)

    assert not both.equal(program, exact=True).dropped


@pytest.mark.campaign
def test_anomaly_mode_is_in_force(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, _):
            loss = (model(x).square().mean() * 0 - 1).sqrt()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        raised = 0
        for number, (x, y) in enumerate(batches(run.device, 20)):
            with torch.autograd.set_detect_anomaly(number >= AT):
                try:
                    train_step(x, y)
                except RuntimeError:
                    raised += 1
        return {"raised": torch.tensor(raised)}

    with pytest.warns(UserWarning, match="Error detected"):
        run = both.alike(program)
    assert run.replays()
