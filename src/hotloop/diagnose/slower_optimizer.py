"""An optimizer that has a fused form, which was measured to be faster, does not use it."""

from __future__ import annotations

from collections.abc import Mapping

from hotloop.diagnose.rule import Case, Found, Problem, Rule, number
from hotloop.diagnose.words import figure


class SlowerOptimizer(Rule):
    problems = (
        Problem(
            rule="slower_optimizer",
            symptom="an optimizer is slower than its fused form",
            cause="without fused=True each parameter, or each list of them, takes several operations",
            cost="the difference at every step",
            change="make it with fused=True; it rounds otherwise in the last bits",
        ),
    )
    worth_it = 0.01  # share of a step

    def find(self, case: Case) -> Found:
        """Yield an advice for each optimizer whose fused step saves a hundredth of the program's step or more."""
        optimizers = case.measurements.get("optimizers")
        step = number(case.way("eager").get("step_ms")) or 0.0
        for one in optimizers if isinstance(optimizers, list | tuple) else ():
            figures = one if isinstance(one, Mapping) else {}
            low, took, fused, high = (
                number(figures.get(name)) for name in ("step_ms_low", "step_ms", "fused_step_ms", "fused_step_ms_high")
            )
            if low is None or took is None or fused is None or high is None or high >= low:
                continue
            if took - fused >= self.worth_it * step:
                name = figures.get("name")
                yield self.problem().advice(
                    f"{name}'s own step takes {figure(took)} ms, fused {figure(fused)}",
                    change=f"write torch.optim.{name}(..., fused=True); it rounds otherwise in the last bits",
                    milliseconds=took - fused,
                )
