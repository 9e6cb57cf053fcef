"""Times two forms of one part of a step by turns: an optimizer, a layer, attention."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from hotloop.measure import interval, typical

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_WARM_UP, _ROUNDS = 3, 12


def timed_pair(forms: Sequence[Callable[[], Any]], wait: Callable[[], None], prefix: str) -> dict[str, float]:
    """Time two functions by turns, so that other load on the machine meets both.

    Args:
        forms: what the program does, and the same in the other form.
        wait: waits until the device is done.
        prefix: of the other form's figures.

    Returns:
        ``step_ms``, ``step_ms_low``, ``step_ms_high`` of the first, and the same of the other after the prefix.
    """
    samples: list[list[float]] = [[], []]
    for turn in range(_WARM_UP + _ROUNDS):
        for function, taken in zip(forms, samples, strict=True):
            wait()
            began = time.perf_counter()
            function()
            wait()
            if turn >= _WARM_UP:
                taken.append(time.perf_counter() - began)
    figures: dict[str, float] = {}
    for before, taken in zip(("", prefix), samples, strict=True):
        low, high = interval(taken)
        named = {"step_ms": typical(taken, skip=0), "step_ms_low": low, "step_ms_high": high}
        figures |= {before + name: 1e3 * value for name, value in named.items()}
    return figures
