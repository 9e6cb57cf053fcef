"""Every optimizer: recorded with the step where its kernels allow, outside of the recording by itself where not."""

from __future__ import annotations

import pytest
import torch
from step_programs import GRAPH, PROVING, Classifier, batches, plain_step, sentences
from torch.nn import functional as F

RATE = 2**-6

KINDS = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.125}),
    "AdamW amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "AdamW maximize": (torch.optim.AdamW, {"maximize": True}),
    "Adam": (torch.optim.Adam, {}),
    "Adam with L2": (torch.optim.Adam, {"weight_decay": 0.125}),
    "SGD": (torch.optim.SGD, {}),
    "SGD momentum": (torch.optim.SGD, {"momentum": 0.875}),
    "SGD nesterov": (torch.optim.SGD, {"momentum": 0.875, "nesterov": True, "weight_decay": 0.125}),
}


@pytest.mark.parametrize("flags", [{"fused": True}, {"foreach": True}, {"foreach": False}, {}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_with_a_fused_kernel_is_recorded_whatever_the_user_asked_for(both, kind, flags):
    make, settings = KINDS[kind]

    def program(run):
        model = Classifier().to(run.device)
        optimizer = make(model.parameters(), lr=RATE, **settings, **flags)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    run = both.equal(program, exact=flags == {"fused": True})
    assert run.calls() == PROVING
    assert run.outside == ()


OUTSIDE_ON_CPU = ["RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD"]


@pytest.mark.parametrize("kind", [*OUTSIDE_ON_CPU, "Adagrad"])
def test_an_optimizer_that_cannot_be_recorded_runs_outside_and_the_rest_is_captured(both, kind):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=2**-8)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer

    run = both.equal(program)
    recorded = both.device.type == "cuda" and kind in OUTSIDE_ON_CPU
    assert run.outside == (() if recorded else ("optimizer",))
    assert run.calls() == PROVING


class Lion(torch.optim.Optimizer):
    """As a third party would write one: counts in Python, and decides by the count."""

    def __init__(self, params, lr=RATE, decay=0.5):
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                entry = self.state[parameter]
                if not entry:
                    entry["count"], entry["mean"] = 0, torch.zeros_like(parameter)
                entry["count"] += 1
                entry["mean"].lerp_(parameter.grad, 1 - group["decay"])
                rate = group["lr"] * (0.5 if entry["count"] % 2 else 1.0)
                parameter.sub_(entry["mean"].sign(), alpha=rate)


def test_a_third_partys_optimizer_that_counts_in_python_runs_outside(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = Lion(model.parameters())
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, optimizer, [optimizer.state[one]["count"] for one in model.parameters()]

    run = both.equal(program, exact=True)
    assert run.outside == ("optimizer",)


class Renamed(torch.optim.AdamW):
    """A subclass may have another step: nothing is known of it."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.param_groups[0]["lr"] *= 0.5


def test_a_subclass_of_a_known_optimizer_is_not_taken_for_it(both):
    def program(run):
        model = Classifier().to(run.device)
        optimizer = Renamed(model.parameters(), lr=0.5, fused=True)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device, 12):
            run.note(train_step(x, y))
        return model, optimizer

    run = both.alike(program, exact=True)
    assert run.replays() == 0
    assert "optimizer's settings" in run.declined[0].reason


class LookaheadOf(torch.optim.SGD):
    """Is an optimizer itself, and is given to the loop."""

    def __init__(self, params):
        super().__init__(params, lr=RATE, momentum=0.5)
        self._updates = 0
        self.slow = [one.detach().clone() for one in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self._updates += 1
        if self._updates % 3 == 0:
            for one, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
                slow.lerp_(one, 0.5)
                one.copy_(slow)


def averaging(make):
    """A program whose weights are averaged at every third step; ``make`` gives its optimizer, and the loop's."""

    def program(run):
        model = Classifier().to(run.device)
        optimizer, given = make(model.parameters())
        train_step = run.loop(model, given).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, given, optimizer.slow

    return program


class ByHand(torch.optim.Optimizer):
    """Sets up all by itself, without torch's tables of hooks; torch does not know when it steps."""

    def __init__(self, params):
        self.param_groups, self.state, self.defaults = [{"params": list(params), "lr": RATE}], {}, {}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                one.sub_(one.grad, alpha=group["lr"])

    def zero_grad(self):
        for group in self.param_groups:
            for one in group["params"]:
                one.grad = None

    def state_dict(self):
        return {"lr": self.param_groups[0]["lr"]}


def by_hand(params):
    optimizer = ByHand(params)
    optimizer.slow = []
    return optimizer, optimizer


@pytest.mark.parametrize("asked", ["auto", GRAPH, "aot_eager"])
def test_an_optimizer_that_calls_no_hooks_of_torchs_trains_eager_and_a_line_says_why(both, asked):
    run = both.alike(averaging(by_hand), asked=asked)
    status = run.status()
    assert status.tier == "eager"
    assert any("calls no hooks of torch.optim.Optimizer" in line for line in status.decisions)


@pytest.mark.parametrize("asked", [GRAPH, "aot_eager"])
def test_what_an_optimizer_keeps_on_itself_and_writes_at_some_steps_is_put_back(both, asked):
    def make(params):
        optimizer = LookaheadOf(params)
        return optimizer, optimizer

    run = both.alike(averaging(make), asked=asked)
    assert run.status().tier == asked


def test_of_two_optimizers_only_the_one_that_must_runs_outside(both):
    """The forward pass between the two steps is captured on both sides of the cut."""

    def program(run):
        model, critic = Classifier().to(run.device), Classifier().to(run.device)
        first, second = Lion(model.parameters()), torch.optim.Adam(critic.parameters(), lr=RATE, fused=True)

        @run.loop([model, critic], [first, second]).step
        def train_step(x, y):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            first.step()
            first.zero_grad()
            again = F.cross_entropy(critic(x), model(x).softmax(1).detach())
            again.backward()
            second.step()
            second.zero_grad()
            return loss, again

        for x, y in batches(run.device):
            run.note(train_step(x, y))
        return model, critic, first, second

    assert both.equal(program, exact=True).outside == ("optimizer[0]",)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_sparse_gradients_run_outside(both):
    def program(run):
        embedding = torch.nn.EmbeddingBag(11, 4, sparse=True).to(run.device)
        head = torch.nn.Linear(4, 4).to(run.device)
        sparse = torch.optim.SparseAdam(embedding.parameters(), lr=2**-5)
        dense = torch.optim.AdamW(head.parameters(), lr=2**-5, fused=True)

        @run.loop([embedding, head], [sparse, dense]).step
        def train_step(ids, y):
            loss = F.cross_entropy(head(embedding(ids)), y)
            loss.backward()
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()
            return loss

        for ids in sentences(run.device):
            run.note(train_step(ids, ids[:, 0] % 4))
        return embedding, head, sparse, dense

    assert both.equal(program).outside == ("optimizer[0]",)


class Decaying(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            self.param_groups[0]["params"][0].mul_(0.5)


@pytest.mark.parametrize("which", ["class", "step of the class", "step"])
def test_an_optimizer_that_steps_otherwise_drops_the_recording(both, monkeypatch, which):
    plain = torch.optim.SGD.step

    def step(optimizer, closure=None):
        plain(optimizer, closure)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].mul_(0.5)

    def program(run):
        model = Classifier().to(run.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        with monkeypatch.context() as patched:
            for number, (x, y) in enumerate(batches(run.device)):
                if number == PROVING + 4:
                    if which == "class":
                        optimizer.__class__ = Decaying
                    elif which == "step":
                        optimizer.step = lambda: step(optimizer)
                    else:
                        patched.setattr(torch.optim.SGD, "step", step)
                run.note(train_step(x, y))
        return model

    run = both.alike(program)
    assert any("or its step" in reason for reason in run.dropped)


@pytest.mark.parametrize("kind", ["SGD", "momentum", "Adam"])
def test_a_parameter_with_gaps_is_stepped_outside(both, kind):
    """torch's fused kernels take all that lies between its first element and its last for the parameter."""
    made = {
        "SGD": lambda p: torch.optim.SGD(p, lr=RATE),
        "momentum": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.5),
        "Adam": lambda p: torch.optim.Adam(p, lr=RATE),
    }[kind]

    def program(run):
        model = torch.nn.Linear(8, 3).to(run.device)
        memory = torch.randn(3, 16, device=run.device)
        model.weight = torch.nn.Parameter(memory[:, ::2])
        optimizer = made(model.parameters())
        train_step = run.loop(model, optimizer).step(plain_step(model, optimizer))
        for x, y in batches(run.device):
            run.note(train_step(x[:, :8].float(), y % 3))
        return model, optimizer, memory

    run = both.equal(program)
    assert run.outside == ("optimizer",)
