"""Figures as people read them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LISTED = 6


def figure(value: float) -> str:
    """Give a number with three digits that matter: 0.14, 12.3, 1,234."""
    if not value:
        return "0"
    places = max(0, 2 - math.floor(math.log10(abs(value))))
    shown = f"{value:,.{places}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def count(many: int, word: str) -> str:
    """Give a count with its noun: 1 compile, 3 compiles."""
    return f"{many:,} {word}{'' if many == 1 else 's'}"


def size(value: float) -> str:
    """Give a number of bytes in binary units."""
    power = min(len(_UNITS) - 1, max(0, int(math.log2(abs(value)) // 10))) if value else 0
    return f"{figure(value / 1024**power)} {_UNITS[power]}"


def share(value: float) -> str:
    """Give a share of 1 in percent."""
    return f"{value:.0%}"


def times(many: float) -> str:
    """Give how often: once, 3 times."""
    return "once" if many == 1 else f"{figure(many)} times"


def several(values: Iterable[object]) -> str:
    """Give the first few of some values in a row, and how many more there are."""
    found = [str(value) for value in dict.fromkeys(values)]
    left = len(found) - _LISTED
    return ", ".join(found[:_LISTED]) + (f" and {left:,} more" if left > 0 else "")


def safe(text: str) -> str:
    """Take out what could harm a terminal or make text read as what it is not: a record is a file like any other."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in text)
