"""Puts a preset on a component or its regions, in place; takes it off."""

from hotloop.compiling.apply.regions import Cut, block_classes
from hotloop.compiling.apply.roots import forget_roots, holds_code_for
from hotloop.compiling.apply.step_methods import metric_updated_by, step_methods
from hotloop.compiling.apply.targets import compiled_by_torch, components_of, entry_points, hooked, sharded_flat

__all__ = [
    "Cut",
    "block_classes",
    "compiled_by_torch",
    "components_of",
    "entry_points",
    "forget_roots",
    "holds_code_for",
    "hooked",
    "metric_updated_by",
    "sharded_flat",
    "step_methods",
]
