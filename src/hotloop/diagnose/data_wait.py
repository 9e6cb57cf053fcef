"""A step waits for its batch."""

from __future__ import annotations

from hotloop.diagnose.rule import Case, Found, Problem, Rule, number
from hotloop.diagnose.words import count, figure


class DataWait(Rule):
    problems = (
        Problem(
            rule="data_wait",
            symptom="steps wait for their batches",
            cause="batches are made more slowly than steps take them; no tier makes that faster",
            cost="the wait of every step",
            change="load in more worker processes: DataLoader(num_workers=..., persistent_workers=True, "
            "pin_memory=True); or do once, before the training, what each epoch repeats (decoding, tokenizing)",
        ),
    )
    worth_it = 0.1  # share of the time; below it there is little to gain

    def find(self, case: Case) -> Found:
        """Yield one advice where a tenth of the time or more went by until batches were there."""
        waited, ran = (number(case.measurements.get(name)) for name in ("data_wait_ms", "data_step_ms"))
        if waited is None or ran is None or waited < self.worth_it * (waited + ran):
            return
        workers = case.measurements.get("data_workers")
        by = ""
        if type(workers) is int:
            by = f" from {count(workers, 'worker')}" if workers else ", which the training's own process makes"
        yield self.problem().advice(
            f"a step waits {figure(waited)} ms for its batch{by}, then takes {figure(ran)} ms: "
            f"{waited / (waited + ran):.0%} of the time",
            milliseconds=waited,
        )
