"""A candidate beside other roundings of the same step: what they excuse, and what they leave unproven."""

import pytest
import torch

from hotloop.measure import DRAWS, Limits, compare_with_roundings, differences
from hotloop.step.prove.outcomes import Outcome

LIMITS = Limits.compiled("bfloat16")


def judged(candidate, noisy=(0.02,) * 8, size=256):
    """Hold eight tensors, rounded by so much of themselves, against what ``candidate`` makes of the first."""
    torch.manual_seed(0)
    eager = {f"gradient of {i}": torch.randn(size) for i in range(len(noisy))}

    def rounded(tensor, by):
        return tensor + by * torch.randn_like(tensor)

    def another():
        return {name: rounded(one, by) for (name, one), by in zip(eager.items(), noisy, strict=True)}

    draws = [differences(eager, another())[0] for _ in range(DRAWS)]
    found = another()
    found["gradient of 0"] = candidate(found["gradient of 0"])
    return compare_with_roundings(eager, found, LIMITS, draws)


def same(tensor):
    return tensor


@pytest.mark.parametrize("noise", [0.0, 1e-3, 0.02, 0.1])
def test_one_more_rounding_agrees(noise):
    assert judged(same, (noise,) * 8).agrees


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.5, 1.5, 2.0])
@pytest.mark.parametrize("noise", [1e-3, 0.02, 0.1])
@pytest.mark.parametrize("size", [8, 256])
def test_a_wrong_factor_is_none(factor, noise, size):
    found = judged(lambda one: factor * one, (noise,) * 8, size)
    assert not found.agrees
    assert found.may_be_rounding


def test_a_tensor_that_is_all_rounding_excuses_itself_and_keeps_its_length():
    noisy = (1.0, *(0.02,) * 7)
    assert judged(same, noisy).agrees
    for factor in (0.0, 0.2, 5.0):
        found = judged(lambda one, factor=factor: factor * one, noisy)
        assert ("gradient of 0", "norm") in {(one.name, one.measure) for one in found.failures}


def test_where_rounding_is_as_large_as_many_of_the_tensors_nothing_is_proven():
    found = judged(same, (1.0,) * 3 + (0.02,) * 5)
    (failure,) = found.failures
    assert failure.measure == "blind"
    assert "nothing is proven" in str(failure)
    assert Outcome(None, {"gradient": found}, 0, on_host=False).undecided


def test_what_is_wrong_as_well_is_not_undecided():
    found = judged(lambda one: 0 * one, (1.0,) * 3 + (0.02,) * 5)
    assert not Outcome(None, {"gradient": found}, 0, on_host=False).undecided
