"""Steps whose own rounding is large: a proof asks a step in more bits which of two results is wrong, if any."""

import pytest
import torch
from step_sentinels import checked_every
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop.step.prove.outcomes import kind_of
from hotloop.step.prove.wide_reference import wide_step
from hotloop.step.state.holdings import Holdings
from hotloop.step.state.program import Program


class Cancelling(nn.Module):
    """Sums large numbers that nearly cancel; compiled, in another order, and times a factor where that is wrong."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Linear(8, 4, bias=False), factor

    def forward(self, x):
        signs = 1e6 * (1 - 2 * (torch.arange(len(x)) % 2)).to(x.dtype)
        if torch.compiler.is_compiling():
            x, signs = x.flip(0), signs.flip(0) * self.factor
        return (self.layer(x).sum(1) * signs).sum()


def batch():
    x = torch.randn(32, 8)
    return torch.stack((x, x * (1 + 1e-3 * torch.randn_like(x))), 1).reshape(64, 8)


def trained(model, batch, tier="aot_eager", steps=16, sentinel=None):
    """Train for a few steps; gives the optimizer, and what became of the loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.5)
    loop = hotloop.Loop(model, optimizer, run=tier, sentinel=sentinel)

    @loop.step
    def step(x):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with loop, hotloop.watch() as events:
        for _ in range(steps):
            step(batch())
        return optimizer, loop.status(), [one for one in events if isinstance(one, ev.TierDeclined)]


def run(factor):
    return trained(Cancelling(factor), batch)[1:]


def test_two_right_orders_of_a_sum_that_nearly_cancels_are_both_right():
    status, declined = run(1.0)
    assert not declined, declined
    assert status.tier == "aot_eager"


@pytest.mark.parametrize("factor", [0.5, 1.3])
def test_a_wrong_factor_is_found_beneath_such_rounding(factor):
    status, declined = run(factor)
    assert status.tier == "eager"
    assert "does not agree with eager" in declined[0].reason


class Deep(nn.Module):
    """Layers with BatchNorm, whose rounding under bfloat16 is as large as their gradients; their backward may be wrong."""

    def __init__(self, factor, width):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.factor = nn.Linear(16, width), nn.Linear(width, 4), factor
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(12)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            weight = layer[0].weight
            if torch.compiler.is_compiling():  # the same value, and another gradient
                weight = weight * self.factor + (weight * (1 - self.factor)).detach()
            x = layer[2](layer[1](torch.nn.functional.linear(x, weight)))
        return self.last(x)


@pytest.mark.campaign
@pytest.mark.parametrize(("factor", "width"), [(0.0, 7), (0.5, 24), (1.4, 7), (2.0, 24)])
def test_gradients_that_are_mostly_rounding_are_held_to_their_length(factor, width):
    model = Deep(factor, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with hotloop.Loop(model, optimizer, run="aot_eager", sentinel=None) as loop:

        @loop.step
        def step(x, y):
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(10):
            step(torch.randn(16, 16), torch.randint(4, (16,)))
        assert loop.status().tier == "eager"


def test_where_a_proof_needed_more_bits_its_checks_do_and_find_a_fault():
    model = Cancelling()
    with checked_every(2):
        _, status, declined = trained(model, batch, sentinel=0.5)
        assert status.sentinels[0].checks > 2
        assert not declined
        model = Cancelling()
        made = batch

        def spoilt():
            spoilt.calls += 1
            model.factor = 1.3 if spoilt.calls > 12 else 1.0
            return made()

        spoilt.calls = 0
        _, status, declined = trained(model, spoilt, steps=40, sentinel=0.5)
    assert status.tier == "eager"
    assert "does not agree" in declined[0].reason


@pytest.mark.parametrize(("autocast", "expected"), [(True, torch.float32), (False, torch.float64)])
def test_a_step_in_16_bits_is_held_against_float32(autocast, expected):
    """float64 would take twice the memory, and tell no more."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = hotloop.Loop(model, optimizer, run="aot_eager", sentinel=None)

    @loop.step
    def step(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(16, 8)
    with loop:
        for _ in range(4):
            step(x)
        found = loop._runners[0].code._runs.in_more_bits(((x,), {}))
    assert found["gradient of weight at the optimizer step"].dtype == expected


def test_a_step_in_more_bits_keeps_no_optimizer_state():
    """Two copies of the model's size, in more bits, that nothing is compared with."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x):
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(2, 4)
    step(x)
    holdings = Holdings({"model": model}, {"optimizer": optimizer})
    program = Program(step, holdings, torch.device("cpu"), lambda: False)
    made = wide_step(program, ((x,), {}), torch.float64, [])
    assert {kind_of(name) for name in made} == {"result", "gradient", "parameter"}
