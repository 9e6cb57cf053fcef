"""Code that is compiled anew while its tier is in force (an adapter is added, switched, merged) is proven like the first."""

import pytest
import torch
from torch import nn

import hotloop
from hotloop import events as ev
from hotloop.testing import captured_step_emulation

SWITCHED = 12


class Adapted(nn.Module):
    """Has an adapter that may be added and switched on; compiled, its part of the sum is times a factor."""

    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.factor = nn.Linear(8, 4), factor
        self.adapters, self.active = nn.ModuleDict(), ""

    def forward(self, x):
        found = self.layer(x)
        if self.active:
            found = found + self.adapters[self.active](x) * (self.factor if torch.compiler.is_compiling() else 1.0)
        return found


def train(tier, factor=1.0, steps=30):
    """Give the losses, the status, the events, and what ran in each step."""
    model = Adapted(factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, ran = [], []

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with hotloop.Loop(model, optimizer, run=tier, sentinel=None) as loop, hotloop.watch() as events:
        hot = loop.step(step)
        for number in range(steps):
            if number == SWITCHED:
                model.adapters["new"] = nn.Linear(8, 4)
                model.active = "new"
                optimizer.add_param_group({"params": list(model.adapters.parameters())})
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(number))
            losses.append(hot(x).item())
            ran.append(loop.last_ran())
        return losses, loop.status(), events, ran


def of(events, kind):
    return [one for one in events if isinstance(one, kind)]


@pytest.mark.parametrize("tier", ["aot_eager", "aot_eager+graph"])
def test_code_for_a_new_adapter_is_proven_before_it_stays_in_force(tier):
    with captured_step_emulation():
        eager, *_ = train("eager")
        losses, status, events, ran = train(tier)
    torch.testing.assert_close(losses, eager, rtol=1e-5, atol=1e-6)
    assert status.tier == tier
    assert ran[-1][0] == tier
    proven = [(one.tier, one.step) for one in of(events, ev.TierProven)]
    assert [step > SWITCHED for of_tier, step in proven if of_tier == "aot_eager"] == [False, True], proven
    assert sum("has compiled code anew" in line for line in status.decisions) == 1


@pytest.mark.parametrize("tier", ["aot_eager", "aot_eager+graph"])
def test_wrong_code_for_a_new_adapter_is_found_at_once(tier):
    with captured_step_emulation():
        _, status, events, _ = train(tier, factor=1.3)
    declined = of(events, ev.TierDeclined)
    assert "does not agree with eager" in declined[0].reason
    assert SWITCHED < declined[0].step < SWITCHED + 8
    assert "aot_eager" not in status.tier


def test_code_that_is_compiled_outside_of_steps_asks_for_no_proof():
    model = Adapted(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with hotloop.Loop(model, optimizer, run="aot_eager", sentinel=None) as loop, hotloop.watch() as events:
        hot = loop.step(step)
        for number in range(20):
            hot(torch.randn(6, 8))
            if number == SWITCHED:
                with torch.no_grad():
                    model(torch.randn(6, 8))
        assert len(of(events, ev.TierProven)) == 1


def test_code_is_proven_that_a_step_has_compiled_before_it_raised():
    model, bad = Adapted(1.3), [False]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x):
        loss = model(x).square().mean()
        if bad[0]:
            raise ValueError("a batch that is not to be trained on")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with hotloop.Loop(model, optimizer, run="aot_eager", sentinel=None) as loop, hotloop.watch() as events:
        hot = loop.step(step)
        for number in range(20):
            if number == SWITCHED:
                model.adapters["new"], model.active = nn.Linear(8, 4), "new"
                optimizer.add_param_group({"params": list(model.adapters.parameters())})
                bad[0] = True
                with pytest.raises(ValueError, match="not to be trained on"):
                    hot(torch.randn(6, 8))
                bad[0] = False
            hot(torch.randn(6, 8))
        assert loop.status().tier == "eager"
    (declined,) = of(events, ev.TierDeclined)
    assert "does not agree with eager" in declined.reason


class SecondSize(nn.Linear):
    """Compiled, it is wrong by a factor for another batch size than the first, as code for sizes that vary may be."""

    def __init__(self, factor):
        super().__init__(8, 4)
        self.factor = factor

    def forward(self, x):
        wrong = torch.compiler.is_compiling() and x.size(0) != 6
        return super().forward(x) * (self.factor if wrong else 1.0)


@pytest.mark.parametrize("factor", [1.0, 1.001, 1.3])
def test_wrong_code_for_a_second_size_is_found_at_once(factor):
    """A single step past its limits decides nothing, and code that was proven must not run until others have."""
    torch.manual_seed(0)
    model = SecondSize(factor)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ran = []
    with hotloop.Loop(model, optimizer, run="aot_eager", sentinel=None) as loop, hotloop.watch() as events:
        hot = loop.step(step)
        for number in range(40):
            hot(torch.randn(6 if number < SWITCHED else 4, 8))
            ran.append(loop.last_ran()[1])
    declined = of(events, ev.TierDeclined)
    if factor == 1.0:
        assert not declined
        assert ran[-1] == "run"
        assert loop.status().tier == "aot_eager"
    else:
        assert len(declined) == 1, ran
        assert "does not agree with eager" in declined[0].reason
        first = ran.index("proof", SWITCHED)
        assert "run" not in ran[first : declined[0].step + 1], ran  # only eager's outcomes count from there on
