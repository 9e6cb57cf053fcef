"""An optimizer that has a fused form, which was measured to be faster, does not use it."""

from __future__ import annotations

from collections.abc import Mapping

from hotloop.diagnose.other_form import gain
from hotloop.diagnose.rule import Case, Found, Problem, Rule
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

    def find(self, case: Case) -> Found:
        """Yield an advice for each optimizer whose fused step saves a hundredth of the program's step or more."""
        optimizers = case.measurements.get("optimizers")
        for one in optimizers if isinstance(optimizers, list | tuple) else ():
            figures = one if isinstance(one, Mapping) else {}
            if found := gain(case, figures, "fused_"):
                name = figures.get("name")
                yield self.problem().advice(
                    f"{name}'s own step takes {figure(found.took)} ms, fused {figure(found.other)}",
                    change=f"write torch.optim.{name}(..., fused=True); it rounds otherwise in the last bits",
                    milliseconds=found.milliseconds,
                )
