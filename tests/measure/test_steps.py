"""A verdict over several steps: chance cancels, faults do not."""

from __future__ import annotations

import pytest
import torch

from hotloop.measure import Comparison, Limits, Score, compare, over_noisy_steps, over_steps
from hotloop.measure.numerics import conclude

BFLOAT16 = Limits.compiled("bfloat16")


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    return {f"layers.{n}": torch.randn(128, 64, generator=generator) for n in range(10)}


def step(seed, factors, *, limits=BFLOAT16, size=5e-3):
    reference = gradients(seed)
    generator = torch.Generator().manual_seed(seed + 100)
    candidate = {
        name: factors.get(name, 1.0) * x * (1 + size * torch.randn(x.shape, generator=generator))
        for name, x in reference.items()
    }
    return compare(reference, candidate, limits)


def test_a_slope_by_chance_cancels_over_steps():
    steps = [step(0, {"layers.3": 1.014}), step(1, {"layers.3": 0.997}), step(2, {"layers.3": 0.999})]
    assert not steps[0].agrees
    joined = over_steps(steps)
    assert joined.agrees, str(joined)
    assert 0 < joined.nearness < 1


def test_a_wrong_factor_stays():
    joined = over_steps([step(seed, {"layers.3": 1.01}) for seed in range(3)])
    (failure,) = joined.failures
    assert (failure.name, failure.measure) == ("layers.3", "slope")
    assert failure.value == pytest.approx(0.01, rel=0.05)
    assert joined.worst.name == "layers.3"


def scored(*scores) -> Comparison:
    return conclude([], [Score("w", *each) for each in scores], {}, [])


@pytest.mark.parametrize(
    ("measure", "values", "agrees"),
    [
        ("slope", [3.0, -1.5, 0.0], True),
        ("slope", [-3.0, -1.0, 0.0], False),
        ("residual", [9.0, 0.5, 0.6], True),
        ("residual", [9.0, 9.0, 0.6], False),
        ("residual", [9.0, 0.5], False),
        ("relative", [9.0, 0.5, 0.6], False),
        ("relative", [0.9, 0.5, 0.6], True),
        ("slope", [float("nan"), 0.0, 0.0], False),
        ("residual", [float("nan"), 0.0], False),
    ],
)
def test_each_measure_is_joined_in_its_own_way(measure, values, agrees):
    assert over_steps([scored((measure, value, 1.0)) for value in values]).agrees is agrees


def test_what_needs_no_limit_fails_at_any_step_and_is_said_once():
    right = step(0, {})
    wrong = compare({"w": torch.ones(3)}, {"w": torch.full((3,), torch.nan)}, BFLOAT16)
    missing = compare({"w": torch.ones(3)}, {"w": None}, BFLOAT16)
    assert over_steps([right, right]).agrees
    joined = over_steps([wrong, wrong, missing, right])
    assert [each.measure for each in joined.failures if each.name == "w"] == ["finite", "missing"]


def rounding(relative, *, spread):
    """A set whose tensors are off by so much each, of eager's own kernels that differ by ``spread``."""
    reference = gradients(0)
    candidate = {name: one * (1 + relative.get(name, 0.0)) for name, one in reference.items()}
    repeat = {name: one * (1 + spread) for name, one in reference.items()}
    allowed = compare(reference, repeat, Limits.rounding()).differences
    return compare(reference, candidate, Limits.rounding(), spread=allowed)


def test_what_no_rounding_makes_fails_at_any_step():
    right = rounding({}, spread=1e-5)
    lost = compare(gradients(0), {**gradients(0), "layers.3": None}, Limits.rounding())
    assert "layers.3" in str(over_noisy_steps([right, lost, right], most=8.0))
