"""How often a network runs between two steps is counted in a captured run as in an eager one: a replay runs no hook."""

import pytest
import torch

import hotloop
from hotloop.testing import captured_step_emulation


@pytest.mark.parametrize("run", ["eager", "eager+graph"])
def test_calls_between_steps_are_counted_a_step(run):
    torch.manual_seed(0)
    model, scores = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    hotloop.compile(scores, "aot_eager")
    with captured_step_emulation():
        loop = hotloop.Loop(model, optimizer, run=run, sentinel=0)

        @loop.step
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step(torch.randn(2, 4))
        before = hotloop.status(scores).components["model"].modes["inference"]["calls_per_step"]
        for _ in range(20):
            with torch.no_grad():
                scores(torch.randn(2, 4))
                scores(torch.randn(2, 4))
            step(torch.randn(2, 4))
        assert loop.status().tier == run
    assert not before
    # A proof runs a step's optimizer twice, between which there are no calls.
    assert hotloop.status(scores).components["model"].modes["inference"]["calls_per_step"] == {"2": 20}
