"""Judges a candidate beside eager against a reference that computes in more bits than both.

Where eager computes in float32 or wider, eager's own error e against the reference shows what rounding does to a
tensor. So the candidate's error c may be a few times that::

    c / max(e, m * r, eps * r, eps / 4 * R) <= 10

r is the tensor's root mean square, R that of the set's median tensor, m the median of e / r over the set; eps is the
spacing of the step's numbers. The last three terms are for tensors in which eager happens to be exact, or that are all
rounding. Of 100 right compiles of five models (``benchmarks/verify.py``) the largest ratio was 8.2; a gelu whose
gradient is wrong by 1e-5 gave 20 to 85 in every step. A ReLU that flips at its kink moves every tensor before it by ten
thousand times that, in a right compile as well, but not in every step. So a tensor's best step counts (`over_steps`).

In fewer bits such a ratio is blunt: a backward wrong by 1% scores 1.1 at 10% of noise. There slope and residual against
eager decide, by the limits of `hotloop.measure.limits`. These limits do not know the state of the training: as a loss
goes from 2.3 to 0.1, the rounding of the logits becomes twenty times as large a part of the loss. So a limit is at
least a few times eager's own error against the reference.

That alone would let anything pass where eager is mostly rounding. An example is 24 layers with BatchNorm, whose
gradients under bfloat16 are as far off as they are long, and a backward that makes zeros of them. The direction of such
a gradient says little; its length says more, since rounding hardly changes it. So there the candidate's length is held
against eager's.
"""

from __future__ import annotations

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

    _Pairs = dict[str, tuple[Difference, Difference]]  # by tensor: the candidate and eager, each against the reference

RATIO = "error ratio"
"""The measure's name: the candidate's error against the reference over eager's."""
NORM = "norm"
"""The measure's name: the logarithm of the candidate's length over eager's."""
NORM_LIMIT = 0.3
"""Limit of a single tensor. Two honest compiles of 24 layers with BatchNorm came to 0.22 in single steps on a CPU, and
to 0.06 in the median tensor; eager's gradients under bfloat16 were as far off as they are long."""
_TOGETHER = 1 << 24
"""Elements that are measured together: measured one by one, 700 tensors on a GPU took two seconds of launches."""
FEW = {"slope": 8, "relative": 64}
"""With fewer effective elements a limit is `SPREADS` times eager's own error. A tilt is one draw, near 0 by chance, and
so is the error of a tensor that is all rounding (the bias of scores that are only ever compared)."""


def compare_with_reference(
    reference: Tensors,
    eager: Tensors,
    candidate: Tensors,
    limits: Limits,
    *,
    spread: Mapping[str, Difference] | None = None,
) -> Comparison:
    """Compare a candidate's tensors with eager's, as `compare` does, and both with a reference in more bits.

    Args:
        reference: the same step's tensors, computed in a wider dtype. A tensor that is missing here is judged by eager
            alone.
        eager: eager's tensors by name.
        candidate: the candidate's tensors by name.
        limits: ``Limits.compiled`` of what the step computes in.
        spread: as `compare` takes it.
    """
    alone = compare(eager, candidate, limits, spread=spread)
    theirs, ours = _errors(reference, candidate), _errors(reference, eager)
    pairs = {name: (theirs[name], ours[name]) for name in theirs if name in ours and name in alone.differences}
    dtype = str(limits.compute_dtype)
    eps = torch.finfo(getattr(torch, dtype)).eps if dtype in ("float64", "float32") else None
    if not pairs:
        return alone
    # An error above 2% of the median tensor is no rounding: the step's code depends on the dtype that it meets, so that
    # the step in float64 is another step.
    another_step = 0.02
    if eps is not None and statistics.median(ours.relative or 0.0 for _, ours in pairs.values()) > another_step:
        return alone
    shared_tilt = _shared_tilt(alone, pairs, limits)
    scores = [_with_eagers_error(score, pairs, alone, shared_tilt) for score in alone.scores]
    if eps is not None and not limits.updates:
        scores += _error_ratios(pairs, eps)
    scores += _lengths(pairs)
    return conclude(alone.unscored_failures(), scores, alone.differences, alone.below_floor)


