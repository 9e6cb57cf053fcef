"""Dropout under another random stream: its masks cannot be compared one by one, but their statistics can."""

from __future__ import annotations

import dataclasses
import math
import statistics

import torch

from hotloop.errors import ConfigError

# 5 standard deviations: an honest mask of many elements is called wrong once in 1.7 million checks, and of a mask of
# 100,000 elements with p = 0.1 a rate wrong by 5% of p (0.105) is found about every other time.
_DEVIATIONS = 5.0
_CONFIDENCE = 2 * statistics.NormalDist().cdf(_DEVIATIONS) - 1


@dataclasses.dataclass(frozen=True)
class MaskVerdict:
    """Whether a mask's share of zeros is what its probability allows; both ends of ``interval`` are shares."""

    agrees: bool
    zeros: int
    numel: int
    p: float
    interval: tuple[float, float]

    def __str__(self) -> str:
        low, high = self.interval
        share = self.zeros / self.numel if self.numel else 0.0
        dropped = f"{share:.4%} of {self.numel:,} elements dropped, p={self.p:g}"
        return f"{dropped}; that share fits p from {low:.4g} to {high:.4g}"


def mask_statistics(output: torch.Tensor, p: float, *, confidence: float = _CONFIDENCE) -> MaskVerdict:
    """Hold the share of zeros in a dropout's output against its probability.

    The interval is Wilson's score interval (Wilson, 1927, "Probable inference, the law of succession, and statistical
    inference") of the share of zeros, which is right for p near 0 and 1 and for few elements, where the usual
    p +- z*sqrt(p*(1-p)/n) is not; the mask agrees if p lies in it. What goes into the dropout must hold no zeros.

    Args:
        output: what came out of the dropout, of any shape and dtype.
        p: the probability with which an element is dropped, from 0 to 1.
        confidence: the share of honest masks that agree; 1 - 6e-7 unless given.

    Raises:
        ConfigError: ``p`` is not from 0 to 1, or ``confidence`` not between them.
    """
    if not 0 <= p <= 1:
        raise ConfigError(f"p={p}: expected a probability from 0 to 1")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence}: expected a number between 0 and 1")
    numel = output.numel()
    zeros = numel - int(torch.count_nonzero(output))
    low, high = wilson(zeros, numel, confidence)
    return MaskVerdict(low <= p <= high, zeros, numel, p, (low, high))


def wilson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Give Wilson's score interval of a share: (f + z^2/2n -+ z*sqrt(f(1-f)/n + z^2/4n^2)) / (1 + z^2/n)."""
    if not trials:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = successes / trials, z * z / trials
    centre = share + weight / 2
    half = z * math.sqrt(share * (1 - share) / trials + weight / (4 * trials))
    low, high = (centre - half) / (1 + weight), (centre + half) / (1 + weight)
    # Where all or none succeeded the end is exactly 0 or 1, which rounding would miss; p = 0 and p = 1 stand there.
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)


def masks_agree(output: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Say whether forward and backward dropped the same elements.

    A backward that draws its mask anew gives gradients whose every statistic is right, and which are wrong.

    Args:
        output: what came out of the dropout, of any shape and dtype.
        gradient: the gradient with respect to what went in, of the same shape, where the gradient of the output holds
            no zeros (``output.sum()`` gives ones). What went in must hold none either.

    Raises:
        ConfigError: the shapes differ.
    """
    if output.shape != gradient.shape:
        raise ConfigError(f"a mask of shape {tuple(output.shape)} and one of {tuple(gradient.shape)} cannot agree")
    return bool(torch.equal(output == 0, (gradient == 0).to(output.device)))
