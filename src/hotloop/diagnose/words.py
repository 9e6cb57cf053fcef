"""Figures and counts as people read them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def figure(value: float) -> str:
    """Return a number with its three leading digits: 0.14, 12.3, 1,234."""
    if not value:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    shown = f"{value:,.{places}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def count(many: int, word: str) -> str:
    """Return a count with its noun: 1 compile, 3 compiles."""
    return f"{many:,} {word}{'' if many == 1 else 's'}"


def size(value: float) -> str:
    """Return a number of bytes in binary units: 1.25 GiB."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(len(units) - 1, max(0, int(math.log2(abs(value)) // 10))) if value else 0
    return f"{figure(value / 1024**power)} {units[power]}"


def times(many: float) -> str:
    """Return how often: once, 3 times."""
    return "once" if many == 1 else f"{figure(many)} times"


def several(values: Iterable[object], limit: int = 6) -> str:
    """Return the first few distinct values, separated by commas, and how many more there are."""
    distinct = [str(value) for value in dict.fromkeys(values)]
    left = len(distinct) - limit
    return ", ".join(distinct[:limit]) + (f" and {left:,} more" if left > 0 else "")
