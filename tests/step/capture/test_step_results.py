"""What a step gives back and leaves: results that may be held, gradients, and a program that goes on around it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types

import pytest
import torch
from step_programs import PROVING, Classifier, batches, plain_step
from torch.nn import functional as F

import hotloop
from hotloop.errors import ConfigError


def adamw(*modules):
    return torch.optim.AdamW([one for module in modules for one in module.parameters()], lr=2**-6, fused=True)


def test_tensors_returned_by_earlier_steps_keep_their_values(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return {"loss": loss.detach(), "logits": logits.detach(), "input": x, "weight": model.head.weight.detach()}

        held, at_once = [], []
        for x, y in batches(run.device):
            result = train_step(x, y)
            held.append(result)
            at_once.append({name: one.clone() for name, one in result.items()})
        for now, then in zip(held, at_once, strict=True):
            for name in ("loss", "logits", "input"):
                assert torch.equal(now[name], then[name])
        return {"model": model, "at once": at_once}

    both.equal(program, exact=True)


def test_results_do_not_keep_the_graph_of_the_step_alive(both):
    """A replay's loss has no history; the last real step's has, as eager's."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            last = run.note(train_step(x, y))
        if run.owned:
            assert last.grad_fn is None
        return model

    both.equal(program, exact=True)


def test_gradients_read_between_two_decorated_steps(both):
    """backward in one step, the optimizer in another, clipping by hand between them."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        loop = run.loop(model, optimizer)

        @loop.step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        @loop.step
        def update():
            optimizer.step()
            optimizer.zero_grad()

        for x, y in batches(run.device, 24):
            run.note(train_step(x, y))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.125)
            update()
        return model, optimizer

    run = both.equal(program, exact=True, replays=24)
    assert run.calls("train_step") == run.calls("update") == PROVING


def test_two_decorated_steps_share_a_loop_as_in_a_gan(both):
    def program(run):
        generator, critic = torch.nn.Linear(3, 8).to(run.device), Classifier().to(run.device)
        optimizers = [adamw(generator), adamw(critic)]
        loop, device = run.loop([generator, critic], optimizers), run.device

        def score(x):
            return critic(x)[:, 0]

        @loop.step
        def critic_step(x):
            with torch.no_grad():
                made = generator(torch.randn(len(x), 3, device=x.device))
            loss = F.softplus(score(made)).mean() + F.softplus(-score(x)).mean()
            optimizers[1].zero_grad()
            loss.backward()
            optimizers[1].step()
            return loss

        @loop.step
        def generator_step(size):
            loss = F.softplus(-score(generator(torch.randn(size, 3, device=device)))).mean()
            optimizers[0].zero_grad()
            loss.backward()
            optimizers[0].step()
            return loss

        for x, _ in batches(run.device, 24):
            run.note(critic_step(x))
            run.note(generator_step(len(x)))
        return generator, critic, *optimizers

    run = both.equal(program, exact=True, replays=24)
    assert run.replays("critic_step") >= 12
    assert run.replays("generator_step") >= 12


class Outcome:
    def __init__(self, loss):
        self.loss = loss


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss):
        self.loss = loss


@dataclasses.dataclass
class Carrying:
    """Its field is plain; what its author sets besides is an object that travels along."""

    name: str = "loss"


def carrying(loss):
    made = Carrying()
    made.outcome = Outcome(loss)
    return made


HOLDERS = {
    "an Outcome": (Outcome, lambda one: one.loss),
    "a SimpleNamespace": (lambda loss: types.SimpleNamespace(loss=loss), lambda one: one.loss),
    "a Slotted": (Slotted, lambda one: one.loss),
    "a deque": (lambda loss: collections.deque([loss]), lambda one: one[0]),
    "a set": (lambda loss: {loss}, lambda one: next(iter(one))),
    "a partial": (lambda loss: functools.partial(torch.clone, loss), lambda one: one()),
    "a function": (lambda loss: lambda: loss, lambda one: one()),
    "a builtin_function_or_method": (lambda loss: loss.clone, lambda one: one()),
    "an Outcome (result.held[1].of)": (
        lambda loss: {"held": (loss, collections.UserDict(of=Outcome(loss)))},
        lambda one: one["held"][1]["of"].loss,
    ),
    "an Outcome (result.outcome)": (carrying, lambda one: one.outcome.loss),
}


@pytest.mark.parametrize("named", HOLDERS)
def test_what_is_not_copied_out_is_declined_by_name(both, named):
    """The tensors in it would be the recording's own, which the next replay overwrites."""
    make, loss_in = HOLDERS[named]

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return make(loss.detach())

        held = [train_step(x, y) for x, y in batches(run.device)]
        return {"model": model, "losses": [loss_in(one) for one in held]}

    reason = f"the step returns {named}: the next replay would overwrite"
    both.declines(program, reason=reason, hint="a dict, a list, a tuple or a dataclass")


