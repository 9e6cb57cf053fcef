"""State in Python that a step reads or changes: a replay would neither, so the capture is declined, and it is named."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from step_programs import Classifier, batches
from torch.nn import functional as F


def declining(make_step, steps=14, model=Classifier, outside=None):
    """A program around ``make_step(model, optimizer)``; ``outside`` is what the user does after each step."""

    def program(run):
        live = model().to(run.device)
        optimizer = torch.optim.AdamW(live.parameters(), lr=2**-6, fused=True)
        train_step = run.loop(live, optimizer).step(make_step(live, optimizer))
        if outside is not None:
            outside(-1)
        for number, (x, y) in enumerate(batches(run.device, steps)):
            run.note(train_step(x, y))
            if outside is not None:
                outside(number)
        return live, optimizer

    return program


def finish(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def using(loss_of):
    """A step whose loss is ``loss_of(logits, y)``."""

    def make(model, optimizer):
        def train_step(x, y):
            return finish(loss_of(model(x), y), optimizer)

        return train_step

    return make


def test_a_counter_in_the_closure_that_the_loss_uses(both):
    def make(model, optimizer):
        count = 0

        def train_step(x, y):
            nonlocal count
            count += 1
            return finish(F.cross_entropy(model(x), y) / count, optimizer)

        return train_step

    both.declines(declining(make), reason="train_step.count", hint="outside the step")


def test_a_list_that_grows(both):
    def make(model, optimizer):
        losses = []

        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.detach())
            return finish(loss, optimizer)

        return train_step

    both.declines(declining(make), reason="losses")


def test_a_counter_on_the_model(both):
    class Counting(Classifier):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + self.calls / 64)

    both.declines(declining(using(F.cross_entropy), model=Counting), reason=".calls")


def test_a_counter_on_an_object_behind_a_method(both):
    class Losses:
        def __init__(self):
            self.seen = {"steps": 0}

        @torch.enable_grad()
        def of(self, logits, y):
            self.seen["steps"] += 1
            return F.cross_entropy(logits, y) / self.seen["steps"]

    def make(model, optimizer):
        return using(Losses().of)(model, optimizer)

    both.declines(declining(make), reason="seen")


@pytest.mark.parametrize("library", ["random", "numpy"])
def test_random_numbers_of_python_and_numpy(both, library):
    def loss_of(logits, y):
        draw = random.random() if library == "random" else np.random.random_sample()  # noqa: NPY002 - old code
        return F.cross_entropy(logits, y) * (1 + draw)

    both.declines(declining(using(loss_of)), reason=library, hint="outside the step")


def test_a_random_generator_of_ones_own(both):
    def make(model, optimizer):
        draws = random.Random(3)
        return using(lambda logits, y: F.cross_entropy(logits, y) * (1 + draws.random()))(model, optimizer)

    run = both.alike(declining(make))
    assert run.declined
    assert run.replays() == 0


def test_the_machines_own_generator_has_no_state_to_look_at(both):
    def make(model, optimizer):
        draws = random.SystemRandom()

        def loss_of(logits, y):
            return F.cross_entropy(logits, y) if draws is not None else draws.random()

        return using(loss_of)(model, optimizer)

    both.equal(declining(make), replays=7)


def test_a_generator_of_numpy_of_ones_own(both):
    def make(model, optimizer):
        draws = np.random.default_rng(3)
        return using(lambda logits, y: F.cross_entropy(logits, y) * (1 + draws.random()))(model, optimizer)

    run = both.alike(declining(make))
    assert run.declined
    assert run.replays() == 0


STEP_NUMBER = 0


def branch_on_global(logits, y):
    loss = F.cross_entropy(logits, y)
    return loss * 2 if STEP_NUMBER % 3 == 0 else loss


def test_a_step_number_that_the_program_counts_outside(both):
    def outside(number):
        global STEP_NUMBER
        STEP_NUMBER = number + 1

    told = both.declines(
        declining(using(branch_on_global), steps=40, outside=outside), reason="STEP_NUMBER has changed"
    )
    assert "pass it as a tensor argument" in told.hint


def test_a_global_that_only_a_method_of_the_model_reads_changed_late(both):
    """Changed once the step is replayed, it is found before the next replay."""

    class Branching(Classifier):
        def forward(self, x):
            return self.scaled(super().forward(x))

        def scaled(self, logits):
            return logits * (1 + STEP_NUMBER)

    def outside(number):
        global STEP_NUMBER
        STEP_NUMBER = (number + 1) // 14

    run = both.equal(declining(using(F.cross_entropy), steps=34, model=Branching, outside=outside), exact=True)
    assert len(run.dropped) == 2
    assert "STEP_NUMBER" in run.dropped[0]


def test_next_of_an_iterator_inside_the_step(both):
    def make(model, optimizer):
        rates = iter([0.5, 1.0, 2.0] * 100)
        return using(lambda logits, y: F.cross_entropy(logits, y) * next(rates))(model, optimizer)

    both.declines(declining(make), reason="rates")


@pytest.mark.parametrize(
    "make_iterator", [itertools.count, lambda: itertools.cycle([1, 2]), lambda: (i for i in range(99))]
)
def test_next_of_other_iterators(both, make_iterator):
    def make(model, optimizer):
        numbers = make_iterator()
        return using(lambda logits, y: F.cross_entropy(logits, y) * (1 + next(numbers) % 3))(model, optimizer)

    run = both.alike(declining(make))
    assert run.declined
    assert run.replays() == 0


def test_the_batch_fetched_inside_the_step(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        loader = torch.utils.data.DataLoader(list(batches("cpu", 40, size=1)), batch_size=4)
        data = iter(loader)

        @run.loop(model, optimizer).step
        def train_step():
            x, y = next(data)
            return finish(F.cross_entropy(model(x.flatten(0, 1).to(run.device)), y.flatten().to(run.device)), optimizer)

        for _ in range(10):
            run.note(train_step())
        return model, optimizer

    run = both.alike(program)
    assert run.declined
    assert run.replays() == 0


def test_a_scheduler_stepped_inside_the_step(both):
    def make(model, optimizer):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 16)

        def train_step(x, y):
            loss = finish(F.cross_entropy(model(x), y), optimizer)
            scheduler.step()
            return loss

        return train_step

    both.declines(declining(make), reason="optimizer's settings", hint="scheduler.step() outside")


class Term:
    """A part of a loss, by which its weight is kept."""

    def __init__(self, factor):
        self.factor = factor


@pytest.mark.parametrize("other", [False, True], ids=["changed", "another"])
def test_an_object_that_is_a_key(both, other):
    weights = {}

    def loss_of(logits, y):
        return F.cross_entropy(logits, y) * sum(term.factor * weight for term, weight in weights.items())

    def outside(number):
        if number == -1:
            weights.clear()
            weights[Term(1.0)] = 1.0
        elif number == 13 and other:
            weights.clear()
            weights[Term(0.25)] = 1.0
        elif number == 13:
            next(iter(weights)).factor = 0.25

    run = both.equal(declining(using(loss_of), steps=26, outside=outside), exact=True)
    assert len(run.dropped) == 1


def counting():
    number = 0
    while True:
        number += 1
        yield 1.0 if number < 9 else 0.5


def test_a_schedule_that_is_a_generator(both):
    """It yields at one place of its code, and the same for a while: code that reads it moves it."""

    def make(model, optimizer):
        weights = counting()
        return using(lambda logits, y: F.cross_entropy(logits, y) * next(weights))(model, optimizer)

    both.declines(declining(make), reason="weights", hint="outside the step")
