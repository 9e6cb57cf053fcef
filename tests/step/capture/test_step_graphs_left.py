"""What a step returns carries no graph that a backward has used up: it would tie later captures to its stream."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop.step.loop.stepping import without_used_graph
from hotloop.testing import captured_step_emulation


def train(run, body, steps=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    loop = hotloop.Loop(model, optimizer, run=run)
    step = loop.step(lambda x: body(model, optimizer, x))
    results = [step(torch.ones(3, 4)) for _ in range(steps)]
    loop.close()
    return results


def usual(model, optimizer, x):
    out = model(x)
    loss = F.mse_loss(out, torch.zeros_like(out))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "chances": out.softmax(-1), "twice": loss * 2, "model": model, "none": None}


@pytest.mark.parametrize("run", ["eager+graph", "aot_eager+graph", "auto"])
def test_in_every_call_of_a_loop_that_captures(run):
    with captured_step_emulation():
        for result in train(run, usual):
            assert [result[name].grad_fn for name in ("loss", "chances", "twice")] == [None, None, None]
            assert isinstance(result["model"], nn.Module)


def test_a_graph_that_is_still_to_be_used_is_the_callers():
    model = nn.Linear(4, 2)
    for result in (model(torch.ones(1, 4)), [model(torch.ones(1, 4)).sum()], {"a": model.weight}):
        assert without_used_graph(result) is result
