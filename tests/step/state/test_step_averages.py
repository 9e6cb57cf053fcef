"""Averages of weights in a step: torch's with a count on the host, and those of libraries with a count in Python."""

from __future__ import annotations

import copy
import functools
import io
import pickle

import pytest
import torch
from step_programs import Classifier, Pictures, batches, images
from torch import nn
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


def written(average):
    file = io.BytesIO()
    torch.save(average.module.state_dict(), file)  # the class of the model is this file's: no pickle of it
    count = pickle.loads(pickle.dumps(average.n_averaged))
    hooks = pickle.dumps(average._state_dict_hooks)
    assert b"hotloop.step" not in hooks
    return count


@pytest.mark.parametrize("taken", [lambda average: copy.deepcopy(average).n_averaged, written])
def test_its_copies_count_on_the_host_as_well(both, taken):
    def between(average, number):
        count = taken(average)
        assert type(count) is torch.Tensor
        assert count.device.type == "cpu"
        return count.clone()

    both.equal(training(ema, between), exact=True, replays=14)


def test_a_copy_goes_on_by_itself(both):
    """What was copied in the middle of a run is updated outside of every loop."""
    copies = {}

    def between(average, number):
        if number == 15:
            copies[average] = copy.deepcopy(average)
        if average not in copies:
            return None
        copies[average].update_parameters(average.module)
        return [one.clone() for one in copies[average].state_dict().values()]

    both.equal(training(ema, between), exact=True, replays=14)


