"""Steps whose own rounding is large: a proof asks a step in more bits which of two results is wrong, if any."""

import pytest
import torch
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop.measure import DRAWS
from hotloop.step import code_proofs, proof
from hotloop.step.proof import CandidateFailedError


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


def run(factor=1.0, steps=16, tier="aot_eager", program=None):
    model, optimizer = program or (made := Cancelling(factor), torch.optim.SGD(made.parameters(), lr=1e-9))
    loop = hotloop.Loop(model, optimizer, run=tier, sentinel=None)

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
        return loop.status(), [one for one in events if isinstance(one, ev.TierDeclined)]


def test_two_right_orders_of_a_sum_that_nearly_cancels_are_both_right():
    status, declined = run(1.0)
    assert not declined, declined
    assert status.tier == "aot_eager"


@pytest.mark.parametrize("factor", [0.5, 1.3])
def test_a_wrong_factor_is_found_beneath_such_rounding(factor):
    status, declined = run(factor)
    assert status.tier == "eager"
    assert "does not agree with eager" in declined[0].reason


@pytest.fixture
def no_more_bits(monkeypatch):
    """A float32 step of a UNet may need more memory than there is."""
    monkeypatch.setattr("hotloop.step.code_proofs.in_more_bits", lambda *_: None)


@pytest.mark.usefixtures("no_more_bits")
def test_without_the_step_in_more_bits_other_roundings_of_it_tell():
    status, declined = run(1.0)
    assert not declined, declined
    assert status.tier == "aot_eager"


@pytest.mark.usefixtures("no_more_bits")
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.3])
def test_without_more_bits_a_wrong_factor_is_found_beneath_rounding_as_well(factor):
    status, declined = run(factor)
    assert status.tier == "eager"
    assert "does not agree with eager" in declined[0].reason


def test_a_step_that_fails_in_other_roundings_is_judged_without_them(monkeypatch, no_more_bits):
    tried = []

    def fails(*_):
        tried.append(True)
        raise CandidateFailedError

    monkeypatch.setattr(proof, "apart", fails)
    status, declined = run(1.0)
    assert tried
    assert status.tier == "eager"
    assert declined


def test_other_roundings_leave_nothing_behind(monkeypatch, no_more_bits):
    """Parameters are moved for a moment only, and no random number of the program's is drawn."""
    drawn, roundings = [], code_proofs.roundings
    monkeypatch.setattr(code_proofs, "roundings", lambda *args: drawn.append(roundings(*args)) or drawn[-1])
    ends = []
    for tier in ("eager", "aot_eager"):
        torch.manual_seed(1)
        model = Cancelling()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9, momentum=0.5)
        torch.manual_seed(2)
        run(
            tier=tier, steps=5, program=(model, optimizer)
        )  # all but the first are proof steps, whose outcome is eager's
        ends.append((model.layer.weight, optimizer.state[model.layer.weight]["momentum_buffer"], torch.rand(3)))
    assert [len(one) for one in drawn] == [DRAWS] * 3
    for eager, proven in zip(*ends, strict=True):
        assert torch.equal(eager, proven)


class Deep(nn.Module):
    """Layers with BatchNorm, whose rounding under bfloat16 is as large as their gradients; their backward may be wrong."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.factor = nn.Linear(16, 24), nn.Linear(24, 4), factor
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24), nn.ReLU()) for _ in range(20)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            weight = layer[0].weight
            if torch.compiler.is_compiling():  # the same value, and another gradient
                weight = weight * self.factor + (weight * (1 - self.factor)).detach()
            x = layer[2](layer[1](torch.nn.functional.linear(x, weight)))
        return self.last(x)


@pytest.mark.parametrize("bits", [True, False])
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0])
def test_gradients_that_are_mostly_rounding_are_held_to_their_length(factor, bits, request):
    if not bits:
        request.getfixturevalue("no_more_bits")
    model = Deep(factor)
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
