"""Judges a candidate beside eager by what other roundings of the same step come to.

The reference in more bits (`hotloop.measure.against`) tells how far eager is off, once: of two roundings, either may
be the lucky one. And a model can be in a state in which that decides. Stable Diffusion's UNet, which learns that noise
cannot be predicted, leaves gradients behind that nearly cancel: after 200 steps on an H200 (bfloat16, torch 2.11) right
code was 4 times past its limits, after 600 steps 50 times, and with the reference twice and 8 times.

So the step is run in another state, with parameters that were displaced by a good part of themselves, where less
cancels, and there again, several times, from parameters that were moved by no more than a rounding. What that does to a
tensor is what rounding does to it, and a right candidate is one more of these draws::

    measure <= max(limit, 4 * the furthest of the draws)

That excuses slopes and residuals up to a half of the tensor. One that rounding moves further is *blind*: it tells
nothing but its length, within what the draws' lengths differ by. Where more than a quarter of the tensors are blind,
nothing is proven. Displaced by 0.3, 0 to 63 of the UNet's 686 tensors were past the plain limits, the gradients of
attention's queries and keys, where 267 had been.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from hotloop.measure.against import FEW, NORM, NORM_LIMIT, length_of, own_measure, unit_of
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
_BLIND = 0.5
"""A measure that may be larger than this, relative to the tensor, tells nothing: zeros have 1."""
_MOST_BLIND = 0.25
"""The share of a set that may be blind."""
BLIND = "blind"
"""The measure's name: the share of tensors that are."""
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
    blind = set() if limits.updates else {one.name for one in alone.scores if _room(one, alone, draws) > _BLIND}
    scores = [_allowed(one, alone, draws) for one in alone.scores if one.name not in blind]
    if not limits.updates:
        scores += _lengths({name: alone.differences[name] for name in blind}, draws)
    if blind:
        judged = len({one.name for one in alone.scores} - {ALL})
        scores.append(Score(ALL, BLIND, len(blind) / judged, _MOST_BLIND))
    known = {(one.name, one.measure) for one in alone.scores}
    plain = [one for one in alone.failures if (one.name, one.measure) not in known]
    return conclude(plain, scores, alone.differences, alone.below_floor)


def _room(score: Score, alone: Comparison, draws: Sequence[Mapping[str, Difference]]) -> float:
    """Give what the draws allow a tensor's slope or residual to be; 0 of anything else, and of all together."""
    if score.name == ALL or score.measure not in ("slope", "residual"):
        return 0.0
    measures = [own_measure(one[score.name], score.measure) for one in draws if score.name in one]
    few = alone.differences[score.name].effective < FEW.get(score.measure, 0)
    furthest = max((abs(one) for one in measures if one is not None), default=0.0)
    return (SPREADS if few else _FURTHEST) * furthest


def _allowed(score: Score, alone: Comparison, draws: Sequence[Mapping[str, Difference]]) -> Score:
    """Give a score whose limit is at least a few times what the furthest draw came to."""
    if score.name == ALL:
        own = max((_of_all(score.measure, alone, one) for one in draws), default=0.0)
        return dataclasses.replace(score, limit=max(score.limit, min(_BLIND, _FURTHEST * own)))
    if score.measure in ("slope", "residual"):
        return dataclasses.replace(score, limit=max(score.limit, _room(score, alone, draws)))
    of_draws = [own_measure(one[score.name], score.measure) for one in draws if score.name in one]
    furthest = SPREADS * max((abs(one) for one in of_draws if one is not None), default=0.0)
    return dataclasses.replace(score, limit=max(score.limit, furthest / unit_of(score, alone.differences)))


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
    """Score how much longer or shorter than eager's the tensors are that tell nothing else."""
    scores = []
    for name, one in found.items():
        others = [abs(_log(draw[name])) for draw in draws if name in draw]
        scores.append(Score(name, NORM, _log(one), max(NORM_LIMIT, _LENGTHS * max(others, default=0.0))))
    return scores


def _log(one: Difference) -> float:
    length = length_of(one)
    return math.log(length) if length > 0 else -math.inf
