"""A way to run steps is slower than eager."""

from __future__ import annotations

from hotloop.diagnose.rule import Case, Found, Problem, Rule, number, overlap
from hotloop.diagnose.words import figure

NOISE = 1.03
"""Step times closer than this factor count as equal."""


class SlowerPreset(Rule):
    problems = (
        Problem(
            rule="slower_preset",
            symptom="a preset or tier is slower than eager",
            cause="the model is too small, or too often broken into parts, for compiled code to make up for the cost "
            "of its calls: guards and launches cost 20 to 60 µs each",
            cost="the difference at every step, and the compiles",
            change="run eager, or a tier that captures the whole step; fix graph breaks first",
            remedy="tier",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per way that is slower by more than the noise of the measurement."""
        eager = number(case.way("eager").get("step_ms"))
        if eager is None:
            return
        # No CPU captures a step.
        words = {"change": "run eager; fix graph breaks first"} if case.on_cpu else {}
        for name, figures in case.measured_ways().items():
            took = number(figures.get("step_ms")) or 0.0
            if took > eager * NOISE and not overlap(figures, case.way("eager")):
                ratio = f"{figure(took / eager)} times as long"
                yield self.problem().advice(
                    f"{name} takes {figure(took)} ms a step, eager {figure(eager)}: {ratio}",
                    milliseconds=took - eager,
                    seconds=number(figures.get("cold_seconds")) or 0.0,
                    **words,
                )
