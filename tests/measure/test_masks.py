"""Dropout's masks: the share of zeros fits p, and forward and backward drop the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hotloop.errors import ConfigError
from hotloop.measure import mask_statistics, masks_agree
from hotloop.measure.masks import wilson


def dropped(p, n=100_000, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return F.dropout(torch.ones(n, dtype=dtype), p)


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("n", [0, 1, 7, 100_000])
def test_honest_masks_agree(p, n):
    for seed in range(5):
        verdict = mask_statistics(dropped(p, n, seed), p)
        assert verdict.agrees, str(verdict)


@pytest.mark.parametrize(
    ("p", "actual"), [(0.1, 0.11), (0.1, 0.09), (0.5, 0.51), (0.0, 0.001), (1.0, 0.999), (0.1, 0.0)]
)
def test_wrong_rates_do_not(p, actual):
    verdict = mask_statistics(dropped(actual, dtype=torch.bfloat16), p)
    assert not verdict.agrees
    assert f"p={p:g}" in str(verdict)


def test_the_interval_is_wilsons():
    # The worked values of Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3.
    assert wilson(81, 263, 0.95) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148, 0.95) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20, 0.95) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29, 0.95) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_as_many_honest_masks_agree_as_the_confidence_says():
    agreeing = sum(mask_statistics(dropped(0.3, 500, seed), 0.3, confidence=0.9).agrees for seed in range(400))
    assert 0.86 <= agreeing / 400 <= 0.94


def test_forward_and_backward_agree_on_the_mask():
    torch.manual_seed(0)
    x = torch.ones(64, 64, requires_grad=True)
    output = F.dropout(x, 0.2)
    output.sum().backward()
    assert masks_agree(output, x.grad)
    assert not masks_agree(output, dropped(0.2, 64 * 64, seed=1).reshape(64, 64))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mask_statistics(torch.ones(3), 1.5), "p=1.5"),
        (lambda: mask_statistics(torch.ones(3), 0.5, confidence=1.0), "confidence=1.0"),
        (lambda: masks_agree(torch.ones(3), torch.ones(4)), "cannot agree"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
