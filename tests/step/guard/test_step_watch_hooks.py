"""Hooks of the user's and other state around a captured step: what they change and read in Python is found."""

from __future__ import annotations

import pytest
import torch
from step_programs import Classifier, batches
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

STEPS, AT = 26, 14


def training(before=None, change=None, make_state=None, update=None):
    """A program; ``before(model, optimizer)`` comes first, ``change`` between two replays."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        state = make_state(model) if make_state is not None else ()
        if before is not None:
            before(model, optimizer)

        @run.loop(model, optimizer, state=state).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if update is not None:
                update(state, model)
            return loss

        handles = []
        try:
            for number, (x, y) in enumerate(batches(run.device, STEPS)):
                if number == AT and change is not None:
                    handles.append(change(model, optimizer, state))
                run.note(train_step(x, y))
        finally:
            for handle in handles:
                if handle is not None:
                    handle.remove()
        return model, optimizer, state

    return program


def dropped(both, program, name):
    run = both.equal(program, exact=True, replays=6)
    assert len(run.dropped) == 1
    assert name in run.dropped[0]


@torch.no_grad()
def clamp(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.clamp_(-0.0625, 0.0625)


HOOKS = {
    "of one optimizer": lambda _, optimizer, __: optimizer.register_step_post_hook(clamp),
    "of all optimizers": lambda *_: register_optimizer_step_post_hook(clamp),
    "of all modules": lambda *_: register_module_forward_hook(lambda _, __, out: out * 2),
    "of one module": lambda model, *_: model.register_forward_hook(lambda _, __, out: out * 2),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_is_added_later(both, kind):
    dropped(both, training(change=HOOKS[kind]), "hooks")


def test_a_hook_of_an_optimizer_that_counts_declines_the_capture(both):
    def program(run):
        count = [0]

        def halve(optimizer, *_):
            count[0] += 1
            if count[0] > AT:
                clamp(optimizer)

        return training(before=lambda _, optimizer: optimizer.register_step_post_hook(halve))(run)

    both.declines(program, reason="halve.count")


@pytest.mark.parametrize("after", [False, True])
def test_a_hook_of_a_gradient_reads_a_factor(both, after):
    def program(run):
        factor = [1.0]

        def scale(gradient):
            return gradient * factor[0]

        def scale_after(parameter):
            parameter.grad.mul_(factor[0])

        def register(model, _):
            for one in model.parameters():
                if after:
                    one.register_post_accumulate_grad_hook(scale_after)
                else:
                    one.register_hook(scale)

        def change(*_):
            factor[0] = -1.0

        return training(before=register, change=change)(run)

    dropped(both, program, "factor has changed")


class Average:
    """An average with the decay and the count that most have."""

    def __init__(self, model):
        self.decay, self.num_updates = 0.75, 0
        self.shadow = [one.detach().clone() for one in model.parameters()]

    @torch.no_grad()
    def move(self, model):
        for kept, one in zip(self.shadow, model.parameters(), strict=True):
            kept.lerp_(one, 1 - self.decay)

    def count(self, model):
        self.num_updates += 1
        decay = min(0.75, (1 + self.num_updates) / (10 + self.num_updates))
        with torch.no_grad():
            for kept, one in zip(self.shadow, model.parameters(), strict=True):
                kept.lerp_(one, 1 - decay)

    def state_dict(self):
        return {"decay": self.decay, "num_updates": self.num_updates, **dict(enumerate(self.shadow))}


def test_an_average_whose_decay_is_set_between_steps(both):
    program = training(
        make_state=Average, update=lambda ema, model: ema.move(model), change=lambda *a: setattr(a[2], "decay", 0.5)
    )
    dropped(both, program, "decay")


def test_an_average_that_counts_its_updates(both):
    program = training(make_state=Average, update=lambda ema, model: ema.count(model))
    both.declines(program, reason="num_updates")


def test_the_growth_interval_of_a_scaler(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        scaler = torch.amp.GradScaler(run.device.type, init_scale=8.0, growth_interval=4)

        @run.loop(model, optimizer, state=scaler).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device, STEPS)):
            if number == AT:
                scaler.set_growth_interval(10**6)
            run.note(train_step(x, y))
        return model, optimizer, scaler

    dropped(both, program, "growth_interval")


def test_a_buffer_of_one_element_in_place_of_an_equal_one(both):
    class Scaled(Classifier):
        def __init__(self):
            super().__init__()
            self.factor = torch.tensor(1.0)

        def forward(self, x):
            return super().forward(x) * self.factor

    def program(run):
        model = Scaled().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6, fused=True)
        model.factor = model.factor.to(run.device)

        @run.loop(model, optimizer).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number, (x, y) in enumerate(batches(run.device, STEPS)):
            if number == AT:
                model.factor = torch.ones((), device=run.device)
            run.note(train_step(x, y))
        return model, optimizer

    dropped(both, program, "factor has changed")


def on_node(model, hook):
    """Put a hook on what adds up a parameter's gradient; who keeps the node keeps the hook."""
    node = torch.autograd.graph.get_gradient_edge(model.head.weight).node
    return node, node.register_prehook(hook)


def follows(both, program, what):
    """On a GPU a node that somebody keeps belongs to another stream, and may keep the step from being captured."""
    if both.device.type == "cuda":
        both.alike(program)
    else:
        dropped(both, program, what)


def test_what_a_hook_of_many_gradients_reads(both):
    scale = []

    def before(model, _):
        scale[:] = [2**-7]

        def moves(gradients):
            model.head.bias.data.add_(scale[0])

        torch.autograd.graph.register_multi_grad_hook([model.head.weight, model.inner.weight], moves)

    def change(*_):
        scale[0] = 2**-6

    follows(both, training(before, change), "scale has changed")


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_many_gradients_that_counts(both, mode):
    seen = []

    def program(run):
        seen.clear()

        def before(model, _):
            many = [model.head.weight, model.inner.weight]
            torch.autograd.graph.register_multi_grad_hook(many, lambda _: seen.append(1), mode=mode)

        left = training(before)(run)
        assert len(seen) == STEPS
        return left

    if both.device.type == "cuda" and mode == "all":
        both.alike(program)
    else:
        both.declines(program, reason="changes Python state")
