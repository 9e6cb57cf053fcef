"""A way to run steps is slower than eager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.diagnose.case import number, overlap
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import figure

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "slower_preset"
NOISE = 1.03
"""Steps closer than this factor are not told apart."""
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a preset or tier is slower than eager",
        cause="the model is too small, or too often broken into parts, for compiled code to make up for its calls: "
        "guards and launches cost 20 to 60 µs each",
        cost="the difference at every step, and the compiles",
        change="run eager, or a tier that captures the whole step; mend graph breaks first",
        remedy="tier",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice for each way that was measured to be slower, beyond the noise of the measurement."""
    eager = number(case.way("eager").get("step_ms"))
    if eager is None:
        return
    for name, figures in case.measured_ways().items():
        took = number(figures.get("step_ms")) or 0.0
        if took > eager * NOISE and not overlap(figures, case.way("eager")):
            yield PROBLEMS[0].advice(
                f"{name} takes {figure(took)} ms a step, eager {figure(eager)}: {figure(took / eager)} times as long",
                milliseconds=took - eager,
                seconds=number(figures.get("cold_seconds")) or 0.0,
            )
