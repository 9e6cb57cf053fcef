"""Compares the tensors of a step that a tier ran with those of the same step run eager, and says which are wrong."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Any

from hotloop.measure.differences import Difference, Mismatch, differences
from hotloop.measure.limits import SPREADS, Limits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hotloop.measure.differences import Tensors
    from hotloop.measure.limits import Figures

ALL = "all tensors together"
SAME_GRADIENT = "same gradient"
"""The measure's name: relative difference from what eager's optimizer makes of the candidate's own gradient."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """One measure of one tensor (or of ``ALL``) that is past its limit.

    ``measure`` is slope, residual, relative, same gradient, error ratio, finite, equal, missing, shape, dtype or
    layout. Of the first five ``value`` and ``limit`` are numbers. Of the last four they are text: what the candidate
    has, and what the reference has.
    """

    name: str
    measure: str
    value: float | str | None = None
    limit: float | str | None = None

    def __str__(self) -> str:
        value, limit = (
            f"{number:.1e}" if isinstance(number, float) else str(number) for number in (self.value, self.limit)
        )
        said = {
            "slope": f"slope off by {value}, limit {limit}",
            "residual": f"residual {value}, limit {limit}",
            "relative": f"relative difference {value}, limit {limit}",
            SAME_GRADIENT: f"not what its optimizer makes of the same gradient, by {value} of itself, limit {limit}",
            "error ratio": f"error {value} times eager's own, limit {limit}",
            "norm": f"longer or shorter than eager by a factor of e^{value}, limit e^{limit}",
            "finite": "NaN or infinite in other places than the reference",
            "equal": f"not equal, by up to {value}",
            "missing": f"is {value}, the reference {limit}",
        }
        return f"{self.name}: {said.get(self.measure, f'{self.measure} {value}, the reference has {limit}')}"

    def to_dict(self) -> dict[str, Any]:
        """Return the failure as plain JSON data; a number that is not finite is None."""
        return _json(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class Score:
    """One measure of one tensor (or of ``ALL``) and its limit; a slope has the sign of its tilt."""

    name: str
    measure: str
    value: float
    limit: float

    @property
    def nearness(self) -> float:
        """The measure over its limit: above 1 the measure is past its limit. A NaN is past every limit."""
        if math.isnan(self.value):
            return math.inf
        if self.value == 0:
            return 0.0
        return abs(self.value) / self.limit if self.limit > 0 else math.inf

    def widened(self, limit: float) -> Score:
        """Return the score with a limit that is at least ``limit``."""
        return dataclasses.replace(self, limit=max(self.limit, limit))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The result of ``compare``; ``str`` is one line for people.

    Attributes:
        failures: what is past its limit, the furthest first.
        differences: every tensor that could be measured, by name.
        worst: the tensor nearest to its limit or furthest past it; None where all are equal, or no tensor is judged
            alone.
        nearness: that tensor's measure over its limit; above 1 it failed.
        scores: what was judged, by the formulae of ``limits``.
        below_floor: tensors so small that all of them may be rounding (the bias of an attention's key), each with the
            size from which it would not be. They may differ by any part of themselves, by little of a typical tensor.
    """

    failures: tuple[Failure, ...]
    differences: dict[str, Difference]
    worst: Difference | None
    nearness: float
    scores: tuple[Score, ...]
    below_floor: Mapping[str, float]

    @property
    def agrees(self) -> bool:
        """Whether nothing is past its limit."""
        return not self.failures

    @property
    def may_be_rounding(self) -> bool:
        """Whether every failure is a number past its limit; no rounding makes a NaN, or another shape."""
        certain = ("finite", "missing", "shape", "dtype", "layout", "equal")
        return all(failure.measure not in certain for failure in self.failures)

    def __str__(self) -> str:
        if self.failures:
            shown = 3
            more = len(self.failures) - shown
            return "; ".join(map(str, self.failures[:shown])) + (f"; and {more} more" if more > 0 else "")
        if all(difference.equal for difference in self.differences.values()):
            return f"{len(self.differences)} tensors, all equal"
        if self.worst is None:
            return f"{len(self.differences)} tensors agree, judged all together"
        nearest = f"{self.worst.name} is nearest its limit, at {self.nearness:.0%} of it"
        return f"{len(self.differences)} tensors agree; {nearest}"

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain JSON data; of the tensors only the worst, since there may be thousands."""
        return {
            "agrees": self.agrees,
            "tensors": len(self.differences),
            "worst": _json(self.worst.to_dict()) if self.worst else None,
            "nearness": self.nearness if math.isfinite(self.nearness) else None,
            "failures": [failure.to_dict() for failure in self.failures],
            "below_floor": list(self.below_floor),
        }

    def unscored_failures(self) -> list[Failure]:
        """Return the failures that have no score: what differs in any other way than by a number past its limit."""
        return unscored_failures([self], {(score.name, score.measure) for score in self.scores})

    def unit_of(self, score: Score) -> float:
        """Return the unit of a score's value: 1, but for ``relative`` the size of the set's typical tensor."""
        if score.measure != "relative":
            return 1.0
        difference = self.differences[score.name].rms_difference if score.name in self.differences else 0.0
        return difference / score.value if score.value > 0 and difference > 0 else 1.0

    def with_same_gradients(self, found: Mapping[str, Difference], limits: Limits) -> Comparison:
        """Return the comparison with further tensors, which eager's optimizer made of the candidate's own gradients.

        Args:
            found: by tensor, how far the candidate is from that. An optimizer repeats itself, so no spread is allowed.
            limits: `Limits.rounding()`.
        """
        judged, _ = _score(list(found.values()), limits, {})
        return conclude(
            [*self.unscored_failures(), *_certain_failures(found)],
            [*self.scores, *(dataclasses.replace(score, measure=SAME_GRADIENT) for score in judged)],
            {**self.differences, **found},
            self.below_floor,
        )

    def with_spread(self, spread: Mapping[str, Difference]) -> Comparison:
        """Judge a comparison under ``Limits.rounding()`` again, by what is now known of eager's own spread.

        Limits only widen: what a repeat of eager has shown once stays possible.
        """
        allowed = _Spread(spread)
        scale = _scale([found for found in self.differences.values() if found.numeric and found.numel])
        scores = [
            score
            if score.measure == SAME_GRADIENT
            else score.widened(allowed.for_rounding(self.differences[score.name], scale))
            for score in self.scores
        ]
        return conclude(self.unscored_failures(), scores, self.differences, self.below_floor)


def compare(
    reference: Tensors,
    candidate: Tensors,
    limits: Limits,
    *,
    spread: Mapping[str, Difference] | None = None,
) -> Comparison:
    """Compare a tier's tensors with eager's, and judge whether rounding explains how they differ.

    Compare one kind at a time (the loss, all gradients, all updates of parameters, a kind of optimizer state, all
    buffers), since limits follow the set's own medians: a loss among gradients would be held to the gradients' noise.
    One step may be past a limit by chance where there are few bits, so prove a tier by ``over_steps``. Squares (Adam's
    ``exp_avg_sq``) have twice their root's slope and residual: compare updates instead.

    Args:
        reference: eager's tensors by name. None stands for a tensor that does not exist (no gradient), and must be None
            on both sides.
        candidate: the tier's tensors, of the same names, shapes and dtypes.
        limits: ``Limits.rounding()`` or ``Limits.compiled(...)``.
        spread: differences of an eager repeat against eager, where kernels are nondeterministic. A limit is at least 8
            times the tensor's spread (see ``limits``), and 8 times what is typical of the set.
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
    """Judge differences that were measured before, as `compare` does; all of one kind of tensor."""
    scored, below_floor = _score(list(found.values()), limits, spread or {})
    missing = [Failure(pair.name, pair.measure, pair.value, pair.expected) for pair in mismatches]
    return conclude([*missing, *_certain_failures(found)], scored, found, below_floor)


