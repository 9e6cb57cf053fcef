"""Judges a candidate beside eager by what other roundings of the same step come to.

The reference in more bits (`hotloop.measure.against`) tells how far eager is off, once: of two roundings, either may
be the lucky one. And a model can be in a state in which that decides. Stable Diffusion's UNet, which learns that noise
cannot be predicted, leaves gradients behind that nearly cancel: after 200 steps on an H200 (bfloat16, torch 2.11) right
code was 4 times past its limits, after 600 steps 50 times, and with the reference twice and 8 times.

So the step is run again from parameters that were moved by less than they are rounded by, several times. What that
does to a tensor is what rounding does to it, and a right candidate is one more of these draws::

    measure <= max(limit, 4 * the furthest of the draws)

There right code came to 0.15 of 8 times a single draw where it had been 4 times past its limits, and to 0.12 to 0.73
in all, over 686 tensors at five states of the training. What draws leave without a direction keeps a length, which is
held against theirs, so that a backward that makes zeros is not taken for one more rounding.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from hotloop.measure.against import (
    FAR_OFF,
    FEW,
    MANY,
    NORM,
    NORM_LIMIT,
    NORMS_LIMIT,
    length_of,
    own_measure,
    unit_of,
)
from hotloop.measure.limits import SPREADS
from hotloop.measure.numerics import ALL, Score, compare, conclude, pooled

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.measure.differences import Difference, Tensors
    from hotloop.measure.limits import Limits
    from hotloop.measure.numerics import Comparison

DRAWS = 3
"""How often a step is run from moved parameters."""
_FURTHEST = 4.0
"""How many times as far as the furthest draw a right candidate may be."""
_LENGTHS = 3.0
"""The same for logarithms of lengths."""


def beside_roundings(
    eager: Tensors, candidate: Tensors, limits: Limits, draws: Sequence[Mapping[str, Difference]]
) -> Comparison:
    """Hold a candidate's tensors against eager's, as `compare` does, with room for what rounding does to each.

    Args:
        eager: eager's tensors by name.
        candidate: the candidate's.
        limits: ``Limits.compiled`` of what the step computes in.
        draws: how far other roundings of eager's step were from it, by tensor.
    """
    alone = compare(eager, candidate, limits)
    scores = [_allowed(one, alone, draws) for one in alone.scores]
    if not limits.updates:
        scores += _lengths(alone.differences, draws)
    judged = {(one.name, one.measure) for one in alone.scores}
    plain = [one for one in alone.failures if (one.name, one.measure) not in judged]
    return conclude(plain, scores, alone.differences, alone.below_floor)


def _allowed(score: Score, alone: Comparison, draws: Sequence[Mapping[str, Difference]]) -> Score:
    """Give a score whose limit is at least a few times what the furthest draw came to."""
    found = alone.differences
    if score.name == ALL:
        own = [_of_all(score.measure, alone, one) for one in draws]
        return dataclasses.replace(score, limit=max(score.limit, _FURTHEST * max(own, default=0.0)))
    measures = [own_measure(one[score.name], score.measure) for one in draws if score.name in one]
    known = [abs(one) for one in measures if one is not None and math.isfinite(one)]
    if not known:
        return score
    few = found[score.name].effective < FEW.get(score.measure, 0)
    furthest = (SPREADS if few else _FURTHEST) * max(known)
    return dataclasses.replace(score, limit=max(score.limit, furthest / unit_of(score, found)))


def _of_all(measure: str, alone: Comparison, draw: Mapping[str, Difference]) -> float:
    """Give what one draw comes to over all tensors: the median residual, and the tilt that they share."""
    known = [draw[name] for name in alone.differences if name in draw]
    if measure == "residual":
        return statistics.median([one.residual for one in known if one.residual is not None] or [0.0])
    slopes = {one.name: one.limit for one in alone.scores if one.measure == "slope" and one.name != ALL}
    pool = [(one.tilt, slopes[one.name]) for one in known if one.name in slopes and one.tilt is not None]
    if pool:
        return abs(pooled(pool))
    return abs(statistics.median([one.tilt for one in known if one.tilt is not None] or [0.0]))


def _lengths(found: Mapping[str, Difference], draws: Sequence[Mapping[str, Difference]]) -> list[Score]:
    """Score how much longer or shorter than eager's the tensors are whose direction rounding changes."""
    scores, ratios, of_draws = [], [], []
    for name, one in found.items():
        drawn = [draw[name] for draw in draws if name in draw]
        if one.effective < MANY or max((each.relative or 0.0 for each in drawn), default=0.0) <= FAR_OFF:
            continue
        ratio, others = _log(one), [_log(each) for each in drawn]
        scores.append(Score(name, NORM, ratio, max(NORM_LIMIT, _LENGTHS * max(map(abs, others)))))
        ratios.append(ratio)
        of_draws.append(others)
    if scores:
        others = [abs(statistics.median(each)) for each in zip(*of_draws, strict=False)]
        scores.append(Score(ALL, NORM, statistics.median(ratios), max(NORMS_LIMIT, _LENGTHS * max(others))))
    return scores


def _log(one: Difference) -> float:
    length = length_of(one)
    return math.log(length) if length > 0 else -math.inf
