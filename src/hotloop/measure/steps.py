"""Joins the comparisons of several steps into one verdict: what is wrong stays wrong, rounding changes its sign."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from hotloop.measure.against import NORM, RATIO
from hotloop.measure.numerics import SAME_GRADIENT, Comparison, Score, conclude

if TYPE_CHECKING:
    from collections.abc import Sequence


SCATTERS = 5.0
"""Standard errors of a mean slope that scatter alone explains: of six steps it passes that in one of 250 sets."""


NO_KINK = 1e4
"""So far past its limit no step may be: an activation that flips at its kink moves a few numbers, not a tensor."""


def over_steps(comparisons: Sequence[Comparison], *, scatter: bool = False) -> Comparison:
    """Give the verdict of a proof over several steps, of the same kind of tensors each.

    Slopes and lengths are averaged with their signs: a right compile in bfloat16 can be off by 1.4% in one matrix at
    one step, and by a fifth of that at the next with the other sign, where a wrong factor stays. Of residuals the
    median step counts, since a ReLU that flips at its kink at one step is no fault; of error ratios the best (see
    `against`). Small tensors, which may be all rounding, are allowed at each step what they are in the root mean square
    over the steps: eager's own error, which that follows, is near 0 now and then. All else fails at any step: what a
    tier with eager's own kernels differs by, NaN, and what is missing or of another shape or dtype. A tensor is judged
    over the steps that judged it.

    Args:
        comparisons: of ``compare``, one a step, at least one; the result has the last one's ``differences``.
        scatter: also allow a mean slope what its scatter from step to step explains, and judge small tensors by their
            median step: where thousands of comparisons must not go wrong by chance. A fault at every step does not
            hide behind that; one at some steps does.

    Returns:
        a comparison that reads as one of a single step does; ``below_floor`` are the tensors that were so at each step.
    """
    scores: dict[tuple[str, str], list[Score]] = {}
    for comparison in comparisons:
        for score in comparison.scores:
            scores.setdefault((score.name, score.measure), []).append(score)
    measured = set(scores)
    plain = {each: None for one in comparisons for each in one.failures if (each.name, each.measure) not in measured}
    below = set.intersection(*(set(one.below_floor) for one in comparisons))
    return conclude(
        list(plain),
        [_joined(each, scatter=scatter) for each in scores.values()],
        comparisons[-1].differences,
        sorted(below),
    )


def that_stays(comparisons: Sequence[Comparison], *, most: float) -> Comparison:
    """Give the verdict over steps of a tier that runs eager's own kernels, where these differ from run to run.

    Such a difference is often none at all, and now and then many times what a few repeats have shown: an atomic add
    that comes in another order flips one rounding early in the backward pass, and everything behind it follows. Over
    the thousands of tensors of a model some are then past any limit that four repeats can give, each time others. What
    a recording does wrong it does at each replay. So a tensor fails that is past its limit in half of the steps or
    more, or further than ``most`` times its limit in any; and whatever no noise makes, at any step.

    Args:
        comparisons: of ``compare`` under ``Limits.rounding()``, one a step, at least one.
        most: how many times its limit a tensor may be off at a single step.
    """
    steps = len(comparisons)
    scores: dict[tuple[str, str], list[Score]] = {}
    for comparison in comparisons:
        for score in comparison.scores:
            scores.setdefault((score.name, score.measure), []).append(score)
    plain = {each: None for one in comparisons for each in one.failures if (each.name, each.measure) not in scores}
    kept = []
    for found in scores.values():
        ranked = sorted(found, key=lambda score: -score.nearness)
        counts = found[0].measure == SAME_GRADIENT or ranked[0].nearness > most
        usual = ranked[(steps - 1) // 2] if len(ranked) > (steps - 1) // 2 else None  # else equal in most steps
        kept += [ranked[0]] if counts else [usual] if usual is not None else []
    return conclude(list(plain), kept, comparisons[-1].differences, ())


def _joined(steps: list[Score], *, scatter: bool) -> Score:
    name, measure = steps[0].name, steps[0].measure
    if measure in ("slope", NORM):
        value, limit = (statistics.fmean(each) for each in zip(*((s.value, s.limit) for s in steps), strict=True))
        if scatter and len(steps) > 1:
            apart = statistics.stdev(each.value for each in steps) / math.sqrt(len(steps))
            limit = max(limit, SCATTERS * apart)
        return Score(name, measure, value, limit)
    if measure == "relative":
        usual = math.sqrt(statistics.fmean(each.limit**2 for each in steps))
        steps = [dataclasses.replace(each, limit=max(each.limit, usual)) for each in steps]
    ranked = sorted(steps, key=lambda score: score.nearness)
    if measure in (RATIO, "residual") and ranked[-1].nearness > NO_KINK:
        return ranked[-1]
    if measure == RATIO:
        return ranked[0]
    # The upper middle of an even number: two steps of which one is wrong are no proof.
    typical = measure == "residual" or (scatter and measure == "relative")
    return ranked[len(ranked) // 2] if typical else ranked[-1]
