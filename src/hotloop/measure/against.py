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
eager tell, by the limits of `hotloop.measure.limits`. What these do not know is the state of the training: as a loss
goes from 2.3 to 0.1, the rounding of the logits becomes twenty times as much of it. So a limit is at least a few times
what eager itself is off by, against the reference.

That alone would let anything pass where eager is mostly rounding: 24 layers with BatchNorm, whose gradients under
bfloat16 are as far off as they are long, and a backward that makes zeros of them. The direction of such a gradient says
little; its length does, which rounding hardly changes. So there the candidate's length is held against eager's.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

import torch

from hotloop.measure.differences import differences
from hotloop.measure.limits import SPREADS
from hotloop.measure.numerics import ALL, Comparison, Score, compare, conclude, pooled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.measure.differences import Difference, Tensors
    from hotloop.measure.limits import Limits

RATIO = "error ratio"
"""The measure's name: the candidate's error against the reference over eager's."""
RATIO_LIMIT = 10.0
NORM = "norm"
"""The measure's name: the logarithm of the candidate's length over eager's."""
ANOTHER_STEP = 0.02
"""Eager's relative error in the median tensor beyond which a step in float32 is not the same step in float64: that is
no rounding any more, but code that goes by the dtype it meets."""
FAR_OFF = 0.1
"""Eager's own relative error beyond which the direction of a tensor tells little; its length still does."""
_ROUNDING = 3.0
"""Eager's own relative error beyond which a tensor is all rounding, and so is its length. The gradient of the bias of
an attention's keys is truly 0; compiled code, which rounds less often, makes a tenth of what eager makes of it. What
ninety BatchNorms leave of a gradient is 0.86 off."""
NORM_LIMIT, _NORMS_LIMIT = 0.3, 0.15
"""Of a tensor, and of the median tensor. Two honest compiles of 24 layers with BatchNorm, whose eager gradients under
bfloat16 were as far off as they are long, came to 0.22 and 0.06 in single steps on a CPU."""
_MANY = 64
"""With fewer effective elements a length is too much a matter of chance."""
_OWN = {"slope": 3.0, "residual": 2.0, "relative": 2.0}
"""A limit is at least so many times eager's own measure against the reference: two roundings of one size are 1.4 times
as far from each other; tilts have signs, so that one of two may be near 0 by chance."""
FEW = {"slope": 8, "relative": _MANY}
"""With fewer effective elements it is `SPREADS` times: a tilt is one draw, near 0 by chance, and so is the error of a
tensor that is all rounding (the bias of scores that are only ever compared)."""
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
    eps = _EPS.get(str(limits.compute_dtype))
    if not pairs or (eps is not None and _typical(pairs) > ANOTHER_STEP):
        return alone  # there is no reference, or it is one of another step
    shared = _shared(alone, pairs, limits)
    scores = [_allowed(one, pairs, alone.differences, shared) for one in alone.scores]
    if eps is not None and not limits.updates:
        scores += _ratios(pairs, eps)
    scores += _norms(pairs)
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


def _typical(pairs: Mapping[str, tuple[Difference, Difference]]) -> float:
    """Give how far eager is from the reference in the median tensor."""
    return statistics.median(ours.relative or 0.0 for _, ours in pairs.values())


def _shared(alone: Comparison, pairs: Mapping[str, tuple[Difference, Difference]], limits: Limits) -> float | None:
    """Give eager's own tilt of all tensors together, each weighted as in the candidate's."""
    if limits.updates:
        tilts = [ours.tilt for _, ours in pairs.values() if ours.tilt is not None]
        return statistics.median(tilts) if tilts else None
    slopes = [one for one in alone.scores if one.measure == "slope" and one.name in pairs]
    pool = [
        (ours.tilt, one.limit) for one in slopes if (ours := pairs[one.name][1]).numel > 1 and ours.tilt is not None
    ]
    return pooled(pool) if pool else None


def _allowed(
    score: Score,
    pairs: Mapping[str, tuple[Difference, Difference]],
    found: Mapping[str, Difference],
    shared: float | None,
) -> Score:
    """Give a score whose limit is at least a few times eager's own measure against the reference."""
    if score.measure not in _OWN:
        return score
    chosen = pairs.values() if score.name == ALL else [pairs[score.name]] if score.name in pairs else []
    own = [value for _, ours in chosen if (value := own_measure(ours, score.measure)) is not None]
    if score.measure == "slope" and score.name == ALL:
        own = [shared] if shared is not None else []
    if not own:
        return score
    times = _OWN[score.measure]
    if score.name in found and found[score.name].effective < FEW.get(score.measure, 0):
        times = SPREADS
    return dataclasses.replace(
        score, limit=max(score.limit, times * abs(statistics.median(own)) / unit_of(score, found))
    )


def own_measure(error: Difference, measure: str) -> float | None:
    """Give a measure of how far eager is from the reference, or from itself; of a small tensor the absolute error."""
    if measure == "slope":
        return error.tilt
    return error.residual if measure == "residual" else error.rms_difference


def unit_of(score: Score, found: Mapping[str, Difference]) -> float:
    """Give what a measure is in units of: a small tensor's difference, of the set's typical tensor."""
    if score.measure != "relative":
        return 1.0
    difference = found[score.name].rms_difference if score.name in found else 0.0
    return difference / score.value if score.value > 0 and difference > 0 else 1.0


def _norms(pairs: Mapping[str, tuple[Difference, Difference]]) -> list[Score]:
    """Score how much longer or shorter the candidate's tensors are than eager's, where eager is far off itself.

    By ``log(|c| / |e|)``, where |c|^2 = r^2 * ((1 + tilt)^2 + residual^2), both held against the reference r.
    """
    found, all_of_them = [], []
    for name, (theirs, ours) in pairs.items():
        if not FAR_OFF < (ours.relative or 0.0) <= _ROUNDING or theirs.effective < _MANY:
            continue
        lengths = [length_of(one) for one in (theirs, ours)]
        ratio = math.log(lengths[0] / lengths[1]) if min(lengths) > 0 else math.inf
        all_of_them.append(ratio)
        found.append(Score(name, NORM, ratio, NORM_LIMIT))
    if all_of_them:
        found.append(Score(ALL, NORM, statistics.median(all_of_them), _NORMS_LIMIT))
    return found


def length_of(error: Difference) -> float:
    """Give a tensor's length in units of that of what it was held against."""
    return math.hypot(1.0 + (error.tilt or 0.0), error.residual or 0.0)


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
