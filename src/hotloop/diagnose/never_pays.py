"""A compile takes longer than it saves in the steps that are planned."""

from __future__ import annotations

import math

from hotloop.diagnose.rule import Case, Found, Problem, Rule, number, overlap
from hotloop.diagnose.words import figure


class NeverPays(Rule):
    problems = (
        Problem(
            rule="never_pays",
            symptom="a compile never pays in the steps planned",
            cause="its saving per step, times the planned steps, is less than its compiles take",
            cost="the compile's seconds, less what it saved",
            change="run eager or a tier that costs no compile, compile by blocks, or keep the compile caches for later",
            remedy="tier",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per way that was measured to be faster, but not by enough."""
        eager = number(case.way("eager").get("step_ms"))
        if eager is None:
            return
        for name, figures in case.measured_ways().items():
            cold = number(figures.get("cold_seconds")) or 0.0
            saves = eager - (number(figures.get("step_ms")) or eager)
            if saves <= 0 or cold <= 0 or overlap(figures, case.way("eager")):  # `slower_preset` finds slower ways
                continue
            pays = math.ceil(cold * 1e3 / saves)
            if pays > case.steps:
                assumed = f"nobody said how many; {case.steps:,} assumed"
                planned = f"{case.steps:,} are planned" if case.planned else assumed
                yield self.problem().advice(
                    f"{name} takes {figure(cold)} s to compile and saves {figure(saves)} ms a step: it pays after "
                    f"{pays:,} steps, {planned}",
                    seconds=cold - case.steps * saves / 1e3,
                )
