"""Averages of weights in a step: torch's with a count on the host, and those of libraries with a count in Python."""

from __future__ import annotations

import functools

import pytest
import torch
from step_programs import Pictures, images
from torch.nn import functional as F
from torch.optim import swa_utils

EMA = swa_utils.get_ema_multi_avg_fn(0.75)


def ema(model, device=None, **settings):
    return swa_utils.AveragedModel(model, device, multi_avg_fn=EMA, **settings)


MAKERS = {
    "ema": ema,
    "ema with buffers": functools.partial(ema, use_buffers=True),
    "ema one by one": functools.partial(swa_utils.AveragedModel, avg_fn=swa_utils.get_ema_avg_fn(0.75)),
    "equal weights": swa_utils.AveragedModel,
    "equal weights by foreach": functools.partial(
        swa_utils.AveragedModel, multi_avg_fn=swa_utils.get_swa_multi_avg_fn()
    ),
}


def training(make, between=None, steps=24, make_model=Pictures, data=images):
    """Return a program that updates an average within its step; ``between`` runs after each step."""

    def program(run):
        live = make_model().to(run.device)
        optimizer = torch.optim.AdamW(live.parameters(), lr=2**-5, fused=True)
        average = make(live)

        @run.loop(live, optimizer, state=average).step
        def train_step(x, y):
            loss = F.cross_entropy(live(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(live)
            return loss

        for number, (x, y) in enumerate(data(run.device, steps)):
            run.note(train_step(x, y))
            if between is not None:
                run.note(between(average, number))
        return live, optimizer, average

    return program


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_an_average_that_counts_on_the_host_is_captured(both, make):
    run = both.equal(training(make), exact=True, replays=14)
    assert run.dropped == []


def test_its_checkpoint_has_the_count_on_the_host_as_eager_has_it(both):
    kept = []

    def between(average, number):
        document = average.state_dict()
        count = document["n_averaged"]
        assert type(count) is torch.Tensor
        assert count.device.type == "cpu"
        assert int(count) == number + 1
        kept.append(average)
        return count.clone()

    both.equal(training(ema, between), exact=True, replays=14)
    count = kept[-1].n_averaged
    assert type(count) is torch.Tensor, "the loop was closed"
    assert count.device.type == "cpu"
    assert not kept[-1]._state_dict_hooks


def test_an_average_that_begins_later_is_captured_then(both):
    """The first update copies and asks: what is recorded is a later one."""

    def program(run):
        live = Pictures().to(run.device)
        optimizer = torch.optim.AdamW(live.parameters(), lr=2**-5, fused=True)
        average = ema(live)
        begun = {"average": False}

        @run.loop(live, optimizer, state=average).step
        def train_step(x, y):
            loss = F.cross_entropy(live(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if begun["average"]:
                average.update_parameters(live)
            return loss

        for number, (x, y) in enumerate(images(run.device, 36)):
            begun["average"] = number >= 14
            run.note(train_step(x, y))
        return live, optimizer, average

    both.equal(program, exact=True, replays=20)
