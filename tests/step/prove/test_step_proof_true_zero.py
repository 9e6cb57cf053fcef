"""A gradient that is truly zero is all rounding, of which AdamW makes a full step in a random direction."""

import pytest
import torch
from torch import nn

import hotloop
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
    with hotloop.Loop(model, optimizer, run=tier, sentinel=0) as loop:

        @loop.step
        def step(x):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = [step(torch.randn(64, 16, generator=torch.Generator().manual_seed(n))).item() for n in range(12)]
        return losses, loop.status()


def test_right_code_is_proven_though_half_of_the_updates_are_random():
    losses, status = train("aot_eager")
    torch.testing.assert_close(losses, train("eager")[0], rtol=1e-5, atol=1e-6)
    assert status.tier == "aot_eager"
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
