"""Puts a preset on a component or its regions, in place; takes it off."""

from hotloop.compiling.apply.regions import Cut, block_classes, declared_blocks, split
from hotloop.compiling.apply.roots import Root, Roots, forget_roots, holds_code_for, roots_for
from hotloop.compiling.apply.step_methods import metric_updated_by, step_methods
from hotloop.compiling.apply.targets import (
    Target,
    compiled_by_torch,
    components_of,
    entry_points,
    hooked,
    is_lightning,
    offloaded,
    sharded_flat,
    sharded_units,
)

__all__ = [
    "Cut",
    "Root",
    "Roots",
    "Target",
    "block_classes",
    "compiled_by_torch",
    "components_of",
    "declared_blocks",
    "entry_points",
    "forget_roots",
    "holds_code_for",
    "hooked",
    "is_lightning",
    "metric_updated_by",
    "offloaded",
    "roots_for",
    "sharded_flat",
    "sharded_units",
    "split",
    "step_methods",
]
