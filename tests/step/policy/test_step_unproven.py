"""While a tier is on its way, and in the steps that `auto` times first, the status says why steps run eager."""

import re

import pytest
import torch
from torch import nn

import hotloop
from hotloop.testing import captured_step_emulation


def train(run, steps, *, size=lambda _: 4, **settings):
    """Give the loop, and its status before each step and at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    loop = hotloop.Loop(model, optimizer, run=run, **settings)

    @loop.step
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    statuses = []
    for number in range(steps):
        statuses.append(loop.status())
        step(torch.randn(size(number), 8))
    return loop, [*statuses, loop.status()]


def row(status, name):
    return next(one for one in status.tiers if one.name == name)


@pytest.mark.parametrize(("run", "steps"), [("aot_eager", 4), ("eager+graph", 6)])
def test_a_tier_that_is_on_its_way_says_how_many_steps_it_lacks(run, steps):
    with captured_step_emulation():
        loop, statuses = train(run, steps)
        loop.close()
    first, *others, last = [row(one, run) for one in statuses]
    assert (first.state, first.why) == ("trying", "no step has run yet")
    left = [int(re.search(r"not proven yet: it takes (\d+) more steps? ", one.why).group(1)) for one in others]
    assert left == list(range(steps - 1, 0, -1))
    assert {one.state for one in others} == {"trying"}
    assert (last.state, last.why) == ("in force", "")


def test_compiled_code_that_is_to_be_captured_says_what_comes_after_its_proof():
    with captured_step_emulation():
        loop, statuses = train("aot_eager+graph", 12)
        loop.close()
    whys = [row(one, "aot_eager+graph").why for one in statuses]
    assert "it takes 3 more steps" in whys[1]
    assert "and then some to capture it" in whys[1]
    assert any(one and "and then some to capture it" not in one for one in whys[4:])  # the recording's own proof
    assert whys[-1] == ""


def test_what_a_tier_lacked_is_told_after_the_loop_is_closed_too():
    with captured_step_emulation():
        loop, statuses = train("eager+graph", 4)
        loop.close()
    assert "it takes 2 more steps" in row(statuses[-1], "eager+graph").why
    assert row(loop.status(), "eager+graph") == row(statuses[-1], "eager+graph")


def test_shapes_that_never_come_twice_are_named():
    loop, statuses = train("aot_eager", 6, size=lambda number: 4 + number)
    loop.close()
    assert row(statuses[-1], "aot_eager").state == "trying"
    assert "shapes that came before" in row(statuses[-1], "aot_eager").why


def test_a_step_that_lacks_nothing_is_not_spoken_of():
    loop, statuses = train("eager", 3)
    loop.close()
    (eager,) = statuses[-1].tiers
    assert (eager.state, eager.why) == ("in force", "")


@pytest.mark.parametrize(
    ("total", "told"),
    [(None, "the first 8 steps are timed as they are, and then it is decided"), (5, "and this run takes 5")],
)
def test_auto_says_that_it_times_the_first_steps(total, told):
    loop, statuses = train("auto", 5, total_steps=total)
    loop.close()
    assert all(told in row(one, "eager").why for one in statuses)


def test_auto_says_no_more_of_the_first_steps_once_it_has_decided():
    loop, statuses = train("auto", 12)
    loop.close()
    assert row(statuses[8], "eager").why
    assert row(statuses[-1], "eager").why == ""
    assert statuses[-1].decisions


def test_the_reference_of_proofs_says_that_it_ran_beside_them():
    loop, statuses = train("aot_eager", 6)
    loop.close()
    eager = row(statuses[-1], "eager")
    assert (eager.state, eager.steps) == ("timed", 0)
    assert eager.why == "ran 3 times beside another, to compare the two"


def test_where_the_code_to_capture_was_declined_so_is_its_recording():
    """Else it would be told as on its way for ever, without a cause."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    seen = []
    with captured_step_emulation(), hotloop.Loop(model, optimizer, run="aot_eager+graph") as loop:

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            seen.append(loss.detach())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(6):
            step(torch.randn(4, 8))
        told = row(loop.status(), "aot_eager+graph")
    assert told.state == "declined"
    assert "changes Python state" in told.why
