"""Other code than the program changed a setting of torch's that affects numerics or speed, such as TF32."""

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
        Problem(
            rule="setting_switched",
            kind="other",
            symptom="a setting of torch's was changed by other code",
            cause="torch's settings belong to the whole process, and a library that changes one changes it for all "
            "code",
            cost="a recompile where code was compiled before, and numerics or speed that nobody asked for",
            change="set it yourself, once, before the first step",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per setting and by who changed it."""
        events = case.of(ev.SettingSwitched)
        for group in grouped(events, lambda event: (event.setting, event.by, event.after)):
            event, setting = group[0], group[0].setting.lower()
            tf32 = any(word in setting for word in ("tf32", "fp32_precision", "float32_matmul_precision"))
            yield self.problem("tf32" if tf32 else "other").advice(
                f"{event.by} changed {event.setting} from {event.before} to {event.after}",
                **case.place(event),
                times=len(group),
            )
