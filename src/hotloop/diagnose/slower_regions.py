"""Compiling by blocks makes a step slower than compiling whole, or the other way round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.diagnose.case import number, overlap
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.slower_preset import NOISE
from hotloop.diagnose.words import figure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "slower_regions"
BY_BLOCKS = " by blocks"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="the choice of regions makes a step slower",
        cause="each region is a call of its own, with its guards, and nothing is fused across its border",
        cost="the difference at every step; by blocks costs fewer seconds of compiling",
        change='choose the faster regions, regions="whole" or regions="blocks", where the steps planned pay for it',
        remedy="regions",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice for each preset that was measured both ways, where the slower one loses more than it saves."""
    asked = case.settings.get("run")
    ways = case.measurements.get("ways")
    ways = ways if isinstance(ways, dict) else {}
    for name in ways:
        whole = name.removesuffix(BY_BLOCKS)
        if name == whole or (asked in ways and asked not in (name, whole)):
            continue
        if (found := _compared(case, name, whole, asked)) is not None:
            yield found


def _compared(case: Case, blocks: str, whole: str, asked: object) -> Advice | None:
    times = {name: number(case.way(name).get("step_ms")) for name in (blocks, whole)}
    of_blocks, of_whole = times[blocks], times[whole]
    if of_blocks is None or of_whole is None:
        return None
    slow, fast = (blocks, whole) if of_blocks > of_whole else (whole, blocks)
    took, best = max(of_blocks, of_whole), min(of_blocks, of_whole)
    saved = (_cold(case, fast) - _cold(case, slow)) * 1e3  # what the slower regions save once, in ms
    if overlap(case.way(slow), case.way(fast)):
        return None
    if took <= best * NOISE or (took - best) * case.steps <= saved or asked == fast:
        return None
    regions = "whole" if fast == whole else "blocks"
    return PROBLEMS[0].advice(
        f"{slow} takes {figure(took)} ms a step, {fast} {figure(best)} ms",
        milliseconds=took - best,
        change=f'compile with regions="{regions}"',
    )


def _cold(case: Case, way: str) -> float:
    return number(case.way(way).get("cold_seconds")) or 0.0
