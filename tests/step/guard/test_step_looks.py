"""Looks at a recorded step's operations: a change that nobody watches is noticed late, and said with its steps and line."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as ev
from hotloop.testing import captured_step_emulation

STEPS = 60


AMID = 150
"""Where in a list so long that its ends alone are watched."""


def hidden():
    """Return a function that reads a weight in C, and one that sets it."""
    table = {"weight": [0.0] * AMID + [1.0] + [0.0] * AMID}
    return table["weight"].__getitem__, lambda value: table["weight"].__setitem__(AMID, value)


def trained(weight, change, *, at=30, steps=STEPS, total=None, between=lambda _: None, **settings):
    """Train with ``weight()`` in the loss, call ``change`` before a step; return losses, status, events and tiers."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draws, losses, ran = torch.Generator().manual_seed(1), [], []
    with captured_step_emulation(), hotloop.watch() as events:
        loop = hotloop.Loop(model, optimizer, total_steps=total, **{"run": "eager+graph", **settings})

        @loop.step
        def step(x, y):
            loss = F.cross_entropy(model(x), y) * weight()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for number in range(steps):
            if number == at:
                change()
            between(number)
            batch = torch.randn(4, 8, generator=draws), torch.randint(3, (4,), generator=draws)
            losses.append(float(step(*batch)))
            ran.append(loop.last_ran()[1])
        status = loop.status()
        loop.close()
    return losses, status, events, ran


def late(total=None, **settings):
    weight, set_weight = hidden()
    return trained(lambda: weight(AMID), lambda: set_weight(0.25), total=total, **settings)


def test_a_change_that_nobody_watches_is_noticed_at_the_next_look_and_said():
    losses, status, events, ran = late()
    eager, *_ = late(run="eager")
    (stale,) = status.stale
    assert losses[:30] == eager[:30]
    assert stale.first_step <= 31 <= stale.last_step < STEPS
    assert (stale.operation, stale.file) == ("aten.mul: 1.0 became 0.25", __file__)
    assert "* weight()" in linecache.getline(stale.file, stale.line)
    (told,) = [one for one in events if isinstance(one, ev.StepsStale)]
    assert (told.first_step, told.last_step) == (stale.first_step, stale.last_step)
    assert str(stale) in str(status)
    assert ran[stale.last_step] == "sentinel"  # the look itself is a step as in eager
    assert status.tier == "eager+graph"


def test_the_last_step_of_a_run_is_looked_at():
    _, status, _, ran = late(total=STEPS, at=STEPS - 2)
    assert ran[-1] == "sentinel"
    assert status.stale[0].last_step == STEPS - 1


def test_a_watched_value_that_changes_is_in_force_at_once_and_nothing_is_stale():
    def run(**settings):
        held = {"weight": 1.0}
        return trained(lambda: held["weight"], lambda: held.update(weight=0.25), **settings)

    losses, status, _, ran = run()
    assert losses == run(run="eager")[0]
    assert not status.stale
    assert len(status.dropped) == 1
    assert "held" in status.dropped[0]
    assert "aten.mul: 1.0 became 0.25" in status.dropped[0]
    assert "run" in ran[-8:]  # the very last may be a check


def test_a_value_that_changes_nothing_of_what_the_step_does_is_looked_at_three_times_and_then_let_be():
    notes = {"step": 0, "deep": False}

    def weight():
        return notes["step"] if notes["deep"] else 1.0

    def between(number):
        notes["step"] = number

    losses, status, _, ran = trained(weight, lambda: None, between=between, sentinel=0)
    assert not status.dropped
    assert status.tier == "eager+graph"
    assert ran.count("sentinel") == 3
    assert set(ran[20:]) == {"run"}


def test_without_a_share_of_time_nothing_is_looked_at_but_what_changes():
    *_, ran = trained(lambda: 1.0, lambda: None, sentinel=0)
    assert "sentinel" not in ran


@pytest.mark.parametrize("kind", ["slots", "namespace", "inherited", "default"])
def test_a_value_is_watched_where_people_keep_it(kind):
    import argparse
    import dataclasses

    @dataclasses.dataclass(slots=True)
    class Slots:
        weight: float = 1.0

    class Parent:
        weight = 1.0

    class Child(Parent):
        pass

    def run(**settings):
        held = {"slots": Slots(), "namespace": argparse.Namespace(weight=1.0), "inherited": Child()}.get(kind)
        Parent.weight = 1.0

        def read(table=[1.0]):  # noqa: B006
            return table[0]

        def change():
            if kind == "default":
                read.__defaults__[0][0] = 0.25
            else:
                (Parent if kind == "inherited" else held).weight = 0.25

        return trained(read if kind == "default" else lambda: held.weight, change, **settings)

    losses, status, *_ = run()
    assert losses == run(run="eager")[0]
    assert not status.stale
    assert len(status.dropped) == 1
