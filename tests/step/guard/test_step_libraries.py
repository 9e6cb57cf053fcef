"""What objects of installed packages keep for themselves: their code is not followed, so all that is plain counts."""

from __future__ import annotations

import collections
import importlib
import sys
import textwrap

import pytest
import torch
from step_programs import Classifier, batches, plain_step
from torch import nn
from torch.nn import functional as F

from hotloop import events as ev

STEPS, AT = 26, 14
"""Long enough to be captured anew after the change."""
SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

from hotloop import events as ev


class Average:
    def __init__(self, parameters):
        self.decay, self._updates = 0.99, 0
        self.shadow = [one.detach().clone() for one in parameters]

    @torch.no_grad()
    def update(self, parameters):
        self._updates += 1
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
        for kept, one in zip(self.shadow, parameters):
            kept.lerp_(one, 1 - decay)


class Meter:
    def __init__(self):
        self._values = []

    def update(self, value):
        self._values.append(value)


class Metric:
    def update(self, loss):
        return loss.item()


class Weighted:
    __slots__ = ("_weight",)

    def __init__(self):
        self._weight = 1.0

    def __call__(self, loss):
        return loss * self._weight


class Config:
    def __init__(self, fields):
        object.__setattr__(self, "_fields", fields)

    def __getattr__(self, name):
        if name not in self._fields:
            raise AttributeError(name)
        return self._fields[name]

    def __setattr__(self, name, value):
        self._fields[name] = value


class Lazy:
    def __init__(self):
        self._asked, self._cache = {}, None

    def __call__(self, loss):
        if self._cache is None:
            self._cache = torch.ones((), device=loss.device)
        self._asked[str(loss.device)] = object()
        return loss * self._cache


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self._calls = 0

    def forward(self, x):
        self._calls += 1
        return x * (1 + self._calls)


class Knob(nn.Module):
    def __init__(self):
        super().__init__()
        self._factor = 1.0

    def set(self, factor):
        self._factor = factor

    def forward(self, x):
        return x * self._factor


class Base:
    def __init__(self):
        self.done = 0

    def count(self):
        self.done += 1

    def loss_of(self, model, x, y):
        return F.cross_entropy(model(x), y)


class Settings:
    def __init__(self):
        self.weight = 1.0


