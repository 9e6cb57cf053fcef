"""Batches of ever new shapes, each of which libraries set up anew in eager steps."""

from __future__ import annotations

from collections.abc import Mapping

from hotloop.diagnose.rule import Case, Found, Problem, Rule, number
from hotloop.diagnose.words import figure


class NewShapes(Rule):
    problems = (
        Problem(
            rule="new_shapes",
            symptom="eager steps are slower at their first meeting with a shape",
            cause="libraries choose kernels and plans for a shape when they first meet it, and the allocator asks the "
            "device for blocks of new sizes",
            cost="the extra time of each new shape, once",
            change="pad batches to a few sizes, such as multiples of 64, or sort rows of like length into one batch",
            remedy="buckets",
        ),
    )
    worth_it = 0.1  # share of a step

    def find(self, case: Case) -> Found:
        """Yield one advice where a new shape takes a tenth of a step or more beyond the same batch run again."""
        figures = case.measurements.get("new_shapes")
        figures = figures if isinstance(figures, Mapping) else {}
        names = ("extra_ms", "extra_ms_low", "extra_seconds", "shapes", "steps")
        extra, low, whole, shapes, steps = (number(figures.get(name)) for name in names)
        step = number(case.way("eager").get("step_ms"))
        if extra is None or low is None or whole is None or shapes is None or steps is None or step is None:
            return
        if extra >= self.worth_it * step:
            yield self.problem().advice(
                f"{shapes:,.0f} of {steps:,.0f} batches have a shape of their own, and each takes {figure(extra)} ms "
                f"longer when it is new than when it comes again, beside {figure(step)} ms of a step",
                seconds=whole,
                times=int(shapes),
            )
