"""Figures and counts as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.report import text

if TYPE_CHECKING:
    from collections.abc import Iterable


def figure(value: float) -> str:
    """Return a number with its three leading digits: 0.14, 12.3, 1,234."""
    return text.figure(value, 3)


def times(many: float) -> str:
    """Return how often: once, 3 times."""
    return "once" if many == 1 else f"{figure(many)} times"


def several(values: Iterable[object], limit: int = 6) -> str:
    """Return the first few distinct values, separated by commas, and how many more there are."""
    distinct = [str(value) for value in dict.fromkeys(values)]
    left = len(distinct) - limit
    return ", ".join(distinct[:limit]) + (f" and {left:,} more" if left > 0 else "")
