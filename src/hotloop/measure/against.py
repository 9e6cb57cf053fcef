"""Judges a candidate beside eager against a reference that computes in more bits than either.

Where eager computes in float32 or wider, its own error e against the reference tells what rounding does to a tensor, so
the candidate's error c may be a few times that::

    c / max(e, m * r, eps * r, eps / 4 * R) <= 10

r is the tensor's root mean square, R that of the set's median tensor, m the median of e / r over the set; eps is the
spacing of the step's numbers. The last three keep a tensor in which eager happens to be exact, or that is all rounding,
from being held to that. Of 100 right compiles of five models (``benchmarks/verify.py``) the largest was 8.2; a gelu
whose gradient is wrong by 1e-5 gave 20 to 85 in every step. A ReLU that flips at its kink moves every tensor before it
by ten thousand times that, in a right compile as well, yet not in each step: so a tensor's best step counts
(`over_steps`).

In fewer bits such a ratio is blunt: a backward wrong by 1% scores 1.1 at 10% of noise. There slope and residual against
eager tell, by the limits of `hotloop.measure.limits`, and the reference excuses: a candidate that is further from eager
than rounding explains, because it is nearer to the truth than eager is, is no worse for it.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

from hotloop.measure.differences import differences
from hotloop.measure.numerics import ALL, Comparison, Score, compare, conclude

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.measure.differences import Difference, Tensors
    from hotloop.measure.limits import Limits

RATIO = "error ratio"
"""The measure's name: the candidate's error against the reference over eager's."""
RATIO_LIMIT = 10.0
_NEARER = {"slope": 0.5, "residual": 1.25, "relative": 1.25}
"""A measure past its limit is excused where the candidate's own, against the reference, is at most so many times
eager's: its tilt has to be clearly smaller, while two roundings of one size differ by chance."""
_EPS = {"float64": torch.finfo(torch.float64).eps, "float32": torch.finfo(torch.float32).eps}


def against(
    reference: Tensors,
    eager: Tensors,
    candidate: Tensors,
    limits: Limits,
    *,
    spread: Mapping[str, Difference] | None = None,
) -> Comparison:
    """Hold a candidate's tensors against eager's, as `compare` does, and both against a reference in more bits.

    Args:
        reference: the same step's tensors, computed in a wider dtype; what it lacks is judged by eager alone.
        eager: eager's tensors by name.
        candidate: the candidate's.
        limits: ``Limits.compiled`` of what the step computes in.
        spread: as `compare` takes it.
    """
    alone = compare(eager, candidate, limits, spread=spread)
    theirs, ours = _errors(reference, candidate), _errors(reference, eager)
    pairs = {name: (theirs[name], ours[name]) for name in theirs if name in ours and name in alone.differences}
    if not pairs:
        return alone  # there is no reference
    scores = [one for one in alone.scores if one.nearness <= 1 or not _excused(one, pairs)]
    eps = _EPS.get(str(limits.compute_dtype))
    if eps is not None and not limits.updates:
        scores += _ratios(pairs, eps)
    judged = {(one.name, one.measure) for one in alone.scores}
    plain = [one for one in alone.failures if (one.name, one.measure) not in judged]
    return conclude(plain, scores, alone.differences, alone.below_floor)


def _errors(reference: Tensors, tensors: Tensors) -> dict[str, Difference]:
    """Measure tensors against the reference in its dtype, one at a time: no second copy of all is held."""
    found: dict[str, Difference] = {}
    for name, wide in reference.items():
        one = tensors.get(name)
        if wide is None or one is None or one.shape != wide.shape or not one.is_floating_point():
            continue
        measured, _ = differences({name: wide}, {name: one.to(wide.dtype)})
        if name in measured and measured[name].finite and measured[name].relative is not None:
            found[name] = measured[name]
    return found


def _excused(score: Score, pairs: Mapping[str, tuple[Difference, Difference]]) -> bool:
    """Tell whether the candidate is past a limit because it is nearer to the reference than eager."""
    allowed = _NEARER.get(score.measure)
    if allowed is None:
        return False
    chosen = pairs.values() if score.name == ALL else [pairs[score.name]] if score.name in pairs else []
    sides = [(_own(theirs, score.measure), _own(ours, score.measure)) for theirs, ours in chosen]
    known = [(theirs, ours) for theirs, ours in sides if theirs is not None and ours is not None]
    if not known:
        return False
    theirs, ours = (statistics.median(each) for each in zip(*known, strict=True))
    return abs(theirs) <= allowed * abs(ours)


def _own(error: Difference, measure: str) -> float | None:
    """Give a side's own measure against the reference; of a small tensor the absolute error."""
    if measure == "slope":
        return error.tilt
    return error.residual if measure == "residual" else error.rms_difference


def _ratios(pairs: Mapping[str, tuple[Difference, Difference]], eps: float) -> list[Score]:
    """Score each tensor's error ratio, by the formula of this module."""
    sizes = [ours.rms for _, ours in pairs.values() if ours.rms > 0]
    scale = statistics.median(sizes) if sizes else 0.0
    typical = statistics.median([ours.rms_difference / ours.rms for _, ours in pairs.values() if ours.rms > 0] or [0.0])
    found = []
    for name, (theirs, ours) in pairs.items():
        least = max(ours.rms_difference, typical * ours.rms, eps * ours.rms, eps / 4 * scale)
        if least > 0:
            found.append(Score(name, RATIO, theirs.rms_difference / least, RATIO_LIMIT))
    return found
