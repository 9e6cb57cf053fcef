"""A way to run steps needs more memory than eager, or nearly all there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.diagnose.case import number
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import share, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "memory"
MORE = 1.1
"""Times eager's peak from which on it is said; small changes are the allocator's."""
LEAST = 32 * 2**20
"""Bytes below which it matters to nobody."""
NEAR = 0.9
"""Of the device's memory: beyond, the next longer batch may not fit."""
PROBLEMS = (
    Problem(
        rule=RULE,
        kind="more",
        symptom="compiled or captured steps need more memory than eager",
        cause="CUDA graphs keep memory of their own for each shape, and compiled code may keep more for its backward",
        cost="memory, up to a run that fails for want of it",
        change="fewer shapes (buckets), a preset without CUDA graphs (default, aot_eager), or fewer components",
        remedy="tier",
    ),
    Problem(
        rule=RULE,
        kind="near_limit",
        symptom="the device's memory is nearly full",
        cause="what a step needs and what is kept between steps comes near to all there is",
        cost="the run, at the first batch that needs more",
        change="a smaller batch, activation checkpointing, preset aot_eager, or fewer compiled components",
    ),
)
_MORE, _NEAR = PROBLEMS


def find(case: Case) -> Iterator[Advice]:
    """Give one advice for each way that needs more than eager, and one for a device that is nearly full."""
    eager = number(case.way("eager").get("peak_bytes"))
    peaks = {name: number(figures.get("peak_bytes")) or 0.0 for name, figures in case.measured_ways().items()}
    for name, peak in peaks.items():
        if eager is not None and peak > max(eager * MORE, eager + LEAST):
            yield _MORE.advice(
                f"{name} needs {size(peak)} at its peak, eager {size(eager)}", nbytes=round(peak - eager)
            )
    there = number(case.environment.get("device_memory_bytes"))
    most = max([*peaks.items(), ("eager", eager or 0.0)], key=lambda each: each[1])
    if there is not None and most[1] > NEAR * there:
        yield _NEAR.advice(f"{most[0]} needs {share(most[1] / there)} of the device's {size(there)}")