def conclude(
    unscored: Iterable[Failure], scores: Sequence[Score], found: dict[str, Difference], below_floor: Mapping[str, float]
) -> Comparison:
    """Make the comparison of failures that need no limit, and of measures that have a limit."""
    ranked = sorted(scores, key=lambda score: -score.nearness)
    past = [Failure(s.name, s.measure, abs(s.value), s.limit) for s in ranked if s.nearness > 1]
    known = [score for score in ranked if score.name in found and score.nearness > 0]
    return Comparison(
        failures=(*unscored, *past),
        differences=found,
        worst=found[known[0].name] if known else None,
        nearness=known[0].nearness if known else 0.0,
        scores=tuple(scores),
        below_floor=below_floor,
    )


def unscored_failures(comparisons: Iterable[Comparison], scored: set[tuple[str, str]]) -> list[Failure]:
    """List the distinct failures of comparisons whose tensor and measure are not among the scored ones."""
    failures = (failure for comparison in comparisons for failure in comparison.failures)
    return list(dict.fromkeys(failure for failure in failures if (failure.name, failure.measure) not in scored))


def _certain_failures(found: Mapping[str, Difference]) -> list[Failure]:
    """Find failures that need no limit: NaN and infinities in other places, and values that must be equal."""
    failures = [Failure(name, "finite") for name, difference in found.items() if not difference.finite]
    failures += [
        Failure(n, "equal", d.max_abs, 0.0) for n, d in found.items() if not d.numeric and not d.equal and d.finite
    ]
    return failures


