"""Measuring: the time of steps, the difference between two sets of tensors, the shapes that a run sees."""
