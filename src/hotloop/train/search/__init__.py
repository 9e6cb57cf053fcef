"""Searching for settings: trials that are ordinary runs, kept in a storage that any number of workers share."""

from __future__ import annotations

from hotloop.train.search.nested import nested

__all__ = ["nested"]
