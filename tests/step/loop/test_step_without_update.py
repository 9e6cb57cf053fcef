"""A step that calls no optimizer: the status says so after many steps, and only then."""

import pytest
import torch
from torch import nn

import hotloop

SAID = "no optimizer of the loop has stepped in 64 steps"


def trained(steps, *, run="auto", every=0, outside=False, optimizers=1, resumed=0):
    """Train; the optimizer steps after each ``every`` steps, or never. Return the status."""
    model = nn.Linear(4, 1)
    made = [torch.optim.SGD(model.parameters(), lr=0.125)] * optimizers
    with hotloop.Loop(model, *made, run=run) as loop:
        if resumed:
            loop.load_state_dict({**loop.state_dict(), "steps": resumed})

        def update():
            made[0].step()
            made[0].zero_grad()

        @loop.step
        def step(x, *, last):
            loss = model(x).square().mean()
            loss.backward()
            if last and not outside:
                update()
            return loss

        for number in range(1, steps + 1):
            last = bool(every) and number % every == 0
            step(torch.randn(2, 4), last=last)
            if last and outside:
                update()
        return loop.status()


@pytest.mark.parametrize("run", ["auto", "eager", "aot_eager"])
def test_a_step_that_never_steps_its_optimizer_is_told(run):
    status = trained(64, run=run)
    assert status.without_update == 64
    assert SAID in str(status)


@pytest.mark.parametrize(
    "program",
    [
        {"steps": 63},
        {"steps": 64, "every": 60},
        {"steps": 64, "every": 60, "run": "eager"},
        {"steps": 64, "every": 60, "outside": True},
        {"steps": 64, "optimizers": 0},
        {"steps": 8, "resumed": 1_000},
    ],
    ids=str,
)
def test_nothing_is_said_too_early_or_where_something_is_updated(program):
    status = trained(**program)
    assert status.without_update == 0
    assert "no optimizer" not in str(status)
