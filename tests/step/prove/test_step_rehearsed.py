"""What a step does in some calls only is done once in those, also where it runs twice: in a proof, or by the sentinel."""

import copy
import random
import threading
from pathlib import Path

import pytest
import torch
from step_sentinels import checked_every
from torch import nn

import hotloop

STEPS = 24


class Program:
    """Trains with a step that does something more in some calls; what these are it is told, or it reads."""

    def __init__(self, inside, path):
        torch.manual_seed(0)
        random.seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2**-6, fused=True)
        self.others = torch.optim.SGD(self.average.parameters(), lr=2**-3)
        self.seen, self.count, self.best, self.noted = torch.zeros(()), 0, 1.0, []
        self.inside, self.file, self.now = inside, path.open("w"), False
        self.status = None

    def train(self, run, when, told=False, **settings):
        loop = hotloop.Loop(self.model, self.optimizer, run=run, **settings)

        @loop.step
        def step(x, now):
            loss = self.model(x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            if now or self.now:
                self.inside(self)
            return loss

        generator = torch.Generator().manual_seed(1)
        losses = []
        for number in range(STEPS):
            if not told:
                self.now = when(number)
            losses.append(step(torch.randn(3, 4, generator=generator), told and when(number)).item())
        self.status = loop.status()
        self.file.close()
        return losses

    def done(self):
        written = Path(self.file.name).read_text()
        draws = torch.rand(()).item(), random.random()
        return self.seen.item(), self.count, self.noted, written, draws


def averages(program):
    with torch.no_grad():
        for average, one in zip(program.average.parameters(), program.model.parameters(), strict=True):
            average.lerp_(one, 0.25)
    program.seen += 1


def counts(program):
    program.count += 1


def notes(program):
    program.noted.append(len(program.noted))


def writes(program):
    program.file.write("a line\n")


def steps_another(program):
    for one in program.average.parameters():
        one.grad = torch.ones_like(one)
    program.others.step()
    program.seen += 1


def draws(program):
    program.seen += random.random() + torch.rand(())


INSIDE = [averages, counts, notes, writes, steps_another, draws]
WHEN = {
    "every fourth, as told": (True, lambda number: number % 4 == 3),
    "the third, as told": (True, lambda number: number == 2),
    "from the second on, as read": (False, lambda number: number >= 1),
    "the second, as read": (False, lambda number: number == 1),
}


def trained(inside, run, when, folder, **settings):
    program = Program(inside, folder / run)
    told, now = WHEN[when]
    losses = program.train(run, now, told=told, **settings)
    return program, losses


def same(inside, run, when, folder, **settings):
    """Train both ways, and give the program that was not eager's."""
    theirs, expected = trained(inside, "eager", when, folder)
    done = theirs.done()
    with hotloop.testing.captured_step_emulation():
        ours, found = trained(inside, run, when, folder, **settings)
    assert ours.done() == done
    assert found == pytest.approx(expected, rel=1e-4)
    for their, our in zip(theirs.average.parameters(), ours.average.parameters(), strict=True):
        torch.testing.assert_close(their, our, rtol=1e-4, atol=1e-6)
    return ours


@pytest.mark.parametrize("run", ["aot_eager", "aot_eager+graph", "eager+graph"])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.some_of(3)
def test_what_a_step_does_in_some_calls_is_done_once_in_those(run, when, inside, tmp_path):
    same(inside, run, when, tmp_path)


@pytest.mark.parametrize("run", ["aot_eager", "aot_eager+graph"])
@pytest.mark.parametrize("inside", INSIDE)
def test_the_sentinel_does_it_once_as_well(run, inside, tmp_path):
    with checked_every(2):
        same(inside, run, "every fourth, as told", tmp_path, sentinel=1.0)


def test_a_call_that_could_run_once_only_declines_nothing(tmp_path):
    """What sets something up does so in one call, and not again."""
    ours = same(notes, "aot_eager", "the third, as told", tmp_path)
    assert ours.status.tier == "aot_eager"
    assert not any(one.state == "declined" for one in ours.status.tiers)


def test_two_calls_that_could_run_once_only_decline_the_tier(tmp_path):
    ours = same(notes, "aot_eager", "from the second on, as read", tmp_path)
    assert ours.status.tier == "eager"
    assert any("changes Python state: closure variable self.noted" in one.why for one in ours.status.tiers)


def test_a_sentinel_step_that_could_run_once_only_is_no_check(tmp_path):
    with checked_every(1):
        ours = same(notes, "aot_eager", "every fourth, as told", tmp_path, sentinel=1.0)
    (sentinel,) = ours.status.sentinels
    assert not sentinel.off
    assert sentinel.checks >= 8
    assert not any(one.state == "declined" for one in ours.status.tiers)


def test_sentinel_steps_that_could_all_run_once_only_end_the_sentinel(tmp_path, monkeypatch):
    monkeypatch.setitem(WHEN, "late", (True, lambda number: number >= 10))
    with checked_every(1):
        ours = same(notes, "aot_eager", "late", tmp_path, sentinel=1.0)
    (sentinel,) = ours.status.sentinels
    assert "changes Python state: closure variable self.noted" in sentinel.off


class Stop(BaseException):
    """As a scheduler ends a trial."""


@pytest.mark.parametrize("run", ["aot_eager", "eager+graph", "full"])
@pytest.mark.parametrize("raised", [ValueError, Stop])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("bad", [{0}, {1}, {0, 1, 2, 3}])
def test_a_step_that_raises_leaves_what_eager_leaves(run, raised, where, bad):
    def trained(asked):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)
        seen, count = torch.zeros(()), []

        @hotloop.Loop(model, optimizer, run=asked).step
        def step(x, bad):
            seen.add_(1)
            count.append(1)
            if bad and where == "before":
                raise raised
            model(x).square().mean().backward()
            if bad:
                raise raised
            optimizer.step()
            optimizer.zero_grad()

        for number in range(8):
            x = torch.randn(3, 4)
            try:
                step(x, number in bad)
            except raised:
                optimizer.param_groups[0]["lr"] /= 2
        return seen.item(), len(count), [one.detach().clone() for one in model.parameters()]

    theirs = trained("eager")
    with hotloop.testing.captured_step_emulation():
        ours = trained(run)
    assert ours[:2] == theirs[:2]
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-4, atol=1e-6)


def test_beside_a_thread_that_is_alive_a_step_draws_what_it_draws_alone(tmp_path):
    """Beside it nobody puts the streams back unless the step was heard to draw from them: this one does so later."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        same(draws, "aot_eager", "from the second on, as read", tmp_path)
    finally:
        done.set()
        thread.join()
