"""Judges a candidate beside eager by other roundings of the same step.

A reference in more bits (`hotloop.measure.wide_reference`) shows eager's error once, and by chance it may be small. In
some states that decides. Stable Diffusion's UNet, once it has learnt that noise cannot be predicted, has gradients that
nearly cancel: after 200 steps on an H200 (bfloat16, torch 2.11) right code was 4 times past its limits, after 600 steps
50 times. With the reference it was still 2 and 8 times past them.

So the parameters are displaced by a good part of themselves, where less cancels. From there the step is run several
times, each time from parameters that were moved by at most a rounding. These runs, the *draws*, show what rounding does
to a tensor, and a right candidate is like one more draw::

    measure <= max(limit, 4 * the furthest of the draws)

This excuses slopes and residuals up to half of the tensor. A tensor that rounding moves further is *blind*: only its
length is judged, by the lengths of the draws. If more than a quarter of the tensors are blind, nothing is proven. With
the UNet displaced by 0.3, up to 63 of its 686 tensors were past the plain limits (gradients of attention's queries and
keys), instead of 267.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from hotloop.measure.limits import SPREADS
from hotloop.measure.numerics import ALL, Score, compare, conclude, pooled
from hotloop.measure.wide_reference import FEW, NORM, NORM_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.measure.differences import Difference, Tensors
    from hotloop.measure.limits import Limits
    from hotloop.measure.numerics import Comparison

DRAWS = 3
"""How often a step is run from moved parameters."""
BLIND = "blind"
"""The name of a measure: the share of tensors that are blind."""


def compare_with_roundings(
    eager: Tensors, candidate: Tensors, limits: Limits, draws: Sequence[Mapping[str, Difference]]
) -> Comparison:
    """Compare a candidate's tensors with eager's, as `compare` does, with room for the rounding of each tensor.

    Args:
        eager: eager's tensors by name.
        candidate: the candidate's tensors by name.
        limits: ``Limits.compiled`` of the dtype that the step computes in.
        draws: how far other roundings of eager's step were from it, by tensor.
    """
    alone = compare(eager, candidate, limits)
    room = _Room(alone, draws)
    blind = (
        set() if limits.updates else {score.name for score in alone.scores if room.of_tensor(score) > room.BLIND_FROM}
    )
    scores = [room.widen(score) for score in alone.scores if score.name not in blind]
    scores += [room.length_score(name) for name in blind]
    if blind:
        judged = len({score.name for score in alone.scores} - {ALL})
        scores.append(Score(ALL, BLIND, len(blind) / judged, 0.25))
    return conclude(alone.unscored_failures(), scores, alone.differences, alone.below_floor)


class _Room:
    """The room that the draws of a step leave for the scores of a comparison."""

    FURTHEST = 4.0
    """How many times as far as the furthest draw a right candidate may be."""
    BLIND_FROM = 0.5
    """A measure that may be larger than this, relative to the tensor, proves nothing: a tensor of zeros has 1."""

    def __init__(self, alone: Comparison, draws: Sequence[Mapping[str, Difference]]) -> None:
        self._alone, self._draws = alone, draws

    def of_tensor(self, score: Score) -> float:
        """Return what the draws allow a tensor's slope or residual to be; 0 for any other score."""
        if score.name == ALL or score.measure not in ("slope", "residual"):
            return 0.0
        few = self._alone.differences[score.name].effective < FEW.get(score.measure, 0)
        return (SPREADS if few else self.FURTHEST) * self._furthest(score)

    def widen(self, score: Score) -> Score:
        """Return a score whose limit is at least a few times the measure of the furthest draw."""
        if score.name == ALL:
            own = max((self._of_all(score.measure, draw) for draw in self._draws), default=0.0)
            return score.widened(min(self.BLIND_FROM, self.FURTHEST * own))
        if score.measure in ("slope", "residual"):
            return score.widened(self.of_tensor(score))
        return score.widened(SPREADS * self._furthest(score) / self._alone.unit_of(score))

    def length_score(self, name: str) -> Score:
        """Score how much longer or shorter than eager's a blind tensor is, up to 3 times the furthest draw."""
        draws = [abs(_log_length(draw[name])) for draw in self._draws if name in draw]
        limit = max(NORM_LIMIT, 3.0 * max(draws, default=0.0))
        return Score(name, NORM, _log_length(self._alone.differences[name]), limit)

    def _furthest(self, score: Score) -> float:
        measures = [draw[score.name].measure(score.measure) for draw in self._draws if score.name in draw]
        return max((abs(value) for value in measures if value is not None), default=0.0)

    def _of_all(self, measure: str, draw: Mapping[str, Difference]) -> float:
        """Return a draw's measure over all tensors: the median residual, or the tilt that they share."""
        known = [draw[name] for name in self._alone.differences if name in draw]
        if measure == "residual":
            residuals = [difference.residual for difference in known if difference.residual is not None]
            return statistics.median(residuals or [0.0])
        slopes = {score.name: score.limit for score in self._alone.scores if score.measure == "slope"}
        tilted = [(difference.name, difference.tilt) for difference in known if difference.tilt is not None]
        pool = [(tilt, slopes[name]) for name, tilt in tilted if name in slopes]
        return abs(pooled(pool) if pool else statistics.median([tilt for _, tilt in tilted] or [0.0]))


def _log_length(difference: Difference) -> float:
    return math.log(difference.length) if difference.length > 0 else -math.inf