class _Spread:
    """Eager's spread against itself: a tensor is allowed at least what is typical of its set.

    Where most tensors of a set are noisy, their median is allowed: a tensor that two runs left equal was so by chance.
    Where few are noisy, the others may be equal for good, or flip seldom. Then the median of the noisy tensors is
    allowed, since the others may be rounding and nothing else. That is capped at 1e-4 of the tensor: a gradient held in
    float32 of which a few elements are rounded to bfloat16 the other way.
    """

    def __init__(self, spread: Mapping[str, Difference]) -> None:
        self._of = spread
        self._medians: dict[str, tuple[float, float]] = {}

    def allowed(self, name: str, measure: str, unit: float = 1.0) -> float:
        """Return 8 times the spread of a measure: slope, residual, relative, or rms_difference in a unit."""
        if measure not in self._medians:
            values = [self._finite(key, measure) for key, difference in self._of.items() if difference.numeric]
            self._medians[measure] = _median(values), _median([value for value in values if value])
        of_all, of_noisy = self._medians[measure]
        return SPREADS * max(self._finite(name, measure), of_all, min(of_noisy, 1e-4 * unit))

    def for_rounding(self, difference: Difference, scale: float) -> float:
        """Return how far a tensor may be off for eager's own spread, relative to itself or to a typical tensor.

        Where kernels add in another order, the difference is as large as the terms that they add. A sum that all but
        cancels at one step (the bias before a normalisation) differs by no less, which may be any part of the sum.
        """
        if difference.rms < scale:
            return self.allowed(difference.name, "rms_difference", scale) / scale
        absolute = 0.0
        if difference.rms > 0:
            absolute = SPREADS * self._finite(difference.name, "rms_difference") / difference.rms
        return max(absolute, self.allowed(difference.name, "relative"))

    def _finite(self, name: str, measure: str) -> float:
        """Return a tensor's own spread; 0 where it is unknown or not finite, since such a spread allows nothing."""
        value = getattr(self._of[name], measure) if name in self._of else None
        return value if value is not None and math.isfinite(value) else 0.0


def _score(
    found: Sequence[Difference], limits: Limits, spread: Mapping[str, Difference]
) -> tuple[list[Score], dict[str, float]]:
    """Score tensors by the limits; also return the tensors that are below the floor, each with its own."""
    numeric = [difference for difference in found if difference.numeric and difference.numel]
    figures = limits.figures({difference.dtype for difference in numeric})
    scale, allowed = _scale(numeric), _Spread(spread)
    if figures is not None:
        return _score_compiled(numeric, figures, scale, limits, allowed)
    scores = []
    for difference in numeric:
        if difference.equal:
            continue
        # A parameter that started at zero is one update and nothing else, so the errors of an update are large beside
        # it. Hence the difference of a small tensor is held against the typical tensor. That is no help where most
        # started at zero.
        small = difference.rms < scale
        value = difference.rms_difference / scale if small else difference.relative or 0.0
        limit = max(limits.ulps(difference.dtype), allowed.for_rounding(difference, scale))
        scores.append(Score(difference.name, "relative", value, limit))
    return scores, {}


