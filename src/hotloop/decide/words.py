"""Times as people read them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Give ``value`` in s: two digits below 10 s, whole seconds above."""
    if value < 1:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if value < 10 else f"{value:,.0f} s"  # noqa: PLR2004 - where a decimal stops to matter


def milliseconds(value: float) -> str:
    """Give ``value``, in s, in ms with three digits."""
    ms = value * 1e3
    return f"{ms:.2f} ms" if ms < 10 else f"{ms:.1f} ms" if ms < 100 else f"{ms:,.0f} ms"  # noqa: PLR2004
