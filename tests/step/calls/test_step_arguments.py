"""What a step is called with: anything that is no tensor selects a recording; nothing is lost or mixed up."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import torch
from step_programs import PROVING, Classifier, Pictures, batches, images
from torch.nn import functional as F

from hotloop._torch.dynamo import attributes_of


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


def test_an_argument_that_sometimes_is_none(both):
    def call(step, number, x, y):
        return step(x, y, weights(x) if number % 2 else None)

    assert both.equal(calling(call, with_options, 40), exact=True, replays=28).calls() == 2 * PROVING


def test_a_float_that_changes_every_step_runs_without_a_graph(both):
    def call(step, number, x, y):
        return step(x, y, scale=1 + number / 32)

    run = both.alike(calling(call, with_options), exact=True)
    assert run.replays() == 0
    assert run.status().tier == "eager"


def test_more_values_than_there_is_room_for(both):
    def call(step, number, x, y):
        return step(x, y, scale=1 + number % 10 / 16)

    run = both.alike(calling(call, with_options, 100), exact=True)
    assert run.replays() == 8 * 4


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
    """Similarity: where both are one set, or parts of one, no row is its own partner."""

    def train_step(a, b):
        similar = model(a) @ model(b).T
        if a is b:
            similar = similar.masked_fill(torch.eye(len(a), dtype=torch.bool, device=a.device), 0)
        elif a.data_ptr() == b.data_ptr():
            similar = similar * 2
        return finish(similar.square().mean(), optimizer)

    return train_step


SHARED = {
    "one object": lambda x: (x, x),
    "two objects": lambda x: (x, x.detach()),
    "a part first": lambda x: (x[:2], x),
    "a part": lambda x: (x, x[:2]),
}


@pytest.mark.parametrize("shared_first", [True, False])
@pytest.mark.parametrize("how", SHARED)
def test_arguments_that_are_one_tensor_are_a_kind_of_calls(both, how, shared_first):
    def call(step, number, x, y):
        return step(*SHARED[how](x)) if (number < 16) == shared_first else step(*map(torch.clone, SHARED[how](x)))

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

    run = both.equal(calling(call, make, 40), exact=True)
    assert run.calls() == 2 * PROVING


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


SCALES = {
    "is added": lambda n: 2.0 if n >= 16 else None,
    "is another one": lambda n: 2.0 if n >= 16 else 0.25,
    "is of another type": lambda n: True if n >= 16 else 1.0,
}


@pytest.mark.parametrize("how", SCALES)
def test_what_is_on_a_tensor_tells_calls_apart(both, how):
    run = both.equal(calling(with_scale(SCALES[how]), marked, 32), exact=True)
    assert run.calls() == 2 * PROVING


def test_what_is_on_a_tensor_and_cannot_be_followed_is_named(both):
    told = both.declines(
        calling(with_scale(lambda n: torch.tensor(1.0 + n)), marked),
        reason="argument x has an attribute scale, a torch.Tensor, whose value a recording would freeze",
    )
    assert "an argument of its own" in told.hint


def test_what_is_on_a_tensor_and_new_in_each_call_is_named(both):
    program = calling(with_scale(lambda n: 1.0 + n / 64), marked, 40)
    both.declines(program, reason="argument x has an attribute scale, another one in each of 16 calls")


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


def test_a_numpy_argument_is_not_frozen(both):
    """Its values cannot be compared from call to call, so no two calls are known to be alike."""

    def make(model, optimizer):
        def train_step(x, y, scale):
            return finish(F.cross_entropy(model(x), y) * torch.from_numpy(scale).to(x), optimizer)

        return train_step

    def call(step, number, x, y):
        return step(x, y, np.asarray(1 + number / 32))

    run = both.alike(calling(call, make), exact=True)
    assert run.replays() == 0


@pytest.mark.parametrize("tier", ["eager+graph", "aot_eager"])
def test_an_argument_whose_comparison_fails_ends_no_run(both, tier):
    class Table:
        """Compares what it holds, as a program's own table of arrays does."""

        def __init__(self, scale):
            self.scales = np.asarray([scale, 1.0])

        def __hash__(self):
            return 1

        def __eq__(self, other):
            return self.scales == other.scales

    def make(model, optimizer):
        def train_step(x, y, table):
            return finish(F.cross_entropy(model(x), y) * float(table.scales[0]), optimizer)

        return train_step

    run = both.alike(calling(lambda step, n, x, y: step(x, y, Table(1 + n / 32)), make), asked=tier)
    assert run.replays() == 0
    if tier == "eager+graph":
        (told,) = run.declined
        assert told.reason == (
            "argument table cannot be compared from call to call: it is a "
            "test_step_arguments.test_an_argument_whose_comparison_fails_ends_no_run.<locals>.Table"
        )