class Mode(enum.Enum):
    TRAIN = "train"


def test_plain_values_functions_and_what_there_was_before_may_be_returned(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)
        batch_of_own = Outcome(None)

        @run.loop(model, optimizer).step
        def train_step(x, y, one):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            plain = (None, True, 3, "a", b"b", Mode.TRAIN, loss.dtype, loss.device, x.shape, range(2), torch.strided)
            return loss, plain, adamw, torch.max, F.cross_entropy, dict, model.head, one

        for x, y in batches(run.device):
            loss, *_, head, one = train_step(x, y, batch_of_own)
            assert head is model.head
            assert one is batch_of_own
            run.note(loss)
        return model

    both.equal(program, exact=True)


def test_an_argument_that_is_returned_is_the_callers_own(both):
    """On the host where it was there, and what the caller writes into it afterwards is seen."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(batch, y):
            loss = F.cross_entropy(model(batch["x"].to(run.device)), y.to(run.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return {"loss": loss, "labels": y, "inputs": [batch["x"], batch["x"] * 1]}

        held = []
        for x, y in batches("cpu"):
            result = train_step({"x": x}, y)
            assert result["labels"] is y
            assert result["inputs"][0] is x
            x.add_(1)
            held.append(result)
        return {"model": model, "held": [one["inputs"] for one in held], "losses": [one["loss"] for one in held]}

    both.equal(program, exact=both.device.type == "cpu")


def test_a_parameter_that_is_returned_is_the_parameter(both):
    """Who gets it may write into it: CLIP's logit_scale is clamped so, outside of the model."""

    def program(run):
        model = Classifier().to(run.device)
        model.scale = torch.nn.Parameter(torch.ones((), device=run.device))
        optimizer = adamw(model)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x) * model.scale, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss, model.scale, model.head.bias.data[:2]

        for x, y in batches(run.device):
            loss, scale, part = train_step(x, y)
            assert scale is model.scale
            with torch.no_grad():
                scale.clamp_(0.75, 0.875)
                part.mul_(0.5)
            run.note(loss)
        return model, optimizer

    both.equal(program, exact=True)


def a_generator(model):
    def train_step(x):
        yield model(x)

    return train_step


def a_coroutine(model):
    async def train_step(x):
        return model(x)

    return train_step


def an_object(model):
    class Step:
        def __call__(self, x):
            yield model(x)

    return Step()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (a_generator, r"a_generator\.<locals>\.train_step is a generator function"),
        (a_coroutine, r"a_coroutine\.<locals>\.train_step is an async function"),
        (an_object, r"an_object\.<locals>\.Step is a generator function"),
        (lambda model: functools.partial(a_generator(model)), "partial is a generator function"),
    ],
)
@pytest.mark.parametrize("run", ["eager", "auto"])
def test_a_step_whose_call_runs_none_of_it_is_refused(make, said, run):
    model = Classifier()
    loop = hotloop.Loop(model, adamw(model), run=run)
    with pytest.raises(ConfigError, match=said):
        loop.step(make(model))


def test_a_decorator_with_parentheses_is_told_so():
    model = Classifier()
    loop = hotloop.Loop(model, adamw(model), run="aot_eager")
    with pytest.raises(ConfigError, match="without parentheses"):
        loop.step()


@pytest.mark.parametrize("given", [lambda gradient: gradient, lambda gradient: gradient[:2]], ids=["whole", "a part"])
def test_a_step_that_returns_a_gradient_is_not_captured(both, given):
    """Who clips what it returns means the gradient, and who keeps it its values."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            F.cross_entropy(model(x), y).backward()
            return given(model.head.weight.grad)

        for x, y in batches(run.device):
            train_step(x, y).clamp_(-(2**-6), 2**-6)
            optimizer.step()
            optimizer.zero_grad()
        return model

    both.declines(program, reason="the step returns a gradient, or a part of one: return a copy")
