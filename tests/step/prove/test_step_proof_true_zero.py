"""A gradient that is truly zero is all rounding, of which AdamW makes a full step in a random direction."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import hotloop
from hotloop import events as ev
from hotloop.measure import Limits
from hotloop.step.prove.outcomes import compare_kinds


class Normalised(nn.Module):
    """Layers whose biases a normalisation takes out again; compiled code sums in another order, and may be wrong."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.factor = nn.ModuleList(nn.Linear(16, 16) for _ in range(4)), factor

    def forward(self, x):
        compiled = torch.compiler.is_compiling()
        for layer in self.layers:
            x = layer(x).flip(0) if compiled else layer(x)
            x = (x - x.mean(0)) / x.var(0).add(1e-5).sqrt()
            x = torch.tanh(x.flip(0) if compiled else x)
        return x * (self.factor if compiled else 1.0)


def train(tier, factor=1.0):
    model = Normalised(factor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-6)
    with hotloop.watch() as events, hotloop.Loop(model, optimizer, run=tier, sentinel=0) as loop:

        @loop.step
        def step(x):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [step(torch.randn(64, 16, generator=torch.Generator().manual_seed(n))).item() for n in range(24)]
        return losses, loop.status(), events


def test_right_code_is_proven_though_half_of_the_updates_are_random():
    losses, status, events = train("aot_eager")
    torch.testing.assert_close(losses, train("eager")[0], rtol=1e-5, atol=1e-6)
    assert status.tier == "aot_eager"
    # What is rounding is not taken for a gradient that no proof has seen.
    assert len([one for one in events if isinstance(one, ev.TierProven)]) == 1
    # Three steps by the usual limits: no step in more bits had to decide, which few models can afford.
    assert "ran 3 times beside another" in next(tier.why for tier in status.tiers if tier.name == "eager")


def test_wrong_code_is_found_beside_random_updates():
    assert train("aot_eager", factor=1.02)[1].tier == "eager"


def values(draw, factor=1.0):
    """Give what a step leaves of layers whose biases have no gradient but rounding, and the parameters before it.

    One layer has far larger gradients than the others, and so has its rounding.
    """
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(draw)
    found, start = {}, {}
    for number, size in enumerate((1.0, 1e4, 1.0, 1.0)):
        weight = torch.randn(16, 16, generator=shared) * (1 + 1e-6 * torch.randn(16, 16, generator=own))
        for name, gradient in (("weight", weight), ("bias", 1e-7 * torch.randn(16, generator=own))):
            before = torch.randn(gradient.shape, generator=shared)
            start[f"parameter {number}.{name}"] = before
            found[f"gradient of {number}.{name} at the optimizer step"] = gradient * size * factor
            found[f"parameter {number}.{name}"] = before - 1e-3 * factor * gradient.sign()
    return found, start


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, []), (1.5, ["gradient", "update"])])
def test_only_gradients_that_stand_out_of_their_layers_rounding_are_judged_and_their_updates(factor, wrong):
    (ours, start), (theirs, _) = values(1), values(2, factor)
    found = compare_kinds(ours, theirs, start, Limits.compiled("float32"), None)
    assert [kind for kind, one in found.items() if not one.agrees] == wrong


def small_bias(factor, ratio, names):
    """Give what a step leaves of four layers; of one the weight's gradients are larger than the true ones of its bias."""
    draws = torch.Generator().manual_seed(0)
    found, start = {}, {}
    for number, size in enumerate((1.0, ratio, 1.0, 1.0)):
        for name, shape, times in zip(names, ((16, 16), (16,)), (size, factor if number == 1 else 1.0), strict=True):
            gradient, before = torch.randn(shape, generator=draws) * times, torch.randn(shape, generator=draws)
            start[f"parameter {number}.{name}"] = before
            found[f"gradient of {number}.{name} at the optimizer step"] = gradient
            found[f"parameter {number}.{name}"] = before - 1e-3 * gradient.sign()
    return found, start


@pytest.mark.parametrize("names", [("weight", "bias"), ("scale", "shift")])
@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 1e3), ("tf32", 1e4), ("float32", 1e5)])
@pytest.mark.parametrize("factor", [-1.0, 1.5, 0.0])
def test_a_true_gradient_is_judged_beside_far_larger_ones_of_its_layer(factor, dtype, ratio, names):
    (ours, start), (theirs, _) = small_bias(1.0, ratio, names), small_bias(factor, ratio, names)
    found = compare_kinds(ours, theirs, start, Limits.compiled(dtype), None)
    assert any(one.name.startswith(f"gradient of 1.{names[1]}") for one in found["gradient"].failures)


class RawFeatures(nn.Module):
    """A layer whose weight's gradient is as large as its features are; compiled, its bias's gradient may be wrong."""

    def __init__(self, factor, size):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.factor = nn.Linear(16, 32), nn.Linear(32, 4), factor
        with torch.no_grad():
            self.first.weight.div_(size)

    def forward(self, x):
        bias = self.first.bias
        if torch.compiler.is_compiling():
            bias = bias * self.factor + (bias * (1 - self.factor)).detach()
        return self.last(torch.tanh(F.linear(x, self.first.weight, bias)))


@pytest.mark.parametrize(("size", "few_bits"), [(3e3, True), (1e6, False)])
@pytest.mark.parametrize(("factor", "tier"), [(-1.0, "eager"), (1.5, "eager"), (1.0, "aot_eager")])
def test_the_bias_of_a_layer_of_raw_features_is_proven(factor, tier, size, few_bits):
    model = RawFeatures(factor, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 / size)
    with hotloop.Loop(model, optimizer, run="aot_eager", sentinel=0) as loop:

        @loop.step
        def step(x):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=few_bits):
                out = model(x * size)
            loss = (out.float() - x[:, :4] - 1.0).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        for number in range(12):
            step(torch.randn(64, 16, generator=torch.Generator().manual_seed(number)))
        assert loop.status().tier == tier
