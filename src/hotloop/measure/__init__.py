"""Measuring: the time of steps, the difference between two sets of tensors, the shapes that a run sees."""

from hotloop.measure.census import Census, Signature, TensorMeta, Unhashed, signature
from hotloop.measure.differences import Difference, Mismatch, differences
from hotloop.measure.limits import Limits
from hotloop.measure.numerics import ALL, Comparison, Failure, Score, compare, judge
from hotloop.measure.steps import over_noisy_steps, over_steps
from hotloop.measure.timing import Mark, StepClock, Timing, interval, ratio_interval, typical
from hotloop.measure.tree import flatten, names, unflatten, untracked_attributes
from hotloop.measure.wide_reference import RATIO, compare_with_reference

__all__ = [
    "ALL",
    "RATIO",
    "Census",
    "Comparison",
    "Difference",
    "Failure",
    "Limits",
    "Mark",
    "Mismatch",
    "Score",
    "Signature",
    "StepClock",
    "TensorMeta",
    "Timing",
    "Unhashed",
    "compare",
    "compare_with_reference",
    "differences",
    "flatten",
    "interval",
    "judge",
    "names",
    "over_noisy_steps",
    "over_steps",
    "ratio_interval",
    "signature",
    "typical",
    "unflatten",
    "untracked_attributes",
]
