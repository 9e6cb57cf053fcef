"""Joins the comparisons of several steps into one verdict: a fault stays the same, rounding changes its sign."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from hotloop.measure.numerics import SAME_GRADIENT, Comparison, Score, conclude, unscored_failures
from hotloop.measure.wide_reference import NORM, RATIO

if TYPE_CHECKING:
    from collections.abc import Sequence


def over_steps(comparisons: Sequence[Comparison]) -> Comparison:
    """Return the verdict of a proof over several steps; each comparison is of the same kind of tensors.

    Slopes and lengths are averaged with their signs: a right compile in bfloat16 can be off by 1.4% in one matrix at
    one step, and by a fifth of that at the next with the other sign, while a wrong factor stays. Of residuals the
    median step counts, since a ReLU that flips at its kink at one step is no fault; of error ratios the best step (see
    `wide_reference`). A small tensor, which may be all rounding, is allowed at each step the root mean square of its
    limits over the steps: these follow eager's own error, which is near 0 now and then. Everything else fails at any
    step: a difference in a tier with eager's own kernels, NaN, and a tensor that is missing or of another shape or
    dtype. A tensor is judged over the steps that judged it.

    Args:
        comparisons: of ``compare``, one per step, at least one; the result has the last one's ``differences``.

    Returns:
        a comparison that reads like that of a single step; ``below_floor`` names the tensors below it at every step.
    """
    scores = _by_measure(comparisons)
    last = comparisons[-1].below_floor
    below = {name: last[name] for name in sorted(last) if all(name in one.below_floor for one in comparisons)}
    return conclude(
        unscored_failures(comparisons, set(scores)),
        [_join(steps) for steps in scores.values()],
        comparisons[-1].differences,
        below,
    )


def over_noisy_steps(comparisons: Sequence[Comparison], *, most: float) -> Comparison:
    """Return the verdict over steps of a tier that runs eager's own kernels, where these differ from run to run.

    Such a difference is often none at all, and now and then many times what a few repeats have shown: an atomic add
    that comes in another order flips one rounding early in the backward pass, and everything behind it follows. Among
    the thousands of tensors of a model some are then past any limit that four repeats can give, other tensors each
    time. A wrong recording, however, is wrong at each replay. So a tensor fails that is past its limit in half of the
    steps or more, or further than ``most`` times its limit in any step. Whatever no noise makes fails at any step.

    Args:
        comparisons: of ``compare`` under ``Limits.rounding()``, one per step, at least one.
        most: how many times its limit a tensor may be off at a single step.
    """
    scores = _by_measure(comparisons)
    middle = (len(comparisons) - 1) // 2
    kept = []
    for steps in scores.values():
        ranked = sorted(steps, key=lambda score: -score.nearness)
        if steps[0].measure == SAME_GRADIENT or ranked[0].nearness > most:
            kept.append(ranked[0])
        elif len(ranked) > middle:  # else the tensor was equal in most steps
            kept.append(ranked[middle])
    return conclude(unscored_failures(comparisons, set(scores)), kept, comparisons[-1].differences, {})


def _by_measure(comparisons: Sequence[Comparison]) -> dict[tuple[str, str], list[Score]]:
    scores: dict[tuple[str, str], list[Score]] = {}
    for comparison in comparisons:
        for score in comparison.scores:
            scores.setdefault((score.name, score.measure), []).append(score)
    return scores


def _join(steps: list[Score]) -> Score:
    name, measure = steps[0].name, steps[0].measure
    if measure in ("slope", NORM):
        value = statistics.fmean(score.value for score in steps)
        return Score(name, measure, value, statistics.fmean(score.limit for score in steps))
    if measure == "relative":
        usual = math.sqrt(statistics.fmean(score.limit**2 for score in steps))
        steps = [score.widened(usual) for score in steps]
    ranked = sorted(steps, key=lambda score: score.nearness)
    # An activation that flips at its kink moves a few numbers, not a tensor.
    no_kink = 1e4
    if measure in (RATIO, "residual") and ranked[-1].nearness > no_kink:
        return ranked[-1]
    if measure == RATIO:
        return ranked[0]
    # The upper middle of an even number: two steps of which one is wrong are no proof.
    return ranked[len(ranked) // 2] if measure == "residual" else ranked[-1]
