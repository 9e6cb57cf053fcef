"""Measuring: the time of steps, the difference between two sets of tensors, the shapes that a run sees."""

from hotloop.measure.differences import CHUNK, Difference, Mismatch, differences
from hotloop.measure.timing import Event, Mark, StepClock, Timing, interval, ratio_interval, spread, typical
from hotloop.measure.tree import Structure, flatten, unflatten

__all__ = [
    "CHUNK",
    "Difference",
    "Event",
    "Mark",
    "Mismatch",
    "StepClock",
    "Structure",
    "Timing",
    "differences",
    "flatten",
    "interval",
    "ratio_interval",
    "spread",
    "typical",
    "unflatten",
]
