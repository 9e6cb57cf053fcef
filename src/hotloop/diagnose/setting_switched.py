"""Other code than the program switched TF32 on."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped


class SettingSwitched(Rule):
    problems = (
        Problem(
            rule="setting_switched",
            kind="tf32",
            symptom="TF32 was switched on by a framework",
            cause="matrix products in float32 then keep 10 bits of each factor: faster, and 1,000 times less exact",
            cost="numerics that differ from the same code without the framework; none in time",
            change='decide it yourself, before the first step: torch.set_float32_matmul_precision("highest") for '
            'float32, "high" for TF32',
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per setting and by who changed it."""
        events = case.of(ev.SettingSwitched)
        for group in grouped(events, lambda event: (event.setting, event.by, event.after)):
            event = group[0]
            yield self.problem().advice(f"{event.by} set {event.setting} to {event.after}", times=len(group))
