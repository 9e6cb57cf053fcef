"""The seconds that a loop has saved: each call is held against eager calls of its own kind."""

import pytest
import torch

import hotloop
from hotloop.measure import Timing
from hotloop.measure.census import signature
from hotloop.step.context import Progress
from hotloop.step.loop.account import Account
from hotloop.step.tiers import Tier
from hotloop.testing import captured_step_emulation


def test_what_is_saved_compares_calls_of_one_kind():
    """Long calls that ran eager say nothing of what short ones save: the status told seconds that were never saved."""
    account = Account(Progress(Tier("eager"), may_capture=False), "eager", None)
    for seconds, call in ((0.010, "short"), (0.100, "long"), (0.010, "short"), (0.100, "long"), (0.100, "long")):
        account.step("eager", "run", Timing(seconds, seconds), chosen=False, call=call)
    for _ in range(10):
        account.step("full", "run", Timing(0.011, 0.011), chosen=False, call="short")
    assert account.saved == pytest.approx(10 * (0.010 - 0.011))
    account.step("full", "run", Timing(0.040, 0.040), chosen=False, call="long")
    assert account.saved == pytest.approx(10 * (0.010 - 0.011) + 0.060)
    account.step("full", "run", Timing(0.001, 0.001), chosen=False, call="never seen in eager")
    assert account.saved == pytest.approx(10 * (0.010 - 0.011) + 0.060)


def test_the_latest_kinds_are_kept_however_many_came_before():
    account = Account(Progress(Tier("eager"), may_capture=False), "eager", None)
    for call in range(600):
        account.step("eager", "run", Timing(0.010, 0.010), chosen=False, call=call)
    account.step("full", "run", Timing(0.004, 0.004), chosen=False, call=599)
    assert account.saved == pytest.approx(0.006)


def test_a_number_that_changes_with_each_step_makes_no_other_kind_of_call():
    first, later = (signature((torch.ones(2, 3), number, 0.5 * number, str(number)), {}) for number in (1, 2))
    assert first != later
    assert first.tensors() == later.tensors() != signature((torch.ones(3, 3), 1, 0.5, "1"), {}).tensors()


class ByTheBatch:
    """A clock on which a step takes a millisecond for each example, in whatever tier."""

    dropped = 0

    def __init__(self, timed):
        self.timed, self.stopped = timed, 0

    def start(self, *, alone=False):
        return None

    def stop(self, mark):
        self.stopped += 1

    def cancel(self, mark):
        pass

    def take(self):
        found, self.stopped = self.stopped, 0
        sizes = [ran.call[0][0][0] for ran in list(self.timed.what)[:found]]
        return [Timing(0.001 * size, 0.001 * size) for size in sizes]


@pytest.mark.parametrize("run", ["eager+graph", "aot_eager", "aot_eager+graph"])
def test_a_tier_that_is_as_fast_as_eager_saves_nothing(run):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with captured_step_emulation(), hotloop.Loop(model, optimizer, run=run, sentinel=0) as loop:
        for timed in (loop.stepping.times, loop.stepping.reference_times):
            timed.clock = ByTheBatch(timed)

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for number in range(40):
            step(torch.randn(32 if number % 4 == 3 else 2, 4))
        status = loop.status()
    assert next(tier.steps for tier in status.tiers if tier.name == run) > 20
    assert status.seconds_saved == pytest.approx(0.0)
