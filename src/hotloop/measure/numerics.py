"""Holds the tensors of a step that a tier ran against those of the same step run eager, and says which are wrong."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Any

from hotloop.measure.differences import Difference, Mismatch, differences
from hotloop.measure.limits import (
    LEANS,
    SPREADS,
    Limits,
    may_be_rounding,
    pooled_limit,
    residual_limit,
    slope_limit,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.measure.differences import Tensors
    from hotloop.measure.limits import Figures

ALL = "all tensors together"
SAME_GRADIENT = "same gradient"
"""The measure's name: relative difference from what eager's optimizer makes of the candidate's own gradient."""
_SHOWN = 3
_SELDOM = 1e-4
"""By how much of itself, at most, a tensor is taken to be noisy because a few others of its set are: a gradient held in
float32 of which a few elements are rounded to bfloat16 the other way."""
_PLAIN = ("finite", "missing", "shape", "dtype", "layout", "equal")
"""Failures that no rounding makes."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """One measure of one tensor (or of ``ALL``) that is past its limit.

    ``measure`` is slope, residual, relative, same gradient, error ratio, finite, equal, missing, shape, dtype or
    layout. Of the first five ``value`` and ``limit`` are numbers; of the last four what candidate and reference have,
    as text.
    """

    name: str
    measure: str
    value: float | str | None = None
    limit: float | str | None = None

    def __str__(self) -> str:
        value, limit = (f"{each:.1e}" if isinstance(each, float) else str(each) for each in (self.value, self.limit))
        said = {
            "slope": f"slope off by {value}, limit {limit}",
            "residual": f"residual {value}, limit {limit}",
            "relative": f"relative difference {value}, limit {limit}",
            SAME_GRADIENT: f"not what its optimizer makes of the same gradient, by {value} of itself, limit {limit}",
            "error ratio": f"error {value} times eager's own, limit {limit}",
            "norm": f"longer or shorter than eager by a factor of e^{value}, limit e^{limit}",
            "blind": f"rounding is as large as {value} of the tensors, limit {limit}: nothing is proven",
            "finite": "NaN or infinite in other places than the reference",
            "equal": f"not equal, by up to {value}",
            "missing": f"is {value}, the reference {limit}",
        }
        return f"{self.name}: {said.get(self.measure, f'{self.measure} {value}, the reference has {limit}')}"

    def to_dict(self) -> dict[str, Any]:
        """Give the failure as plain JSON data; a number that is not finite is None."""
        return {key: _json(value) for key, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True)
class Score:
    """One measure of one tensor (or of ``ALL``) and its limit; a slope has the sign of its tilt."""

    name: str
    measure: str
    value: float
    limit: float

    @property
    def nearness(self) -> float:
        """The measure over its limit: above 1 it is past it. A NaN is past every limit."""
        if math.isnan(self.value):
            return math.inf
        if self.value == 0:
            return 0.0
        return abs(self.value) / self.limit if self.limit > 0 else math.inf


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What ``compare`` found; ``str`` is one line for people.

    Attributes:
        failures: what is past its limit, the furthest first.
        differences: every tensor that could be measured, by name.
        worst: the tensor nearest to its limit or furthest past it; None where all are equal, or none is
            judged alone.
        nearness: that tensor's measure over its limit; above 1 it failed.
        scores: what was judged, by the formulae of ``limits``.
        below_floor: names of tensors so small beside the others that rounding may be all there is in them (the bias of
            an attention's key, of a convolution before BatchNorm): they may differ by any part of themselves, by
            little of a typical tensor.
    """

    failures: tuple[Failure, ...]
    differences: dict[str, Difference]
    worst: Difference | None
    nearness: float
    scores: tuple[Score, ...]
    below_floor: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether nothing is past its limit."""
        return not self.failures

    @property
    def may_be_rounding(self) -> bool:
        """Whether all that is past its limit are numbers; no rounding makes a NaN, or another shape."""
        return all(each.measure not in _PLAIN for each in self.failures)

    def __str__(self) -> str:
        if self.failures:
            more = len(self.failures) - _SHOWN
            return "; ".join(map(str, self.failures[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")
        if all(each.equal for each in self.differences.values()):
            return f"{len(self.differences)} tensors, all equal"
        if self.worst is None:
            return f"{len(self.differences)} tensors agree, judged all together"
        nearest = f"{self.worst.name} is nearest its limit, at {self.nearness:.0%} of it"
        return f"{len(self.differences)} tensors agree; {nearest}"

    def to_dict(self) -> dict[str, Any]:
        """Give the comparison as plain JSON data; of the tensors the worst only, since there may be thousands."""
        worst = self.worst.to_dict() if self.worst else None
        return {
            "agrees": self.agrees,
            "tensors": len(self.differences),
            "worst": worst and {key: _json(value) for key, value in worst.items()},
            "nearness": _json(self.nearness),
            "failures": [failure.to_dict() for failure in self.failures],
            "below_floor": list(self.below_floor),
        }


def compare(
    reference: Tensors,
    candidate: Tensors,
    limits: Limits,
    *,
    spread: Mapping[str, Difference] | None = None,
) -> Comparison:
    """Say whether a tier's tensors are eager's, as far as rounding allows.

    Compare one kind at a time (the loss, all gradients, all updates of parameters, a kind of optimizer state, all
    buffers), since limits follow the set's own medians: a loss among gradients would be held to the gradients' noise.
    One step may be past a limit by chance where there are few bits, so prove a tier by ``over_steps``. Squares (Adam's
    ``exp_avg_sq``) have twice their root's slope and residual: compare updates instead.

    Args:
        reference: eager's tensors by name; None is a tensor that there is not (no gradient), and must be None in both.
        candidate: the tier's, of the same names, shapes and dtypes.
        limits: ``Limits.rounding()`` or ``Limits.compiled(...)``.
        spread: differences of an eager repeat against eager, where kernels are nondeterministic: a limit is at least 8
            times what they spread (see ``limits``), and 8 times what is typical of the set.
    """
    found, mismatches = differences(reference, candidate, sized=limits.compute_dtype is not None)
    return judge(found, mismatches, limits, spread=spread)


def judge(
    found: dict[str, Difference],
    mismatches: Sequence[Mismatch],
    limits: Limits,
    *,
    spread: Mapping[str, Difference] | None = None,
) -> Comparison:
    """Say what `compare` says, of differences that were measured: of one kind of tensor, as there."""
    scored, below_floor = _score(list(found.values()), limits, spread or {})
    return conclude([*map(_failure, mismatches), *_plain_failures(found)], scored, found, below_floor)


def conclude(
    plain: Sequence[Failure], scores: Sequence[Score], found: dict[str, Difference], below_floor: Sequence[str]
) -> Comparison:
    """Make the comparison of failures that need no limit and measures that have one."""
    ranked = sorted(scores, key=lambda score: -score.nearness)
    past = [Failure(s.name, s.measure, abs(s.value), s.limit) for s in ranked if s.nearness > 1]
    known = [score for score in ranked if score.name in found and score.nearness > 0]
    return Comparison(
        failures=(*plain, *past),
        differences=found,
        worst=found[known[0].name] if known else None,
        nearness=known[0].nearness if known else 0.0,
        scores=tuple(scores),
        below_floor=tuple(below_floor),
    )


def with_same_gradients(comparison: Comparison, found: Mapping[str, Difference], limits: Limits) -> Comparison:
    """Add tensors that are judged by what eager's optimizer makes of the candidate's own gradients.

    Args:
        comparison: of the other tensors of their kind.
        found: by tensor, how far the candidate is from that. An optimizer repeats itself, so no spread is allowed.
        limits: `Limits.rounding()`.
    """
    judged, _ = _score(list(found.values()), limits, {})
    return conclude(
        [*_without_limit(comparison), *_plain_failures(found)],
        [*comparison.scores, *(dataclasses.replace(one, measure=SAME_GRADIENT) for one in judged)],
        {**comparison.differences, **found},
        comparison.below_floor,
    )


def _without_limit(comparison: Comparison) -> list[Failure]:
    """Give the failures that are no measure past its limit."""
    judged = {(one.name, one.measure) for one in comparison.scores}
    return [one for one in comparison.failures if (one.name, one.measure) not in judged]


def with_spread(comparison: Comparison, spread: Mapping[str, Difference]) -> Comparison:
    """Judge a comparison under ``Limits.rounding()`` again, by what is known of eager's own spread by now.

    Limits only widen: what a repeat of eager has shown once stays possible.
    """
    allowed = _Spread(spread)
    found = comparison.differences
    scale = _scale([each for each in found.values() if each.numeric and each.numel])
    scores = [
        dataclasses.replace(one, limit=max(one.limit, _room(found[one.name], scale, allowed)))
        if one.measure != SAME_GRADIENT
        else one
        for one in comparison.scores
    ]
    return conclude(_without_limit(comparison), scores, comparison.differences, comparison.below_floor)


def _failure(mismatch: Mismatch) -> Failure:
    return Failure(mismatch.name, mismatch.measure, mismatch.value, mismatch.expected)


def _plain_failures(found: Mapping[str, Difference]) -> list[Failure]:
    """Find what needs no limit: places of NaN and infinities, and dtypes that are equal or not."""
    failures = [Failure(name, "finite") for name, each in found.items() if not each.finite]
    failures += [
        Failure(n, "equal", d.max_abs, 0.0) for n, d in found.items() if not d.numeric and not d.equal and d.finite
    ]
    return failures


def _score(
    found: Sequence[Difference], limits: Limits, spread: Mapping[str, Difference]
) -> tuple[list[Score], list[str]]:
    numeric = [each for each in found if each.numeric and each.numel]
    figures = limits.figures({each.dtype for each in numeric})
    scale = _scale(numeric)
    if figures is None:
        allowed = _Spread(spread)
        return [_score_rounding(each, limits, scale, allowed) for each in numeric if not each.equal], []
    return _score_compiled(numeric, figures, scale, limits, _Spread(spread))


class _Spread:
    """What eager spreads against itself, a tensor's at least what is typical of its set.

    Where most tensors of a set are noisy, their median is: one that two runs left equal was so by chance. Where few
    are, the others may be equal for good, or flip seldom: then it is the median of the noisy ones, up to `_SELDOM`, for
    these may be rounding and nothing else.
    """

    def __init__(self, spread: Mapping[str, Difference]) -> None:
        self._of = spread
        self._medians: dict[str, tuple[float, float]] = {}

    def own(self, name: str, measure: str) -> float:
        """Give 8 times the tensor's own spread of a measure, as `allowed` does."""
        return SPREADS * (_finite(self._of[name], measure) if name in self._of else 0.0)

    def allowed(self, name: str, measure: str, unit: float = 1.0) -> float:
        """Give 8 times the spread of a measure: slope, residual, relative, or rms_difference in a unit."""
        if measure not in self._medians:
            values = [_finite(each, measure) for each in self._of.values() if each.numeric]
            self._medians[measure] = _median(values), _median([value for value in values if value])
        own = _finite(self._of[name], measure) if name in self._of else 0.0
        of_all, of_noisy = self._medians[measure]
        return SPREADS * max(own, of_all, min(of_noisy, _SELDOM * unit))


