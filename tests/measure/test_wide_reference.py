"""Judging a candidate beside eager against a reference in more bits."""

from __future__ import annotations

import pytest
import torch

from hotloop import measure
from hotloop.measure import ALL, RATIO, Limits, compare_with_reference

WIDE = torch.float64


def noisy(reference, relative, seed, dtype=torch.float32, factor=1.0):
    """What a computation with so much rounding makes of it."""
    draws = torch.Generator().manual_seed(seed)
    return {
        name: (one * factor * (1 + relative * torch.randn(one.shape, generator=draws, dtype=WIDE))).to(dtype)
        for name, one in reference.items()
    }


@pytest.fixture
def reference():
    draws = torch.Generator().manual_seed(0)
    return {f"layer {number}": torch.randn(40, 30, generator=draws, dtype=WIDE) for number in range(6)}


SINGLE = Limits.compiled("float32")
FEW = Limits.compiled("bfloat16")


def of(comparison, name, kind):
    return next(one for one in comparison.scores if (one.name, one.measure) == (name, kind))


def test_in_float32_the_error_may_be_a_few_times_eagers(reference):
    eager = noisy(reference, 1e-6, 1)
    found = compare_with_reference(reference, eager, noisy(reference, 3e-6, 2), SINGLE)
    assert found.agrees, found
    assert of(found, "layer 0", RATIO).value == pytest.approx(3, rel=0.2)
    found = compare_with_reference(reference, eager, noisy(reference, 3e-5, 2), SINGLE)
    assert {one.measure for one in found.failures} == {RATIO}
    assert "times eager's own" in str(found)


def test_a_factor_of_one_in_a_hundred_thousand_is_seen(reference):
    eager, wrong = noisy(reference, 3e-7, 1), noisy(reference, 3e-7, 2)
    wrong["layer 3"] *= 1.00001
    found = compare_with_reference(reference, eager, wrong, SINGLE)
    assert {one.name for one in found.failures} == {"layer 3", ALL}
    assert of(found, "layer 3", RATIO).nearness > 2


def test_the_length_of_a_gradient_that_is_as_far_off_as_it_is_long_is_judged(reference):
    eager, other = noisy(reference, 0.9, 1), noisy(reference, 0.9, 2)
    assert "norm" not in {one.measure for one in compare_with_reference(reference, eager, other, FEW).failures}
    other["layer 3"] = torch.zeros(40, 30)
    assert "norm" in {one.measure for one in compare_with_reference(reference, eager, other, FEW).failures}


def test_a_flip_at_one_step_is_forgiven_and_an_error_at_every_step_is_not(reference):
    def step(seed, relative):
        return compare_with_reference(
            reference, noisy(reference, 3e-7, seed), noisy(reference, relative, seed + 1), SINGLE
        )

    flipped = [step(1, 3e-7), step(3, 1e-3), step(5, 3e-7)]
    assert not flipped[1].agrees
    assert not [one for one in measure.over_steps(flipped).failures if one.measure == RATIO]
    wrong = [step(seed, 1e-5) for seed in (1, 3, 5)]
    assert [one for one in measure.over_steps(wrong).failures if one.measure == RATIO]


def test_in_few_bits_limits_follow_what_eager_is_off_by(reference):
    """As a loss gets small its rounding is a larger part of it, for eager as well."""
    loss = {"result": torch.tensor(0.08, dtype=WIDE)}
    eager, other = ({"result": (loss["result"] * factor).float()} for factor in (1.002, 0.999))
    assert not measure.compare(eager, other, FEW).agrees
    assert compare_with_reference(loss, eager, other, FEW).agrees
    far = {"result": (loss["result"] * 1.05).float()}
    assert not compare_with_reference(loss, eager, far, FEW).agrees


def test_what_is_missing_or_not_finite_stays_a_failure(reference):
    eager, other = noisy(reference, 3e-7, 1), noisy(reference, 3e-7, 2)
    other["layer 0"] = None
    other["layer 1"][0, 0] = float("nan")
    found = compare_with_reference(reference, eager, other, SINGLE)
    assert {(one.name, one.measure) for one in found.failures} >= {("layer 0", "missing"), ("layer 1", "finite")}