@pytest.mark.parametrize(
    "change",
    [
        lambda average, start: average.load_state_dict(start),
        lambda average, start: average.n_averaged.zero_(),
        lambda average, start: average.n_averaged.fill_(0),
        lambda average, start: average.n_averaged.copy_(torch.zeros((), dtype=torch.long)),
        lambda average, start: setattr(average, "n_averaged", torch.zeros_like(start["n_averaged"])),
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_a_count_that_is_set_back_begins_anew(both, change, named):
    start, make = {}, functools.partial(ema, device=both.device) if named else ema

    def between(average, number):
        if number == 0:
            start[id(average)] = {
                key: value.clone().zero_() if key == "n_averaged" else value.clone()
                for key, value in average.state_dict().items()
            }
        if number == 15:
            change(average, start[id(average)])
        return [one.clone() for one in average.state_dict().values()]

    run = both.equal(training(make, between, steps=30), exact=True, replays=14)
    assert run.dropped, "the recording knew the old count"


def test_an_average_goes_on_in_a_new_loop(both):
    """The count is given back with the first loop, and moved once more by the second."""

    def program(run):
        live = Pictures().to(run.device)
        optimizer = torch.optim.AdamW(live.parameters(), lr=2**-5, fused=True)
        average = ema(live)
        for part in range(2):
            owner = run.loop(live, optimizer, state=average)

            @owner.step
            def train_step(x, y):
                loss = F.cross_entropy(live(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                average.update_parameters(live)
                return loss

            for x, y in images(run.device, 24):
                run.note(train_step(x, y))
            if owner.owner is not None:
                owner.owner.close()
            run.note(average.n_averaged)
            assert type(average.n_averaged) is torch.Tensor, part
        return live, optimizer, average

    both.equal(program, exact=True, replays=28)


def library_average(make, update, *, state=True, outside=False):
    """Return a program with a library's average: updated within the step, or after it."""

    def program(run):
        live = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(live.parameters(), lr=2**-5, fused=True)
        average = make(live)

        @run.loop(live, optimizer, **({"state": average} if state else {})).step
        def train_step(x, y):
            loss = F.cross_entropy(live(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if not outside:
                update(average, live)
            return loss

        for x, y in batches(run.device, 24):
            run.note(train_step(x, y))
            if outside:
                update(average, live)
        kept = average.shadow_params if hasattr(average, "shadow_params") else average.parameters()
        return live, optimizer, [one.detach().clone() for one in kept]

    return program


class NumberedAverage:
    """As diffusers' EMAModel: a number of updates in Python, which the decay is computed from."""

    def __init__(self, model):
        self.optimization_step, self.shadow_params = 0, [one.detach().clone() for one in model.parameters()]

    @torch.no_grad()
    def update(self, model):
        self.optimization_step += 1
        decay = min(0.75, self.optimization_step / (10 + self.optimization_step))
        for mine, theirs in zip(self.shadow_params, model.parameters(), strict=True):
            mine.sub_((1 - decay) * (mine - theirs))


class ForeachAverage(nn.Module):
    """As timm's ModelEmaV3: parameters and buffers of the state_dict, with one constant decay."""

    def __init__(self, model):
        super().__init__()
        self.module = copy.deepcopy(model).eval()

    @torch.no_grad()
    def update(self, model):
        pairs = list(zip(self.module.state_dict().values(), model.state_dict().values(), strict=True))
        floats = [pair for pair in pairs if pair[0].is_floating_point()]
        for mine, theirs in pairs:
            if not mine.is_floating_point():
                mine.copy_(theirs)
        torch._foreach_lerp_([mine for mine, _ in floats], [theirs for _, theirs in floats], weight=0.25)


class CountingAverage(nn.Module):
    """As ema-pytorch's EMA: a count in a buffer, which the host reads at each update."""

    def __init__(self, model):
        super().__init__()
        self.ema_model = copy.deepcopy(model).requires_grad_(False)
        self.register_buffer("step", torch.tensor(0, device=next(model.parameters()).device))

    def update(self, model):
        decay = min(0.75, 1 - (1 + self.step.item()) ** -(2 / 3))
        self.step += 1
        for mine, theirs in zip(self.ema_model.parameters(), model.parameters(), strict=True):
            mine.data.lerp_(theirs.data, 1 - decay)


class Teacher(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.net = copy.deepcopy(model).requires_grad_(False)


def in_place(teacher, model):
    for mine, theirs in zip(teacher.net.parameters(), model.parameters(), strict=True):
        mine.data.mul_(0.75).add_(theirs.data, alpha=0.25)


def rebound(teacher, model):
    for mine, theirs in zip(teacher.net.parameters(), model.parameters(), strict=True):
        mine.data = mine.data * 0.75 + theirs.data * 0.25


def copied_into(teacher, model):
    for mine, theirs in zip(teacher.net.parameters(), model.parameters(), strict=True):
        mine.data.copy_(mine.data * 0.75 + theirs.data * 0.25)


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(
    ("make", "update"),
    [(ForeachAverage, ForeachAverage.update), (Teacher, in_place), (Teacher, copied_into)],
)
def test_an_average_that_does_not_count_is_captured(both, make, update, state):
    both.equal(library_average(make, update, state=state), exact=True, replays=14)


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize(
    ("make", "reason", "hint"),
    [
        (NumberedAverage, "changes Python state", "call what counts outside the step"),
        (CountingAverage, "a value is read on the host", "outside"),
    ],
)
def test_one_that_counts_on_the_host_is_declined_and_runs_after_the_step(both, make, reason, hint, state):
    both.declines(library_average(make, make.update, state=state), reason=reason, hint=hint)
    both.equal(library_average(make, make.update, state=state, outside=True), exact=True, replays=14)


@pytest.mark.parametrize(("state", "reason"), [(True, "other memory"), (False, "changes Python state")])
def test_a_teacher_whose_parameters_get_other_memory_is_declined(both, state, reason):
    """Nobody but the loop over its parameters reads an unlisted one: its parts have no names in the program."""
    told = both.declines(library_average(Teacher, rebound, state=state), reason=reason, hint=".copy_(")
    assert "net.inner" in told.reason


def test_an_average_that_nobody_named_is_declined_with_a_remedy(both):
    def program(run, *, named):
        live = Pictures().to(run.device)
        optimizer = torch.optim.AdamW(live.parameters(), lr=2**-5, fused=True)
        average = ema(live)

        @run.loop(live, optimizer, **({"state": average} if named else {})).step
        def train_step(x, y):
            loss = F.cross_entropy(live(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(live)
            return loss

        for x, y in images(run.device, 24):
            run.note(train_step(x, y))
        return live, optimizer, average

    run = both.alike(functools.partial(program, named=False), exact=True)
    assert "state=average" in run.declined[0].hint
    both.equal(functools.partial(program, named=True), exact=True, replays=14)


def test_equal_weights_of_sixteen_bits_are_declined_with_a_remedy(both):
    def narrow():
        return Classifier().to(torch.bfloat16)

    def data(device, steps):
        return [(x.bfloat16(), y) for x, y in batches(device, steps)]

    by_foreach = MAKERS["equal weights by foreach"]
    told = both.alike(training(by_foreach, make_model=narrow, data=data), exact=True).declined[0]
    assert "get_swa_avg_fn()" in told.hint
    remedied = functools.partial(swa_utils.AveragedModel, avg_fn=swa_utils.get_swa_avg_fn())
    both.equal(training(remedied, make_model=narrow, data=data), exact=True, replays=14)


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
