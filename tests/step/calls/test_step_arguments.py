"""What a step is called with: anything that is no tensor selects a recording; nothing is lost or mixed up."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from step_programs import PROVING, Classifier, batches
from torch.nn import functional as F


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)


def finish(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    y: torch.Tensor
    name: str = "plain"
    extra: dict | None = None


def calling(call, make_step, steps=20):
    """A program that calls its step as ``call(train_step, number, x, y)``."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(make_step(model, optimizer))
        for number, (x, y) in enumerate(batches(run.device, steps)):
            run.note(call(train_step, number, x, y))
        return model, optimizer

    return program


def with_options(model, optimizer):
    def train_step(x, y, weight=None, *, scale=1.0, kind="sum", smooth=False):
        losses = F.cross_entropy(model(x), y, reduction="none", label_smoothing=0.125 if smooth else 0.0)
        losses = losses if weight is None else losses * weight
        return finish(scale * (losses.sum() if kind == "sum" else losses.mean()), optimizer)

    return train_step


def weights(x):
    return torch.linspace(0.5, 1.5, len(x), device=x.device)


WAYS = {
    "positional": lambda step, n, x, y: step(x, y),
    "by name": lambda step, n, x, y: step(y=y, x=x),
    "None": lambda step, n, x, y: step(x, y, None, kind="mean"),
    "a tensor by name": lambda step, n, x, y: step(x, y, weight=weights(x) * n),
    "a float": lambda step, n, x, y: step(x, y, scale=0.5),
    "a bool": lambda step, n, x, y: step(x, y, smooth=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_arguments_given_in_any_way(both, way):
    assert both.equal(calling(WAYS[way], with_options), exact=True).calls() == PROVING


def test_strings_and_booleans_select_recordings(both):
    def call(step, number, x, y):
        return step(x, y, kind=("sum", "mean")[number % 2], smooth=number % 4 < 2)

    assert both.equal(calling(call, with_options, 64), exact=True, replays=40).calls() == 4 * PROVING


def test_a_float_that_changes_every_step_runs_without_a_graph(both):
    def call(step, number, x, y):
        return step(x, y, scale=1 + number / 32)

    run = both.alike(calling(call, with_options), exact=True)
    assert run.replays() == 0
    assert run.status().tier == "eager"


def nested(model, optimizer):
    def train_step(batch):
        if isinstance(batch, Batch):
            x, y = batch.x, batch.y
            x = x if batch.extra is None else x * batch.extra["scale"][0]
        else:
            x, (y, more) = batch["x"], batch["rest"]
            x = x + more["shift"]
        return finish(F.cross_entropy(model(x), y), optimizer)

    return train_step


NESTS = {
    "a dict": lambda step, n, x, y: step({"x": x, "rest": (y, {"shift": x.mean() * n, "name": "b"})}),
    "a dataclass": lambda step, n, x, y: step(Batch(x, y)),
    "a dataclass of more": lambda step, n, x, y: step(Batch(x, y, extra={"scale": [x.std(), "unit"]})),
}


@pytest.mark.parametrize("nest", NESTS)
def test_nested_batches(both, nest):
    assert both.equal(calling(NESTS[nest], nested), exact=True).calls() == PROVING


def of_two(model, optimizer):
    """Similarity: where both are one set, no row is its own partner."""

    def train_step(a, b):
        similar = model(a) @ model(b).T
        if a is b:
            similar = similar.masked_fill(torch.eye(len(a), dtype=torch.bool, device=a.device), 0)
        return finish(similar.square().mean(), optimizer)

    return train_step


@pytest.mark.parametrize("shared_first", [True, False])
def test_arguments_that_are_one_tensor_are_a_kind_of_calls(both, shared_first):
    def call(step, number, x, y):
        return step(x, x) if (number < 16) == shared_first else step(x, x.clone())

    run = both.equal(calling(call, of_two, 32), exact=True)
    assert run.calls() == 2 * PROVING


def test_parts_of_one_memory_are_captured(both):
    """``tokens[:, :-1], tokens[:, 1:]``, and slices that now and then meet."""

    def make(model, optimizer):
        def train_step(x, z):
            return finish((model(x) - model(z)).square().mean(), optimizer)

        return train_step

    def call(step, number, x, y):
        return step(x[number % 2 :][:2], x[2:4])

    assert both.equal(calling(call, make, 40), exact=True).calls() == PROVING


OWN = {
    "a part of a parameter": lambda model, optimizer: model.weight.detach()[:2],
    "a buffer": lambda model, optimizer: model.average,
    "a gradient": lambda model, optimizer: model.weight.grad,
    "optimizer state": lambda model, optimizer: optimizer.state[model.weight]["momentum_buffer"],
}


@pytest.mark.parametrize("own", OWN)
def test_an_argument_that_is_what_the_step_changes(both, own, caplog):
    """It is read once the step has changed it; such a call comes when the step is captured."""
    caplog.set_level("INFO")

    def program(run):
        model = torch.nn.Linear(8, 8, device=run.device)
        model.register_buffer("average", torch.zeros(8, 8, device=run.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.5)

        @run.loop(model, optimizer).step
        def train_step(x, other):
            model(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.average.lerp_(model.weight, 0.5)
            return other.square().sum()

        for number, (x, _) in enumerate(batches(run.device, 36)):
            found = OWN[own](model, optimizer) if number else model.weight.detach()[:2]
            run.note(train_step(x, found if number >= 20 and number % 2 else found.clone()))
        return model, optimizer

    both.equal(program, exact=True)
    assert sum("argument other is, or is a part of, a parameter" in one.getMessage() for one in caplog.records) == 1


def marked(model, optimizer):
    def train_step(x, y):
        return finish(F.cross_entropy(model(x), y) * getattr(x, "scale", 0.5), optimizer)

    return train_step


def with_scale(make):
    def call(step, number, x, y):
        if (scale := make(number)) is not None:
            x.scale = scale
        return step(x, y)

    return call


def test_what_a_program_puts_on_a_tensor_is_not_frozen(both):
    """From the call on that has it first; until then a recording runs."""
    program = calling(with_scale(lambda n: 1.0 + n / 64 if n >= 16 else None), marked, 32)
    run = both.alike(program, exact=True)
    assert "argument x has an attribute scale, whose value a recording would freeze" in run.declined[0].reason
    assert run.replays() > 0


def test_expanded_and_strided_batches(both):
    def call(step, number, x, y):
        return step(x[:1].expand(len(y), -1), y.repeat_interleave(2)[::2])

    both.equal(calling(call, with_options), exact=True)


def test_batches_on_the_host_are_brought_over(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            device = model.head.weight.device
            return finish(F.cross_entropy(model(x.to(device)), y.to(device, non_blocking=True)), optimizer)

        for x, y in batches("cpu"):
            run.note(train_step(x, y))
        return model, optimizer

    assert both.equal(program, exact=True).calls() == PROVING


def test_a_batch_that_the_user_overwrites_for_the_next_step(both):
    """One buffer that a loader fills again and again."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            return finish(F.cross_entropy(model(x), y), optimizer)

        buffer, target = torch.zeros(6, 8, device=run.device), torch.zeros(6, dtype=torch.long, device=run.device)
        for x, y in batches(run.device):
            buffer.copy_(x)
            target.copy_(y)
            run.note(train_step(buffer, target))
        return model, optimizer

    both.equal(program, exact=True)


def test_autocast_around_the_call_selects_a_recording(both):
    def call(step, number, x, y):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=number % 2 == 1):
            return step(x, y)

    run = both.equal(calling(call, with_options, 40), exact=True, replays=24)
    assert run.calls() == 2 * PROVING


def test_an_error_of_the_users_own_reaches_them_unchanged(both):
    class OwnError(Exception):
        pass

    def make(model, optimizer):
        def train_step(x, y, *, fail=False):
            if fail:
                raise OwnError("as it was")
            return finish(F.cross_entropy(model(x), y), optimizer)

        return train_step

    def call(step, number, x, y):
        if number in (1, 2, 3, 4, 5, 9):
            with pytest.raises(OwnError, match=r"^as it was$"):
                step(x, y, fail=True)
        return step(x, y)

    both.equal(calling(call, make, 24), exact=True)


def test_a_wrong_shape_raises_what_eager_raises_and_the_recording_stays(both):
    def call(step, number, x, y):
        if number >= 10:
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
                step(x[:, :5], y)
        return step(x, y)

    run = both.equal(calling(call, with_options, 24), exact=True)
    assert run.dropped == []


def with_a_number(model, optimizer):
    def train_step(x, y, number, update=True):
        loss = F.cross_entropy(model(x), y) * (1 + int(number) / 64)
        loss.backward()
        if update:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return train_step


RUNNING = {
    "an int": lambda n: n,
    "a float": lambda n: n / 4,
    "an int64": np.int64,
}


@pytest.mark.parametrize("named", RUNNING)
def test_a_number_that_is_another_one_in_each_call_is_named(both, caplog, named):
    caplog.set_level("INFO")
    program = calling(lambda step, n, x, y: step(x, y, RUNNING[named](n)), with_a_number, 60)
    told = both.declines(program, reason=f"argument number is {named}, and another one in each of 16 calls")
    assert "each value selects a recording of its own" in told.reason
    assert "torch.tensor(number)" in told.hint
    assert sum("argument number is" in one.getMessage() for one in caplog.records) == 1
