"""Operators of torch that call functions (``torch.cond``, ``while_loop``, ``flex_attention``) never end a run."""

import pytest
import torch
from step_programs import GRAPH, Both, engines
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from hotloop._torch.dispatch import name_of, observing


class Choosing(nn.Module):
    """A model that chooses by a value what it computes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a * 3, (self.inner(x),))


def outside(model, x):
    return torch.cond(x.sum() > 0, torch.square, torch.abs, (model(x),))


def inside(model, x):
    return model(x).square()


def repeating(model, x):
    with torch.no_grad():
        _, x = while_loop(lambda n, _: n < 3, lambda n, x: (n + 1, x * 0.5), (torch.zeros((), dtype=torch.long), x))
    return model(x).square()


def attending(model, x):
    with torch.no_grad():
        q = x.view(1, 1, 4, 4)
        x = flex_attention(q, q, q).view(4, 4)
    return model(x).square()


CASES = {
    outside: (nn.Linear, "decide what runs: torch.cond", "compute both results"),
    inside: (Choosing, "decide what runs: torch.cond", "compute both results"),
    repeating: (nn.Linear, "decide what runs: torch.while_loop", "a fixed number of turns"),
    attending: (nn.Linear, "calls functions runs uncompiled", "torch.compile(flex_attention)"),
}


def program_of(loss_of, make):
    def program(run):
        model = make(*(() if make is Choosing else (4, 4)))
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-4)

        @run.loop(model, optimizer).step
        def train_step(x):
            loss = loss_of(model, x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        for _ in range(10):
            run.note(train_step(torch.randn(4, 4)))
        return {"model": model}

    return program


@pytest.mark.parametrize("loss_of", CASES, ids=lambda one: one.__name__)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_an_operator_that_calls_functions_only_declines_in_plain_words(loss_of):
    make, reason, hint = CASES[loss_of]
    with engines("cpu"):
        run = Both("cpu").alike(program_of(loss_of, make), exact=True, asked=GRAPH)
    (told,) = run.declined
    assert reason in told.reason
    assert hint in told.hint
    assert told.file == __file__
    assert run.status().tier == "eager"


@pytest.mark.campaign
@pytest.mark.parametrize("loss_of", [outside, inside], ids=lambda one: one.__name__)
@pytest.mark.some_of(2)
def test_a_compiled_tier_is_proven_beside_it(loss_of):
    run = Both("cpu").alike(program_of(loss_of, CASES[loss_of][0]), exact=True, asked="aot_eager")
    assert run.status().tier == "aot_eager", run.declined


def test_operations_in_its_functions_are_observed():
    seen = []

    def handle(operation, args, kwargs):
        seen.append(name_of(operation))
        return operation(*args, **kwargs)

    with torch.no_grad(), observing(handle):
        torch.cond(torch.ones(()) > 0, torch.sin, torch.cos, (torch.ones(2),))
    assert "higher_order.cond" in seen
    assert "aten.sin" in seen
