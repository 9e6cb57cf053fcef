"""Two kinds of holders of one object, what holds items in C, and counts that only an audit's run may move."""

from __future__ import annotations

import collections
import functools
import multiprocessing
import queue
import types
from pathlib import Path

import pytest
import torch
from step_programs import Classifier, batches
from torch import nn
from torch.nn import functional as F

from hotloop.step.guard.fingerprint import Fingerprints

STEPS, AT = 24, 12


class Held:
    """An object of the program's."""


def with_an_attribute():
    weight = [1.0]

    def read():
        return weight[0]

    read.note = "any attribute"
    return read, lambda: weight.__setitem__(0, 0.25)


def wrapped():
    state = {"weight": 1.0}

    def decorate(function):
        @functools.wraps(function)
        def wrapper():
            return function() * state["weight"]

        return wrapper

    return decorate(lambda: 1.0), lambda: state.update(weight=0.25)


def default_of_a_decorated_one():
    def read(weight=1.0):
        return weight

    read.note = "any attribute"
    return read, lambda: setattr(read, "__defaults__", (0.25,))


def attribute_beside_the_closure():
    weight = 1.0

    def read():
        return weight * read.factor

    read.factor = 1.0
    return read, lambda: setattr(read, "factor", 0.25)


def module_in_an_attribute():
    held, held.settings = Held(), types.ModuleType("settings")
    held.settings.weight = 1.0
    return lambda: held.settings.weight, lambda: setattr(held.settings, "weight", 0.25)


def module_in_a_table():
    held = {"settings": types.ModuleType("settings")}
    held["settings"].weight = 1.0
    return lambda: held["settings"].weight, lambda: setattr(held["settings"], "weight", 0.25)


def method_kept(make, name, take):
    def script():
        values = make({0: 1.0})
        read = getattr(values, name)
        return lambda: take(read()), lambda: values.__setitem__(0, 0.25)

    script.__name__ = f"{make.__name__}_{name}"
    return script


def a_list(table):
    return list(table.values())


def a_deque(table):
    return collections.deque(table.values())


class Reverses(torch.autograd.Function):
    """Turns gradients around, as domain adversarial training does."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.layer.weight * gradient, None


def object_that_backward_reads():
    held, one = Held(), torch.ones((), requires_grad=True)
    held.weight = 1.0

    def read():
        (gradient,) = torch.autograd.grad(Reverses.apply(one, held), one)
        return gradient

    return read, lambda: setattr(held, "weight", 0.25)


READS = [
    with_an_attribute,
    wrapped,
    default_of_a_decorated_one,
    attribute_beside_the_closure,
    module_in_an_attribute,
    module_in_a_table,
    object_that_backward_reads,
    method_kept(a_list, "copy", lambda each: each[0]),
    method_kept(dict, "copy", lambda each: each[0]),
    method_kept(a_deque, "copy", lambda each: each[0]),
    method_kept(a_list, "__iter__", next),
    method_kept(a_list, "__reversed__", next),
]


def training(make):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)
        with run.device:
            read, change = make()

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y) * read()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device, STEPS)):
            if number == AT:
                change()
            run.note(train_step(x, y))
        return model, optimizer

    return program


@pytest.mark.parametrize("make", READS, ids=lambda make: make.__name__)
def test_a_change_is_in_force_in_the_next_step(both, make):
    run = both.equal(training(make), exact=True, replays=6)
    assert len(run.dropped) == 1


def weighted(loss):
    return 0.25 * loss


class Weighs:
    """A loss that is an object."""

    def __call__(self, loss):
        return 0.25 * loss


SOURCE = """
import torch


class Network(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @property
    def loss_function(self):
        return getattr(self, "_loss_function", float)

    def loss(self, x, y):
        loss = torch.nn.functional.cross_entropy(self.inner(x), y)
        return self._loss_function(loss) if "_loss_function" in self.__dict__ else loss
"""


@pytest.fixture
def network(tmp_path, monkeypatch):
    """A class of a package as an installer leaves it."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "somebodys_network.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(folder))
    import somebodys_network

    return somebodys_network.Network


@pytest.mark.parametrize(
    "loss",
    [weighted, Weighs(), functools.partial(weighted), Weighs().__call__],
    ids=["function", "object", "partial", "method"],
)
def test_a_loss_that_a_librarys_model_is_given(both, network, loss):
    """transformers keeps one in a private attribute: `model.loss_function = f`."""

    def program(run):
        model = network(Classifier()).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            value = model.loss(x, y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            return value

        for number, (x, y) in enumerate(batches(run.device, STEPS)):
            if number == AT:
                model._loss_function = loss
            run.note(train_step(x, y))
        return model, optimizer

    run = both.equal(program, exact=True, replays=6)
    assert len(run.dropped) == 1


def test_a_class_that_a_hook_counts_on_counts_each_step_once(both):
    """Only the third look at the class had shown that the step moves the count: two runs of a proof had moved it too."""

    def program(run):
        class Average:
            count = 0

        model = nn.Linear(8, 4).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)

        def counts(*_):
            Average.count += 1

        optimizer.register_step_post_hook(counts)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in batches(run.device, STEPS):
            run.note(train_step(x, y))
        return model, torch.tensor(Average.count)

    both.declines(program, reason="the step changes Python state: Average.count")


def test_a_queue_gives_each_item_to_one_step(both):
    def program(run):
        model = nn.Linear(8, 4).to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)
        waiting = queue.SimpleQueue()  # in C: nobody hears what is taken
        for batch in batches(run.device, STEPS):
            waiting.put(batch)

        @run.loop(model, optimizer).step
        def train_step():
            x, y = waiting.get()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(STEPS - 2):
            run.note(train_step())
        return model, torch.tensor(waiting.qsize())

    both.declines(program, reason="the step changes Python state: closure variable waiting")


def test_what_takes_items_out_of_a_pipe_or_a_file_is_never_the_same(tmp_path):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    queues = multiprocessing.Queue(), multiprocessing.SimpleQueue()
    for one in (receiver, sender, *queues, [].__iter__().__next__):
        assert Fingerprints().of(one) != Fingerprints().of(one)
    with Path(__file__).open() as lines, (tmp_path / "log").open("w") as log:
        assert Fingerprints().of(lines) != Fingerprints().of(lines)
        assert Fingerprints().of(log) == Fingerprints().of(log)
    receiver.close()
    sender.close()
    queues[0].close()
    queues[1].close()


def test_a_method_that_only_adds_reads_nothing():
    """A step may append what it will be asked for later; that list is no state that it reads."""
    noted = []
    note, read = noted.append, noted.copy
    before = Fingerprints().of(note), Fingerprints().of(read)
    noted.append(1)
    assert Fingerprints().of(note) == before[0]
    assert Fingerprints().of(read) != before[1]
