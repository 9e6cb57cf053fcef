"""Puts a preset on a component or its regions, in place; takes it off."""

from hotloop.apply.regions import block_classes, split
from hotloop.apply.roots import Root, root_for
from hotloop.apply.targets import Target, components_of, entry_points

__all__ = ["Root", "Target", "block_classes", "components_of", "entry_points", "root_for", "split"]