def _errors(reference: Tensors, tensors: Tensors) -> dict[str, Difference]:
    """Measure tensors against the reference in its dtype, some at a time, so that no second copy of all is held."""
    found: dict[str, Difference] = {}
    wides: dict[str, torch.Tensor] = {}
    held = 0
    for name, wide in reference.items():
        tensor = tensors.get(name)
        if wide is None or tensor is None or tensor.shape != wide.shape or not tensor.is_floating_point():
            continue
        wides[name] = wide
        held += wide.numel()
        if held >= _TOGETHER:
            found |= _errors_of(wides, tensors)
            wides, held = {}, 0
    return found | _errors_of(wides, tensors)


def _errors_of(wides: dict[str, torch.Tensor], tensors: Tensors) -> dict[str, Difference]:
    cast = {name: tensors[name].to(wide.dtype) for name, wide in wides.items()}  # type: ignore[union-attr]
    measured, _ = differences(wides, cast)
    return {name: one for name, one in measured.items() if one.finite and one.relative is not None}


def _shared_tilt(alone: Comparison, pairs: _Pairs, limits: Limits) -> float | None:
    """Return eager's own tilt of all tensors together, each weighted as in the candidate's."""
    if limits.updates:
        tilts = [ours.tilt for _, ours in pairs.values() if ours.tilt is not None]
        return statistics.median(tilts) if tilts else None
    pool = []
    for score in alone.scores:
        if score.measure == "slope" and score.name in pairs:
            ours = pairs[score.name][1]
            if ours.numel > 1 and ours.tilt is not None:
                pool.append((ours.tilt, score.limit))
    return pooled(pool) if pool else None


def _with_eagers_error(score: Score, pairs: _Pairs, alone: Comparison, shared_tilt: float | None) -> Score:
    """Return a score whose limit is at least a few times eager's own error against the reference.

    Two roundings of one size are 1.4 times as far from each other; tilts have signs, so that one of two may be near 0
    by chance.
    """
    factors = {"slope": 3.0, "residual": 2.0, "relative": 2.0}
    if score.measure not in factors:
        return score
    if score.name == ALL and score.measure == "slope":
        own = [shared_tilt]
    elif score.name == ALL:
        own = [ours.measure(score.measure) for _, ours in pairs.values()]
    else:
        own = [pairs[score.name][1].measure(score.measure)] if score.name in pairs else []
    known = [value for value in own if value is not None]
    if not known:
        return score
    few = score.name in alone.differences and alone.differences[score.name].effective < FEW.get(score.measure, 0)
    factor = SPREADS if few else factors[score.measure]
    return score.widened(factor * abs(statistics.median(known)) / alone.unit_of(score))


def _lengths(pairs: _Pairs) -> list[Score]:
    """Score how much longer or shorter the candidate's tensors are than eager's, where eager is far off itself.

    Where eager's relative error is above 0.1, the direction of a tensor says little, but its length is still right.
    Above 3 the tensor is all rounding, and so is its length: the gradient of the bias of an attention's keys is truly
    0, and compiled code, which rounds less often, makes a tenth of what eager makes of it. What ninety BatchNorms leave
    of a gradient is 0.86 off.
    """
    far_off, all_rounding = 0.1, 3.0
    enough_elements = 64  # of fewer effective elements the length is too much a matter of chance
    scores, ratios = [], []
    for name, (theirs, ours) in pairs.items():
        if not far_off < (ours.relative or 0.0) <= all_rounding or theirs.effective < enough_elements:
            continue
        lengths = theirs.length, ours.length
        ratio = math.log(lengths[0] / lengths[1]) if min(lengths) > 0 else math.inf
        ratios.append(ratio)
        scores.append(Score(name, NORM, ratio, NORM_LIMIT))
    if ratios:
        scores.append(Score(ALL, NORM, statistics.median(ratios), NORM_LIMIT / 2))
    return scores


def _error_ratios(pairs: _Pairs, eps: float) -> list[Score]:
    """Score each tensor's error ratio, by the formula of this module."""
    sized = [ours for _, ours in pairs.values() if ours.rms > 0]
    scale = statistics.median([ours.rms for ours in sized] or [0.0])
    typical = statistics.median([ours.rms_difference / ours.rms for ours in sized] or [0.0])
    scores = []
    for name, (theirs, ours) in pairs.items():
        least = max(ours.rms_difference, typical * ours.rms, eps * ours.rms, eps / 4 * scale)
        if least > 0:
            scores.append(Score(name, RATIO, theirs.rms_difference / least, 10.0))
    return scores
