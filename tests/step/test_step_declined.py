"""What no recording can hold: the capture is declined with its cause, and training goes on as eager does."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from step_programs import PROVING, Classifier, batches
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


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


# -- values read on the host -------------------------------------------------------------------------------------------


def item(logits, y):
    loss = F.cross_entropy(logits, y)
    return loss * 2 if loss.item() > 1.5 else loss


def number(logits, y):
    loss = F.cross_entropy(logits, y)
    return loss * float(loss.detach())


def printing(logits, y):
    loss = F.cross_entropy(logits, y)
    print(loss.detach())
    return loss


def branching(logits, y):
    loss = F.cross_entropy(logits, y)
    if loss > 1.5:
        loss = loss * 2
    return loss


def listing(logits, y):
    weight = max(logits.detach()[:, 0].tolist())
    return F.cross_entropy(logits, y) * (1 + weight / 8)


def to_numpy(logits, y):
    weight = logits.detach().cpu().numpy().max()
    return F.cross_entropy(logits, y) * (1 + float(weight) / 8)


def nonzero(logits, y):
    rows = (y > 0).nonzero().flatten()
    return F.cross_entropy(logits[rows], y[rows])


def masked(logits, y):
    chosen = y > 0
    return F.cross_entropy(logits[chosen], y[chosen])


def selecting(logits, y):
    return F.cross_entropy(logits, y) + logits.masked_select(logits > 0).sum() / 64


def unique(logits, y):
    return F.cross_entropy(logits, y) + logits[:, y.unique()].square().mean()


READS = {
    item: ("read on the host", "loss.item()"),
    number: ("read on the host", "float(loss.detach())"),
    printing: ("read on the host", "print(loss.detach())"),
    branching: ("read on the host", "if loss > 1.5"),
    to_numpy: ("", "numpy()"),
    listing: ("read on the host (tolist)", "tolist()"),
    nonzero: ("depends on the data: nonzero", "nonzero()"),
    masked: ("depends on the data: index", "logits[chosen]"),
    selecting: ("depends on the data: masked_select", "masked_select"),
    unique: ("depends on the data", "unique()"),
}


@pytest.mark.parametrize("loss_of", READS, ids=lambda one: one.__name__)
def test_a_value_that_python_waits_for_declines_with_the_line(both, loss_of):
    reason, source = READS[loss_of]
    told = both.declines(declining(using(loss_of)), reason=reason, source=source, hint="outside the step")
    assert told.line


# -- optimizers, scalers, random numbers -------------------------------------------------------------------------------


def test_lbfgs(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=2**-6, max_iter=3)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            def closure():
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                return loss

            return optimizer.step(closure)

        for x, y in batches(run.device, 12):
            run.note(train_step(x, y))
        return model, optimizer

    both.declines(program, reason="closure", source="optimizer.step(closure)")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_inside_checkpointing(both, use_reentrant):
    def program(run):
        first, model = nn.Linear(8, 8).to(run.device), Classifier(dropout=0.5).to(run.device)
        optimizer = torch.optim.AdamW([*first.parameters(), *model.parameters()], lr=2**-6, fused=True)

        @run.loop([first, model], optimizer).step
        def train_step(x, y):
            return finish(F.cross_entropy(checkpoint(model, first(x), use_reentrant=use_reentrant), y), optimizer)

        for x, y in batches(run.device, 12):
            run.note(train_step(x, y))
        return first, model, optimizer

    told = both.declines(program, reason="random numbers are drawn inside activation checkpointing")
    assert told.line


# -- arguments and results ---------------------------------------------------------------------------------------------


def test_an_argument_that_is_written_into(both):
    def make(model, optimizer):
        def train_step(x, y):
            x.mul_(0.5)
            return finish(F.cross_entropy(model(x), y), optimizer)

        return train_step

    both.declines(declining(make), reason="writes into its own argument", source="x.mul_(0.5)")


def test_an_argument_that_requires_gradients(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            return finish(F.cross_entropy(model(x), y), optimizer)

        slopes = []
        for x, y in batches(run.device, 12):
            x.requires_grad_()
            run.note(train_step(x, y))
            slopes.append(x.grad)
        return {"model": model, "optimizer": optimizer, "slopes": slopes}

    both.declines(program, reason="an argument requires gradients")


def test_a_python_float_returned(both):
    def make(model, optimizer):
        def train_step(x, y):
            return finish(F.cross_entropy(model(x), y), optimizer).item()

        return train_step

    both.declines(declining(make), reason="read on the host", source=".item()")


def test_a_python_float_returned_that_comes_from_no_tensor(both):
    def make(model, optimizer):
        def train_step(x, y):
            return finish(F.cross_entropy(model(x), y), optimizer), optimizer.param_groups[0]["lr"]

        return train_step

    both.declines(declining(make), reason="returns a Python number", hint="return a tensor")


class Pair(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    parts: dict
    note: str = "as it was"


RESULTS = {
    "nothing": lambda loss, logits: None,
    "a dict": lambda loss, logits: {"loss": loss, "deep": {"logits": logits}},
    "nested": lambda loss, logits: (loss, [logits, (logits.sum(), None, "text")]),
    "a named tuple": Pair,
    "a dataclass": lambda loss, logits: Output(loss, {"logits": logits}),
    "one tensor twice": lambda loss, logits: (loss, loss),
    "a view and its base": lambda loss, logits: (logits, logits[0], logits.T),
    "a bool": lambda loss, logits: (loss, True),
}


@pytest.mark.parametrize("shape", RESULTS)
def test_results_of_any_structure_are_given_as_eager_gives_them(both, shape):
    made = RESULTS[shape]

    def make(model, optimizer):
        def train_step(x, y):
            logits = model(x)
            loss = finish(F.cross_entropy(logits, y), optimizer)
            return made(loss.detach(), logits.detach())

        return train_step

    kept = []

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        train_step = run.loop(model, optimizer).step(make(model, optimizer))
        results = [train_step(x, y) for x, y in batches(run.device)]
        kept.append([type(one) for one in results])
        plain = [dataclasses.asdict(one) if isinstance(one, Output) else one for one in results]
        return {"results": plain, "model": model}

    run = both.equal(program, exact=True)
    assert run.calls() == PROVING
    assert kept[0] == kept[1]
