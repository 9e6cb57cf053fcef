"""Steps whose Python must run exactly once: no proof runs it a second time, and a compiled tier is declined as well."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import hotloop


class Program:
    """A program with something in its step that a second run would do twice."""

    def __init__(self, inside):
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.other = copy.deepcopy(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2**-6, fused=True)
        self.others = torch.optim.AdamW(self.other.parameters(), lr=2**-6, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.later = torch.optim.lr_scheduler.StepLR(self.optimizer, 6, 0.5)
        self.count, self.noted, self.inside = 0, [], inside

    def train(self, run):
        loop = hotloop.Loop(self.model, self.optimizer, run=run)

        @loop.step
        def step(x):
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.inside(self, x)
            return loss

        generator = torch.Generator().manual_seed(1)
        losses = [step(torch.randn(3, 4, generator=generator)).item() for _ in range(16)]
        state = [*self.model.parameters(), *self.other.parameters()]
        rate = self.optimizer.param_groups[0]["lr"]
        return losses, [one.detach().clone() for one in state], (self.count, len(self.noted), rate), loop.status()


def count(program, _):
    program.count += 1


def note(program, _):
    program.noted.append(1)


def schedule(program, _):
    program.schedule.step()


def schedule_later(program, _):
    program.later.step()


def another(program, x):
    program.other(x).square().mean().backward()
    program.others.step()
    program.others.zero_grad()


@pytest.mark.parametrize("run", ["aot_eager", "aot_eager+graph", "eager+graph"])
@pytest.mark.parametrize(
    ("inside", "cause"),
    [
        (count, "changes Python state: self.count"),
        (note, "changes Python state: self.noted"),
        (schedule, "changes its optimizer's settings"),
        (schedule_later, "later.last_epoch"),
        (another, "an optimizer that the loop does not know steps: AdamW"),
    ],
)
def test_what_must_happen_once_happens_once(run, inside, cause):
    theirs = Program(inside).train("eager")
    with hotloop.testing.captured_step_emulation():
        ours = Program(inside).train(run)
    assert ours[0] == theirs[0]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    assert ours[2] == theirs[2]
    assert ours[3].tier == "eager"
    assert any(cause in tier.why for tier in ours[3].tiers)


def set_up(program, _):
    program.model.kind = "set by the first call, as transformers notes the kind of a task in its config"


@pytest.mark.parametrize("run", ["aot_eager", "aot_eager+graph", "eager+graph"])
def test_what_only_the_first_call_sets_up_declines_nothing(run):
    theirs = Program(set_up).train("eager")
    with hotloop.testing.captured_step_emulation():
        ours = Program(set_up).train(run)
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    assert ours[3].tier == run
    assert not any(tier.state == "declined" for tier in ours[3].tiers)


def test_a_loss_whose_backward_is_the_callers_is_not_captured():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph")

        @loop.step
        def forward(x):
            return model(x).square().mean()

        for _ in range(16):
            forward(torch.randn(3, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert any("whose backward it leaves to the caller" in tier.why for tier in loop.status().tiers)


def test_a_subclass_that_calls_its_parents_step():
    class Twice(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    def train(run):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        torch.optim.AdamW(model.parameters())  # torch wraps both steps once it has seen both classes
        optimizer = Twice(model.parameters(), lr=2**-6)
        loop = hotloop.Loop(model, optimizer, run=run)

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        generator = torch.Generator().manual_seed(1)
        return [step(torch.randn(3, 4, generator=generator)).item() for _ in range(16)], loop.status().tier

    with hotloop.testing.captured_step_emulation():
        ours = train("eager+graph")
    assert torch.ones(1).item() == 1.0  # no recording is left open
    assert ours == (train("eager")[0], "eager+graph")


def test_batches_of_a_class_of_ones_own_are_not_kept_alive():
    import gc
    import weakref

    class Batch:
        def __init__(self):
            self.x = torch.randn(3, 4)

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run="eager+graph")

        @loop.step
        def step(batch):
            model(batch.x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        alive = []
        for _ in range(60):
            batch = Batch()
            alive.append(weakref.ref(batch))
            step(batch)
        del batch
        gc.collect()
    assert sum(one() is not None for one in alive) <= 1


@pytest.mark.parametrize("run", ["aot_eager", "eager+graph"])
def test_a_generator_of_ones_own_draws_what_it_draws_in_eager(run):
    def train(mode):
        torch.manual_seed(0)
        model, own = nn.Linear(4, 1), torch.Generator().manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        loop = hotloop.Loop(model, optimizer, run=mode)

        @loop.step
        def step(x):
            loss = model(x + torch.randn(3, 4, generator=own)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        data = torch.Generator().manual_seed(1)
        return [step(torch.randn(3, 4, generator=data)).item() for _ in range(14)], loop.status()

    with hotloop.testing.captured_step_emulation():
        ours, status = train(run)
    assert ours == train("eager")[0]
    assert status.tier == "eager"
    assert any("a torch.Generator of its own" in tier.why for tier in status.tiers)


IN_A_NEW_PROCESS = """
import torch, hotloop
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
loop = hotloop.Loop(model, optimizer, run="aot_eager")

@loop.step
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

for _ in range(6):
    step(torch.randn(3, 4))
print(loop.status().tier)
"""


def test_the_first_compile_of_a_process_is_not_declined_for_the_hook_that_it_puts_on_optimizers():
    ran = subprocess.run([sys.executable, "-c", IN_A_NEW_PROCESS], capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-1] == "aot_eager", ran.stdout + ran.stderr
