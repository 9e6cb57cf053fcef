"""A compile takes longer than it saves in the steps that are planned."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from hotloop.diagnose.case import number, overlap
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import figure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "never_pays"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a compile never pays in the steps planned",
        cause="what it saves a step, times the steps, is less than its compiles take",
        cost="the compile's seconds, less what it saved",
        change="run eager or a tier that costs no compile, compile by blocks, or keep the compile caches for later",
        remedy="tier",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice for each way that was measured to be faster, but not by enough."""
    eager = number(case.way("eager").get("step_ms"))
    if eager is None:
        return
    for name, figures in case.measured_ways().items():
        cold = number(figures.get("cold_seconds")) or 0.0
        saves = eager - (number(figures.get("step_ms")) or eager)
        if saves <= 0 or cold <= 0 or overlap(figures, case.way("eager")):  # one that is slower is another rule's
            continue
        pays = math.ceil(cold * 1e3 / saves)
        if pays > case.steps:
            planned = f"{case.steps:,} are planned" if case.planned else f"nobody said how many; {case.steps:,} assumed"
            yield PROBLEMS[0].advice(
                f"{name} takes {figure(cold)} s to compile and saves {figure(saves)} ms a step: it pays after "
                f"{pays:,} steps, {planned}",
                seconds=cold - case.steps * saves / 1e3,
            )