class Trainer:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.settings, self.seen = model, optimizer, Settings(), 0

    def loss_of(self, x, y):
        return F.cross_entropy(self.model(x), y) * self.settings.weight

    def train_step(self, x, y):
        loss = self.loss_of(x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package as an installer leaves it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebodys_parts.py").write_text(textwrap.dedent(SOURCE))
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module("somebodys_parts")
    del sys.modules["somebodys_parts"]


class Ending(nn.Module):
    """A model of the program's that ends in a module of a library."""

    def __init__(self, end):
        super().__init__()
        self.net, self.end = Classifier(), end

    def forward(self, x):
        return self.end(self.net(x))


def training(make=lambda: None, *, end=None, loss_of=lambda _, loss: loss, after=lambda *_: None, change=None):
    """A program with an object of a library: ``loss_of(part, loss)`` and ``after(part, model, loss)`` use it."""

    def program(run):
        model = (Classifier() if end is None else Ending(end())).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        part = make(model) if end is None else model.end

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = loss_of(part, F.cross_entropy(model(x), y))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            after(part, model, loss.detach())
            return loss

        for number, (x, y) in enumerate(batches(run.device, STEPS)):
            if number == AT and change is not None:
                change(part)
            run.note(train_step(x, y))
        return model, optimizer, getattr(part, "shadow", [])

    return program


def dropped(both, program, name):
    """The program ends as eager's, and its capture was dropped once, for what has this name."""
    run = both.equal(program, exact=True, replays=6)
    assert len(run.dropped) == 1
    assert name in run.dropped[0]


def test_an_average_that_counts_its_updates_for_itself(both, library):
    program = training(
        lambda model: library.Average(list(model.parameters())),
        after=lambda part, model, _: part.update(list(model.parameters())),
    )
    both.declines(program, reason="part._updates")


def test_a_meter_that_keeps_what_it_was_given(both, library):
    program = training(lambda _: library.Meter(), after=lambda part, _, loss: part.update(loss))
    both.declines(program, reason="part._values")


def test_an_average_of_diffusers(both):
    training_utils = pytest.importorskip("diffusers.training_utils")

    def make(model):
        average = training_utils.EMAModel(model.parameters(), use_ema_warmup=True)
        average.shadow = average.shadow_params
        return average

    program = training(make, after=lambda part, model, _: part.step(model.parameters()))
    both.declines(program, reason="part.optimization_step")


@pytest.mark.parametrize(
    ("make", "change"),
    [
        ("Weighted", lambda part: setattr(part, "_weight", -1.0)),
        ("Config", lambda part: setattr(part, "weight", -1.0)),
        ("nested", lambda part: setattr(part.inner, "weight", -1.0)),
    ],
)
def test_what_an_object_keeps_for_itself_is_in_force_in_the_next_step(both, library, make, change):
    makers = {
        "Weighted": (lambda _: library.Weighted(), lambda part, loss: part(loss)),
        "Config": (lambda _: library.Config({"weight": 1.0}), lambda part, loss: loss * part.weight),
        "nested": (
            lambda _: library.Config({"inner": library.Config({"weight": 1.0})}),
            lambda part, loss: loss * part.inner.weight,
        ),
    }
    made, loss_of = makers[make]
    dropped(both, training(made, loss_of=loss_of, change=change), "weight")


def test_what_is_filled_once_or_is_no_plain_value_is_captured(both, library):
    program = training(lambda _: library.Lazy(), loss_of=lambda part, loss: part(loss))
    assert not both.equal(program, exact=True).dropped


def test_a_module_that_counts_its_calls_for_itself(both, library):
    both.declines(training(end=library.Counting), reason="model.end._calls")


def test_a_module_whose_setter_changes_what_it_keeps_for_itself(both, library):
    dropped(both, training(end=library.Knob, change=lambda part: part.set(-1.0)), "model.end._factor")


class Owned(nn.Dropout):
    def forward(self, x):
        return super().forward(x)


class Normed(nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


class Smoothed(nn.CrossEntropyLoss):
    def forward(self, x, y):
        return 2 * super().forward(x, y)


INHERITED = {
    "p": (lambda: Owned(0.25), lambda part: setattr(part, "p", 0.75)),
    "momentum": (lambda: Normed(4), lambda part: setattr(part, "momentum", 0.75)),
    "eps": (lambda: Normed(4), lambda part: setattr(part, "eps", 0.75)),
}


@pytest.mark.parametrize("name", INHERITED)
def test_what_torchs_code_reads_of_a_module_of_ones_own_class(both, name):
    end, change = INHERITED[name]
    dropped(both, training(end=end, change=change), f"model.end.{name}")


def test_what_torchs_code_reads_of_a_loss_of_ones_own_class(both):
    def program(run):
        model, smoothed = Classifier().to(run.device), Smoothed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        step = run.loop(model, optimizer).step(plain_step(model, optimizer, smoothed))
        for number, (x, y) in enumerate(batches(run.device, STEPS)):
            if number == AT:
                smoothed.label_smoothing = 0.5
            run.note(step(x, y))
        return model, optimizer

    dropped(both, program, "label_smoothing")


def test_what_a_class_of_ones_own_inherits_from_a_library_counts(both, library):
    class Average(library.Average):
        def update(self, parameters):
            super().update(list(parameters))

    class Counting(library.Counting):
        def forward(self, x):
            return super().forward(x)

    average = training(
        lambda model: Average(list(model.parameters())), after=lambda part, model, _: part.update(model.parameters())
    )
    both.declines(average, reason="part._updates")
    both.declines(training(end=Counting), reason="model.end._calls")


def test_what_a_class_of_ones_own_inherits_from_pythons_library_is_in_force(both):
    class Table(collections.UserDict):
        def weight_of(self, loss):
            return loss * self["weight"]

    program = training(
        lambda _: Table(weight=1.0),
        loss_of=lambda part, loss: part.weight_of(loss),
        change=lambda part: part.update(weight=-1.0),
    )
    dropped(both, program, "weight")


def test_what_a_library_counts_outside_of_the_step_is_none_of_its_state(both, library):
    class Trainer(library.Base):
        def train_step(self, x, y):
            return self.loss_of(self.model, x, y)

    def program(run):
        trainer = Trainer()
        trainer.model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=2**-6, fused=True)

        @run.loop(trainer.model, optimizer).step
        def train_step(x, y):
            loss = trainer.train_step(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device, STEPS):
            run.note(train_step(x, y))
            trainer.count()
        return trainer.model, optimizer

    assert not both.equal(program, exact=True).dropped


def test_an_installed_program_is_followed_like_ones_own(both, library):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        trainer = library.Trainer(model, optimizer)
        step = run.loop(model, optimizer).step(trainer.train_step)
        for number, (x, y) in enumerate(batches(run.device, STEPS)):
            trainer.seen = number
            if number == AT:
                trainer.settings.weight = -1.0
            run.note(step(x, y))
        return model, optimizer

    run = both.alike(program, exact=True)
    assert not run.declined
    assert [one.reason for one in run.told(ev.CaptureDropped)] == ["self.settings.weight"]


def test_a_value_that_a_library_reads_on_the_host_is_told_at_the_line_that_calls_it(both, library):
    def weighted(part, loss):
        part.update(loss)  # the line to move
        return loss

    told = both.declines(
        training(lambda _: library.Metric(), loss_of=weighted),
        reason="a value is read on the host",
        source="the line to move",
        file=__file__,
    )
    assert f"(in {library.__file__}:" in told.reason
    assert told.reason.endswith("which it calls)")
