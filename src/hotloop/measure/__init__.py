"""Measuring: the time of steps, the difference between two sets of tensors, the shapes that a run sees."""

from hotloop.measure.tree import Structure, flatten, unflatten

__all__ = ["Structure", "flatten", "unflatten"]