def _score_rounding(each: Difference, limits: Limits, scale: float, spread: _Spread) -> Score:
    """Hold the difference against the tensor, or the typical tensor where that is larger.

    A parameter that started at zero is one update and nothing else, so errors of an update are large beside it.
    """
    value = each.rms_difference / scale if each.rms < scale else each.relative or 0.0
    return Score(each.name, "relative", value, max(limits.ulps(each.dtype), _room(each, scale, spread)))


def _room(each: Difference, scale: float, spread: _Spread) -> float:
    """Give how far a tensor may be off for eager's own spread, in what `_score_rounding` measures it by.

    What kernels add in another order is as large as what they add: where a sum all but cancels at one step (the bias
    before a normalisation), its difference is no smaller, and may be any part of it.
    """
    if each.rms < scale:
        return spread.allowed(each.name, "rms_difference", scale) / scale
    absolute = spread.own(each.name, "rms_difference") / each.rms if each.rms > 0 else 0.0
    return max(absolute, spread.allowed(each.name, "relative"))


def _scale(numeric: Sequence[Difference]) -> float:
    """Give the size of a set's typical tensor."""
    return _median([each.rms for each in numeric if each.rms > 0])


def _score_compiled(
    numeric: list[Difference], figures: Figures, scale: float, limits: Limits, spread: _Spread
) -> tuple[list[Score], list[str]]:
    scored, below_floor, pool, leans = [], [], [], []
    median = _median([each.residual for each in numeric if each.residual is not None and each.numel > 1])
    for each in numeric if not limits.updates else ():
        small = may_be_rounding(figures, each.rms, scale)
        if small:
            below_floor.append(each.name)
        if small or each.tilt is None or each.residual is None:  # None: the reference is all zero
            scored.append(_score_small(each, figures, scale, spread))
            continue
        slope = slope_limit(figures, each.residual, median, each.numel, each.effective)
        lean = LEANS * limits.leans.get(each.name, 0.0)
        slope = max(slope, spread.allowed(each.name, "slope")) + abs(lean)
        if each.numel > 1:
            pool.append((each.tilt, slope))
            leans.append((lean, slope))
        residual = max(residual_limit(figures, median), spread.allowed(each.name, "residual"))
        scored.append(Score(each.name, "slope", each.tilt, slope))
        scored.append(Score(each.name, "residual", each.residual, residual))
    # Of updates the median tensor tells, since any one of them can be random.
    shared = _median([each.tilt for each in numeric if each.tilt is not None]) if limits.updates else pooled(pool)
    scored.append(Score(ALL, "residual", median, max(figures.median, spread.allowed("", "residual"))))
    lean = LEANS * _median([limits.leans.get(each.name, 0.0) for each in numeric]) if limits.updates else pooled(leans)
    allowed = max(pooled_limit(figures, median), spread.allowed("", "slope")) + abs(lean)
    scored.append(Score(ALL, "slope", shared, allowed))
    return scored, below_floor


def _score_small(each: Difference, figures: Figures, scale: float, spread: _Spread) -> Score:
    """Hold the difference of a tensor that may be all rounding against the typical tensor."""
    if scale == 0:
        return Score(each.name, "relative", math.inf if each.rms_difference > 0 else 0.0, figures.floor)
    limit = max(figures.floor, spread.allowed(each.name, "rms_difference", scale) / scale)
    return Score(each.name, "relative", each.rms_difference / scale, limit)


def pooled(pool: list[tuple[float, float]]) -> float:
    """Give the mean tilt, each weighted by 1 / limit^2, as a least-squares mean of unlike precisions is.

    An error that all tensors share (a loss scaled wrongly) adds up here, while rounding averages out.
    """
    if not pool:
        return 0.0
    weights = [1 / (limit * limit) for _, limit in pool]
    return math.fsum(tilt * w for (tilt, _), w in zip(pool, weights, strict=True)) / math.fsum(weights)


def _finite(each: Difference, measure: str) -> float:
    """Give a measure, 0 where there is none or it is not finite: such a spread allows nothing."""
    value = getattr(each, measure)
    return value if value is not None and math.isfinite(value) else 0.0


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
