"""Convolutions compute in another layout than the one that tensors have."""

from __future__ import annotations

from hotloop.diagnose.rule import Case, Found, Problem, Rule, number, overlap
from hotloop.diagnose.slower_preset import NOISE
from hotloop.diagnose.words import figure

LAID_OUT = "channels_last"


class SlowerLayout(Rule):
    problems = (
        Problem(
            rule="slower_layout",
            symptom="the layout that convolutions compute in makes a step slower",
            cause="on a GPU convolutions in half precision compute channels last, and transpose what goes in and what "
            "comes out",
            cost="the difference at every step",
            change="lay the model out once, model.to(memory_format=torch.channels_last), before the optimizer is made, "
            "and pictures alike, x.to(memory_format=torch.channels_last)",
            remedy="tier",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice where the layout was measured to be faster than eager and the preset that was asked for."""
        took, eager = (number(case.way(name).get("step_ms")) for name in (LAID_OUT, "eager"))
        asked = number(case.way(str(case.settings.get("run"))).get("step_ms"))
        if took is None or eager is None or overlap(case.way(LAID_OUT), case.way("eager")):
            return
        if took * NOISE < min(eager, asked or eager):
            yield self.problem().advice(
                f"channels last an eager step takes {figure(took)} ms, as it is {figure(eager)}: "
                f"{figure(eager / took)} times as fast",
                milliseconds=min(eager, asked or eager) - took,
            )