class Pair:
    def __init__(self, x, y):
        self.x, self.y = x, y


FRESH = {
    "a Pair": Pair,
    "a function": lambda x, y: lambda: (x, y),
    "a list_iterator": lambda x, y: iter([x, y]),
}


def of_a_fresh_object(model, optimizer):
    def train_step(batch):
        if isinstance(batch, Pair):
            x, y = batch.x, batch.y
        else:
            x, y = batch() if callable(batch) else batch
        return finish(F.cross_entropy(model(x), y), optimizer)

    return train_step


@pytest.mark.parametrize("named", FRESH)
def test_an_object_that_is_another_one_in_each_call_is_named(both, named):
    program = calling(lambda step, n, x, y: step(FRESH[named](x, y)), of_a_fresh_object, 40)
    told = both.declines(program, reason=f"argument batch is {named}, and another one in each of 16 calls")
    assert len(both.run(program, "eager+graph")[0].declined) == 1
    assert "a dict or a dataclass" in told.hint


def test_a_few_objects_that_come_again_are_kinds_of_calls(both):
    def make(model, optimizer):
        def train_step(x, y, loss):
            return finish(loss(model(x), y), optimizer)

        return train_step

    losses = [functools.partial(F.cross_entropy, label_smoothing=one / 16) for one in range(3)]
    run = both.equal(calling(lambda step, n, x, y: step(x, y, losses[n % 3]), make, 60), exact=True)
    assert run.calls() == 3 * PROVING


def test_autocast_around_the_call_selects_a_recording(both):
    def call(step, number, x, y):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=number % 2 == 1):
            return step(x, y)

    run = both.equal(calling(call, with_options, 40), exact=True, replays=24)
    assert run.calls() == 2 * PROVING


def test_a_step_called_under_no_grad_by_mistake_raises_what_eager_raises(both):
    def call(step, number, x, y):
        if number in (3, 8, 9, 10, 15):
            with pytest.raises(RuntimeError, match="does not require grad"), torch.no_grad():
                step(x, y)
        return step(x, y)

    run = both.equal(calling(call, with_options, 24), exact=True)
    assert run.dropped == []


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


def test_a_method_as_a_step(both):
    class Trainer:
        def __init__(self, device):
            self.model = Pictures().to(device)
            self.optimizer = adamw(self.model)
            self.scale = 0.5

        def train_step(self, x, y):
            return finish(self.scale * F.cross_entropy(self.model(x), y), self.optimizer)

    def program(run):
        trainer = Trainer(run.device)
        train_step = run.loop(trainer.model, trainer.optimizer).step(trainer.train_step)
        for number, (x, y) in enumerate(images(run.device, 34)):
            trainer.scale = 0.5 if number < 14 else 2.0
            run.note(train_step(x, y))
        return trainer.model, trainer.optimizer

    run = both.equal(program, exact=True)
    assert len(run.dropped) == 1
    assert "scale" in run.dropped[0]


def test_a_callable_object_as_a_step(both):
    class Step:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer
            self.__name__ = "train_step"

        def __call__(self, x, y):
            return finish(F.cross_entropy(self.model(x), y), self.optimizer)

    both.equal(calling(lambda step, n, x, y: step(x, y), Step), exact=True)


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


def test_a_text_that_is_another_one_in_each_call_is_named(both):
    def call(step, number, x, y):
        return step(x, y, str(number))

    told = both.declines(calling(call, with_a_number, 40), reason="argument number is a str, and another one")
    assert "torch.tensor" not in told.hint


def test_a_flag_beside_shapes_that_are_all_new_is_not_blamed(both):
    def call(step, number, x, y):
        more = torch.zeros(number, x.shape[1], device=x.device)
        return step(torch.cat([x, more]), torch.cat([y, y.new_zeros(number)]), number % 3, number % 2 == 1)

    run = both.alike(calling(call, with_a_number, 60))
    assert not run.declined


def test_a_number_that_moves_now_and_then_is_not_blamed(both):
    run = both.alike(calling(lambda step, n, x, y: step(x, y, n // 15), with_a_number, 60))
    assert not run.declined
    assert run.replays()


def test_only_what_torchs_compiler_notes_on_a_tensor_is_left_out():
    """Whatever had dynamo in its name was: a recording was replayed with its old value."""
    tensor = torch.ones(2)
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    assert vars(tensor)
    tensor.aerodynamo = 2.0
    assert attributes_of(tensor) == {"aerodynamo": 2.0}
