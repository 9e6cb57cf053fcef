"""Measuring: the time of steps, the difference between two sets of tensors, the shapes that a run sees."""

from hotloop.measure.against import RATIO, RATIO_LIMIT, against
from hotloop.measure.buckets import Buckets, bucket_edges
from hotloop.measure.census import Census, Inputs, Look, Seen, Unhashed, VaryingDim, signature
from hotloop.measure.differences import Difference, Mismatch, differences
from hotloop.measure.limits import Limits
from hotloop.measure.numerics import (
    ALL,
    Comparison,
    Failure,
    Score,
    compare,
    judge,
    with_same_gradients,
    with_spread,
)
from hotloop.measure.roundings import BLIND, DRAWS, beside_roundings
from hotloop.measure.steps import over_steps, that_stays
from hotloop.measure.timing import Event, Mark, StepClock, Timing, interval, ratio_interval, spread, typical
from hotloop.measure.tree import Structure, carried, flatten, names, unflatten

__all__ = [
    "ALL",
    "BLIND",
    "DRAWS",
    "RATIO",
    "RATIO_LIMIT",
    "Buckets",
    "Census",
    "Comparison",
    "Difference",
    "Event",
    "Failure",
    "Inputs",
    "Limits",
    "Look",
    "Mark",
    "Mismatch",
    "Score",
    "Seen",
    "StepClock",
    "Structure",
    "Timing",
    "Unhashed",
    "VaryingDim",
    "against",
    "beside_roundings",
    "bucket_edges",
    "carried",
    "compare",
    "differences",
    "flatten",
    "interval",
    "judge",
    "names",
    "over_steps",
    "ratio_interval",
    "signature",
    "spread",
    "that_stays",
    "typical",
    "unflatten",
    "with_same_gradients",
    "with_spread",
]
