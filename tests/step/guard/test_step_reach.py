"""What of an object counts as the step's: the attributes and methods that its code names, and no others."""

import torch
from torch import nn

import hotloop


class Trainer:
    """As people write them: counters beside what the step needs."""

    def __init__(self, model=None):
        torch.manual_seed(0)
        self.model = model or nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2**-6, fused=True)
        self.global_step, self.weight, self.seen = 0, 1.0, []

    def scale(self):
        return self.weight

    def log(self):
        self.seen.append(self.global_step)

    def train_step(self, x):
        loss = self.scale() * self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


class Counting(nn.Module):
    """Counts something that its forward does not read."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.epoch, self.factor = nn.Linear(4, 4), 0, 1.0

    def forward(self, x):
        return self.factor * self.layer(x)


def run(trainer, mode, between, steps=24):
    """Train; ``between(trainer, number)`` is what the program does between steps."""
    losses = []
    with hotloop.testing.captured_step_emulation():
        loop = hotloop.Loop(trainer.model, trainer.optimizer, run=mode)
        step = loop.step(trainer.train_step)
        generator = torch.Generator().manual_seed(1)
        for number in range(steps):
            losses.append(step(torch.randn(3, 4, generator=generator)))
            between(trainer, number)
        return losses, loop.status()


def same(between, make=Trainer):
    ours, status = run(make(), "eager+graph", between)
    theirs, _ = run(make(), "eager", between)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    return status


def test_a_counter_that_the_step_does_not_name_is_the_programs_own():
    def count(trainer, _):
        trainer.global_step += 1
        trainer.log()

    status = same(count)
    assert status.tier == "eager+graph"
    assert status.dropped == ()


def test_what_a_method_of_the_step_reads_is_in_force_in_the_next_step():
    def change(trainer, number):
        if number == 11:
            trainer.weight = 2.0

    status = same(change)
    assert status.tier == "eager+graph"
    assert status.dropped == ("self.weight",)


def test_an_attribute_of_a_module_that_its_forward_does_not_read():
    def count(trainer, _):
        trainer.model.epoch += 1

    status = same(count, lambda: Trainer(Counting()))
    assert status.tier == "eager+graph"
    assert status.dropped == ()


def test_an_attribute_of_a_module_that_its_forward_reads():
    def change(trainer, number):
        if number == 11:
            trainer.model.factor = 0.5

    status = same(change, lambda: Trainer(Counting()))
    assert status.tier == "eager+graph"
    assert status.dropped == ("model.factor",)


def test_code_that_reads_whatever_there_is_counts_everything():
    class All(Trainer):
        def scale(self):
            return vars(self)["weight"]

    def change(trainer, number):
        if number == 11:
            trainer.weight = 2.0

    assert same(change, All).dropped == ("self.weight",)
