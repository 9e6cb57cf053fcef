"""What no recording can hold: the capture is declined with its cause, and training goes on as eager does."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from step_programs import GRAPH, PROVING, Classifier, batches
from torch import nn
from torch.nn import functional as F
from torch.utils import dlpack

import hotloop
from hotloop.testing import captured_step_emulation


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


def through_dlpack(logits, y):
    weight = np.from_dlpack(logits.detach().cpu()).max()
    return F.cross_entropy(logits, y) * (1 + float(weight) / 8)


def as_a_capsule(logits, y):
    weight = dlpack.from_dlpack(dlpack.to_dlpack(logits.detach().cpu())).max().clone()
    return F.cross_entropy(logits, y) * (1 + weight / 8)


def splitting(logits, y):
    return F.cross_entropy(logits, y) + sum(one.sum() for one in torch.tensor_split(logits, y[:1].cpu())) / 64


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
    printing: ("read on the host: print", "print(loss.detach())"),
    branching: ("read on the host", "if loss > 1.5"),
    to_numpy: ("", "numpy()"),
    listing: ("copied to the host", "tolist()"),
    through_dlpack: ("", "np.from_dlpack"),
    as_a_capsule: ("", "to_dlpack("),
    splitting: ("", "tensor_split"),
    nonzero: ("depends on the data: nonzero", "nonzero()"),
    masked: ("depends on the data: index", "logits[chosen]"),
    selecting: ("depends on the data: masked_select", "masked_select"),
    unique: ("depends on the data", "unique()"),
}


SIZED = {
    nonzero: "do it in the data loader",
    masked: "torch.where(mask, x, 0)",
    selecting: "torch.where(mask, x, 0)",
    unique: "do it in the data loader",
}
"""What is said of those whose result has no fixed size: nobody can read that outside of the step."""


UNSEEN = (listing, to_numpy, through_dlpack, as_a_capsule, splitting)
"""Reads of a tensor on the CPU, which no operation shows. One on a GPU is copied to the host first, which does."""


@pytest.mark.parametrize("loss_of", READS, ids=lambda one: one.__name__)
def test_a_value_that_python_waits_for_declines_with_the_line(both, loss_of):
    if loss_of in UNSEEN and both.device.type == "cpu":
        both.alike(declining(using(loss_of), steps=40))
        return
    reason, source = READS[loss_of]
    hint = SIZED.get(loss_of, "outside the step")
    told = both.declines(declining(using(loss_of)), reason=reason, source=source, hint=hint)
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


@pytest.mark.parametrize("how", ["positional", "named"])
def test_dropout_where_fork_rng_is_told_to_fork_nothing_is_captured(both, how):
    def program(run):
        model = Classifier(dropout=0.5).to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            fork = torch.random.fork_rng([], False) if how == "positional" else torch.random.fork_rng([], enabled=False)
            with fork:
                loss = F.cross_entropy(model(x), y)
            return finish(loss, optimizer)

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    both.equal(program)


# -- arguments and results ---------------------------------------------------------------------------------------------


def test_an_argument_that_is_written_into(both):
    def make(model, optimizer):
        def train_step(x, y):
            x.mul_(0.5)
            return finish(F.cross_entropy(model(x), y), optimizer)

        return train_step

    both.declines(declining(make), reason="writes into its own argument", source="x.mul_(0.5)")


@pytest.mark.parametrize("later", [False, True], ids=["from the first step on", "once the tier is in force"])
@pytest.mark.parametrize("carries", [False, True], ids=["a leaf", "with a graph"])
def test_the_gradient_of_an_argument_is_eagers_where_code_is_compiled(carries, later):
    """Code that is compared with eager runs twice, and would add to the gradient twice."""

    def gradients(run):
        torch.manual_seed(0)
        first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=2**-4)
        loop = hotloop.Loop([first, second], optimizer, run=run, sentinel=1.0)

        @loop.step
        def train_step(x, y):
            loss = F.cross_entropy(second(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        found = []
        for number in range(16):
            x, y = torch.randn(6, 8), torch.randint(4, (6,))
            if number >= 10 or not later:
                x = first(x) if carries else x.requires_grad_()
                x.retain_grad()
            found += [train_step(x, y), x.grad]
        return found, loop.status()

    (ours, status), (eagers, _) = gradients("aot_eager"), gradients("eager")
    for one, other in zip(ours, eagers, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)
    assert status.tier == "eager"
    assert any("an argument requires gradients" in one.why for one in status.tiers)


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


def by_hand(model, optimizer):
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for one in model.parameters():
                one.sub_(one.grad * 0.125)
                one.grad = None
        return loss

    return train_step


def with_gradients_asked_for(model, optimizer):
    def train_step(x, y):
        loss = F.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for one, gradient in zip(model.parameters(), gradients, strict=True):
                one.sub_(gradient * 0.125)
        return loss

    return train_step


@pytest.mark.parametrize("make", [by_hand, with_gradients_asked_for])
def test_an_update_by_hand_has_done_its_backward_and_is_captured(both, make):
    both.equal(declining(make, steps=20))


def test_a_graph_that_a_step_keeps_is_said_to_be_kept(both):
    def make(model, optimizer):
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward(retain_graph=True)
            optimizer.zero_grad()
            return loss

        return train_step

    both.declines(declining(make), reason="or has asked to keep", hint="return loss.detach()")


class Answers:
    """Settings that look up whatever they are asked for, and raise what a dictionary raises."""

    def __init__(self, **values):
        self.__dict__["_values"] = values

    def __getattr__(self, name):
        return self._values[name]

    def __setattr__(self, name, value):
        self._values[name] = value


class Holder:
    settings = Answers(weight=1.0)

    def read(self):
        return self.settings.weight


@pytest.mark.parametrize("held", [False, True])
def test_settings_that_answer_any_attribute_are_looked_at(both, held):
    holder, settings = Holder(), Holder.settings

    def outside(number):
        settings.weight = 2.0 if number >= 9 else 1.0

    read = holder.read if held else lambda: settings.weight
    step = using(lambda logits, y: F.cross_entropy(logits, y) * read())
    run = both.equal(declining(step, steps=24, outside=outside), exact=True, replays=6)
    (dropped,) = run.dropped
    assert "settings" in dropped
    assert "_values has changed" in dropped


def test_an_object_that_is_a_key_is_named_by_its_kind(both):
    def make(model, optimizer):
        counts = {(model, "calls"): 0}

        def train_step(x, y):
            counts[model, "calls"] += 1
            return finish(F.cross_entropy(model(x), y), optimizer)

        return train_step

    both.declines(declining(make), reason="train_step.counts")


class Running(Classifier):
    """Binds its mean anew in each call, where others write into it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return super().forward(x - self.mean)


def test_a_tensor_that_the_step_binds_anew_is_told_to_be_written_into(both):
    program = declining(using(F.cross_entropy), model=Running)
    both.declines(program, reason="Running._buffers", hint="write into the tensor that is there")


def test_a_line_that_no_kind_of_call_can_be_captured_for_is_found_three_times_at_most():
    """Each length would be looked at again, which takes several times what a step takes."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run=GRAPH)

        @loop.step
        def train_step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        for _ in range(4):
            for size in range(2, 22):
                train_step(torch.randn(size, 4))
    events = loop.record.document["events"]
    assert sum(one.get("doing") == "survey" for one in loop.record.document["steps"]) == 3
    assert sum(one["kind"] == "tier_declined" for one in events) == 3
    assert all(".item()" in one.why for one in loop.status().tiers if one.name == GRAPH)
