"""A step that changes no parameter: it trains nothing, however fast it is."""

from __future__ import annotations

from collections.abc import Mapping

from hotloop.diagnose.rule import Case, Found, Problem, Rule, number


class NotTrained(Rule):
    problems = (
        Problem(
            rule="not_trained",
            symptom="no parameter changes",
            cause="the step calls no backward or no step of the optimizer, the optimizer has other parameters, or its "
            "learning rate is 0",
            cost="all that its steps take",
            change="call loss.backward() and optimizer.step() in the step, with an optimizer of the model's parameters",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice where no parameter that requires a gradient has changed in any step."""
        figures = case.measurements.get("trained")
        figures = figures if isinstance(figures, Mapping) else {}
        parameters, unchanged, steps = (number(figures.get(name)) for name in ("parameters", "unchanged", "steps"))
        if parameters and steps and unchanged == parameters:
            yield self.problem().advice(
                f"none of {parameters:,.0f} parameters that require a gradient has changed in {steps:,.0f} steps",
                milliseconds=number(case.way("eager").get("step_ms")),
            )
