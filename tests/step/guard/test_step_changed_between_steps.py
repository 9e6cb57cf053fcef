"""What training code that people publish changes between two steps: replays follow it as eager does, and go on afterwards."""

from __future__ import annotations

import collections
import functools
import gc
import types
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.step.guard.compare import Watch
from hotloop.testing import captured_step_emulation

STEPS, CHANGE = 60, 30
WEIGHT = {"auxiliary": 1.0}


class Net(nn.Module):
    """Residual layers whose number, rate of dropped paths, temperature and scale a schedule may change."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.depth, self.drop_path, self.scale = 3, 0.0, 1.0
        self.settings = types.SimpleNamespace(smoothing=0.0, temperature={"now": 1.0})

    def forward(self, x):
        hidden = self.first(x).relu()
        for layer in self.layers[: self.depth]:
            hidden = hidden + (1 - self.drop_path) * layer(hidden).tanh()
        return self.last(hidden) * self.scale / self.settings.temperature["now"]


class Focal(nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = 2.0

    def forward(self, output, target):
        logs = F.log_softmax(output, -1).gather(1, target[:, None])[:, 0]
        return (-((1 - logs.exp()) ** self.gamma) * logs).mean()


class Ramp:
    def __init__(self):
        self.share = 0.3

    @property
    def weight(self):
        return 2 * self.share


def world():
    """A model, its optimizer, and what a program has around them."""
    torch.manual_seed(0)
    model = Net()
    return types.SimpleNamespace(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        teacher=Net(),
        focal=Focal(),
        ramp=Ramp(),
        arguments=types.SimpleNamespace(alpha=0.5, clip=1.0),
        weights=[1.0, 2.0],
        recent=collections.deque([0.1], maxlen=2),
        criterion=functools.partial(F.cross_entropy, label_smoothing=0.0),
        postprocess=[lambda loss: loss * 1.0],
        mask=[torch.ones(4)],
    )


def distilled(w, x, output, target):
    with torch.no_grad():
        taught = w.teacher(x)
    return F.cross_entropy(output, target) + w.weights[0] * F.mse_loss(output, taught)


LOSSES = {
    "global": lambda w, x, o, t: F.cross_entropy(o, t) * WEIGHT["auxiliary"],
    "argument": lambda w, x, o, t: F.cross_entropy(o, t) * w.arguments.alpha,
    "focal": lambda w, x, o, t: w.focal(o, t),
    "property": lambda w, x, o, t: F.cross_entropy(o, t) * w.ramp.weight,
    "sum of a list": lambda w, x, o, t: F.cross_entropy(o, t) * sum(w.weights),
    "criterion": lambda w, x, o, t: w.criterion(o, t),
    "smoothing": lambda w, x, o, t: F.cross_entropy(o, t, label_smoothing=w.model.settings.smoothing),
    "distillation": distilled,
    "deque": lambda w, x, o, t: (
        F.cross_entropy(o, t) + w.recent[0] * sum(p.square().sum() for p in w.model.parameters())
    ),
    "lambda": lambda w, x, o, t: w.postprocess[0](F.cross_entropy(o, t)),
    "getattr": lambda w, x, o, t: F.cross_entropy(o, t) * getattr(w.arguments, "al" + "pha"),
    "mask": lambda w, x, o, t: F.cross_entropy(o * w.mask[0], t),
    "plain": lambda w, x, o, t: F.cross_entropy(o, t),
}


def set_groups(w, **settings):
    for group in w.optimizer.param_groups:
        group.update(settings)


CHANGES = {
    "global": lambda w: WEIGHT.update(auxiliary=0.25),
    "argument": lambda w: setattr(w.arguments, "alpha", 0.1),
    "focal": lambda w: setattr(w.focal, "gamma", 0.5),
    "property": lambda w: setattr(w.ramp, "share", 0.9),
    "sum of a list": lambda w: w.weights.__setitem__(0, 5.0),
    "criterion": lambda w: setattr(w, "criterion", functools.partial(F.cross_entropy, label_smoothing=0.2)),
    "smoothing": lambda w: setattr(w.model.settings, "smoothing", 0.3),
    "distillation": lambda w: w.weights.__setitem__(0, 0.5),
    "deque": lambda w: w.recent.appendleft(0.4),
    "lambda": lambda w: w.postprocess.__setitem__(0, lambda loss: loss * 0.3),
    "getattr": lambda w: setattr(w.arguments, "alpha", 0.2),
    "mask": lambda w: w.mask.__setitem__(0, torch.tensor([1.0, 1.0, 0.0, 1.0])),
    "clipping": lambda w: setattr(w.arguments, "clip", 0.05),
    "dropped paths": lambda w: setattr(w.model, "drop_path", 0.5),
    "temperature": lambda w: w.model.settings.temperature.update(now=2.0),
    "depth": lambda w: setattr(w.model, "depth", 1),
    "freezing": lambda w: w.model.first.requires_grad_(False),
    "learning rate": lambda w: set_groups(w, lr=1e-3),
    "weight decay": lambda w: set_groups(w, weight_decay=0.3),
    "betas": lambda w: set_groups(w, betas=(0.5, 0.9)),
    "a layer replaced": lambda w: w.model.layers.__setitem__(1, nn.Identity()),
    "a forward hook": lambda w: w.model.last.register_forward_hook(lambda module, given, output: output * 0.5),
    "a hook of a gradient": lambda w: w.model.first.weight.register_hook(lambda gradient: gradient * 0.1),
    "forward replaced": lambda w: setattr(w.model, "forward", lambda x: w.model.last(w.model.first(x))),
    "tied weights": lambda w: setattr(w.model.layers[2], "weight", w.model.layers[0].weight),
    "an adapter": lambda w: setattr(w.model, "last", nn.Sequential(w.model.last, nn.Linear(4, 4))),
    "evaluation mode": lambda w: w.model.eval(),
    "a checkpoint": lambda w: w.model.load_state_dict({k: v * 0.5 for k, v in w.model.state_dict().items()}),
    "an optimizer's checkpoint": lambda w: w.optimizer.load_state_dict(w.optimizer.state_dict()),
}


def train(change, *, captured):
    """Train, change something half-way; return losses, weights, and how many steps were replays after the change."""
    WEIGHT.update(auxiliary=1.0)
    w = world()
    loss_of = LOSSES.get(change, LOSSES["plain"])

    def step(x, target):
        loss = loss_of(w, x, w.model(x), target)
        loss.backward()
        nn.utils.clip_grad_norm_(w.model.parameters(), w.arguments.clip)
        w.optimizer.step()
        w.optimizer.zero_grad()
        return loss.detach()

    loop = hotloop.Loop(w.model, w.optimizer, run="eager+graph", sentinel=0) if captured else None
    if loop is not None:
        step = loop.step(step)
    draws = torch.Generator().manual_seed(1)
    losses, replays = [], 0
    for number in range(STEPS):
        if number == CHANGE:
            CHANGES[change](w)
        losses.append(step(torch.randn(6, 8, generator=draws), torch.randint(4, (6,), generator=draws)).clone())
        replays += loop is not None and number >= CHANGE and loop.last_ran() == ("eager+graph", "run")
    if loop is not None:
        loop.close()
    return torch.stack(losses), {name: one.clone() for name, one in w.model.state_dict().items()}, replays


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_steps_is_followed(change):
    losses, weights, _ = train(change, captured=False)
    with captured_step_emulation():
        ours, our_weights, replays = train(change, captured=True)
    torch.testing.assert_close(ours, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_weights, weights, rtol=1e-4, atol=1e-6)
    assert replays >= STEPS - CHANGE - 10


@pytest.mark.parametrize("look", range(1, 12))
def test_a_teacher_that_was_replaced_may_be_freed_while_a_step_runs(monkeypatch, look):
    """Python's collector frees what a cycle holds when it likes, so also between the looks at one step."""
    model, teacher, replaced, looks = Net(), Net(), [], iter(range(1, 100))

    def now(watch, its_own=Watch.now):
        if replaced and next(looks) == look:
            replaced.clear()
        return its_own(watch)

    monkeypatch.setattr(Watch, "now", now)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x, target):
        with torch.no_grad():
            taught = teacher(x)
        loss = F.cross_entropy(model(x), target) + F.mse_loss(model(x), taught)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with captured_step_emulation(), hotloop.Loop(model, optimizer, run="eager+graph", sentinel=0) as loop:
        step = loop.step(step)
        for number in range(24):
            if number == 10:
                replaced.append(teacher)
                teacher = Net()
            step(torch.randn(6, 8), torch.randint(4, (6,)))
        assert not replaced
        assert loop.last_ran() == ("eager+graph", "run")


def by_a_reference(held):
    reference = weakref.ref(held)
    return lambda: reference() is None


def by_a_value(held):
    table = weakref.WeakValueDictionary(teacher=held)
    return lambda: table.get("teacher") is None


def by_a_key(held):
    table = weakref.WeakKeyDictionary({held: 1.0})
    return lambda: len(table) == 0


@pytest.mark.parametrize("weakly", [by_a_reference, by_a_value, by_a_key])
def test_an_object_that_the_step_refers_to_weakly_is_freed_when_the_program_frees_it(weakly):
    model, held = Net(), [Net()]
    optimizer, gone = torch.optim.SGD(model.parameters(), 0.1), weakly(held[0])

    def step(x, target):
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() * 0 + (2.0 if gone() else 1.0)

    with captured_step_emulation(), hotloop.Loop(model, optimizer, run="eager+graph", sentinel=0) as loop:
        step, call = loop.step(step), (torch.randn(6, 8), torch.randint(4, (6,)))
        assert {float(step(*call)) for _ in range(12)} == {1.0}
        assert loop.last_ran() == ("eager+graph", "run")
        held.clear()
        gc.collect()
        assert {float(step(*call)) for _ in range(12)} == {2.0}
