"""Measuring: the time of steps, the difference between two sets of tensors, the shapes that a run sees."""

from hotloop.measure.buckets import Buckets, bucket_edges
from hotloop.measure.census import Census, Seen, Signature, TensorMeta, Unhashed, VaryingDim, signature
from hotloop.measure.differences import Difference, Mismatch, differences
from hotloop.measure.limits import Limits
from hotloop.measure.numerics import ALL, Comparison, Failure, Score, compare, judge
from hotloop.measure.roundings import BLIND, DRAWS, compare_with_roundings
from hotloop.measure.steps import over_noisy_steps, over_steps
from hotloop.measure.timing import Event, Mark, StepClock, Timing, interval, ratio_interval, spread, typical
from hotloop.measure.tree import Structure, flatten, names, unflatten, untracked_attributes
from hotloop.measure.wide_reference import RATIO, compare_with_reference

__all__ = [
    "ALL",
    "BLIND",
    "DRAWS",
    "RATIO",
    "Buckets",
    "Census",
    "Comparison",
    "Difference",
    "Event",
    "Failure",
    "Limits",
    "Mark",
    "Mismatch",
    "Score",
    "Seen",
    "Signature",
    "StepClock",
    "Structure",
    "TensorMeta",
    "Timing",
    "Unhashed",
    "VaryingDim",
    "bucket_edges",
    "compare",
    "compare_with_reference",
    "compare_with_roundings",
    "differences",
    "flatten",
    "interval",
    "judge",
    "names",
    "over_noisy_steps",
    "over_steps",
    "ratio_interval",
    "signature",
    "spread",
    "typical",
    "unflatten",
    "untracked_attributes",
]