def _score_compiled(
    numeric: list[Difference], figures: Figures, scale: float, limits: Limits, spread: _Spread
) -> tuple[list[Score], dict[str, float]]:
    scored, pool = [], []
    beside = _beside(numeric, scale)
    # Updates have no such floor: Adam makes a full step of whatever is rounding.
    judged = () if limits.updates else numeric
    floors = {each.name: figures.rounding_below(beside[each.name]) for each in judged if not each.opposite}
    small = {each.name: floors[each.name] for each in judged if each.rms < floors.get(each.name, 0.0)}
    sized = [each for each in numeric if each.name not in small]
    median = _median([each.residual for each in sized if each.residual is not None and each.numel > 1])
    for each in judged:
        if each.name in small or each.tilt is None or each.residual is None:  # None: the reference is all zero
            scored.append(_score_small(each, figures, beside[each.name], spread))
            continue
        slope = max(figures.slope_limit(each, median), spread.allowed(each.name, "slope")) + limits.tilt
        if each.numel > 1:
            pool.append((each.tilt, slope))
        residual = max(figures.residual_limit(median), spread.allowed(each.name, "residual"))
        scored.append(Score(each.name, "slope", each.tilt, slope))
        scored.append(Score(each.name, "residual", each.residual, residual))
    # Any single update can be random, so of updates the median tensor counts.
    shared = _median([each.tilt for each in numeric if each.tilt is not None]) if limits.updates else pooled(pool)
    scored.append(Score(ALL, "residual", median, max(figures.median, spread.allowed("", "residual"))))
    allowed = max(figures.pooled_limit(median), spread.allowed("", "slope")) + limits.tilt + limits.scalars
    scored.append(Score(ALL, "slope", shared, allowed))
    return scored, small


def _beside(numeric: Sequence[Difference], scale: float) -> dict[str, float]:
    """Return by tensor the size that it may be rounding beside: the typical tensor's, or its module's largest tensor's.

    The typical one is rounding itself where most are biases before a normalisation. But a weight's gradient also grows
    with its layer's input, so beside it only what no factor makes of eager's is rounding.
    """
    largest: dict[str, float] = {}
    for each in numeric:
        largest[each.module] = max(scale, each.rms, largest.get(each.module, 0.0))
    return {each.name: largest[each.module] if each.unrelated else scale for each in numeric}


def _score_small(difference: Difference, figures: Figures, scale: float, spread: _Spread) -> Score:
    """Score a tensor that may be all rounding: hold its difference against the typical tensor."""
    name = difference.name
    if scale == 0:
        return Score(name, "relative", math.inf if difference.rms_difference > 0 else 0.0, figures.floor)
    limit = max(figures.floor, spread.allowed(name, "rms_difference", scale) / scale)
    return Score(name, "relative", difference.rms_difference / scale, limit)


def pooled(pool: list[tuple[float, float]]) -> float:
    """Return the mean tilt, each weighted by 1 / limit^2, as a least-squares mean of unlike precisions is.

    An error that all tensors share (a loss scaled wrongly) adds up here, while rounding averages out.
    """
    if not pool:
        return 0.0
    weights = [1 / (limit * limit) for _, limit in pool]
    return math.fsum(tilt * w for (tilt, _), w in zip(pool, weights, strict=True)) / math.fsum(weights)


def _scale(numeric: Sequence[Difference]) -> float:
    """Return the root mean square of a set's typical tensor."""
    return _median([difference.rms for difference in numeric if difference.rms > 0])


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _json(data: dict[str, Any]) -> dict[str, Any]:
    """Return the data with None for each number that JSON cannot hold."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in data.items()
    }
