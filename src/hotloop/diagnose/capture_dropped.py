"""A captured step is recorded again and again for the same reason."""

from __future__ import annotations

import re

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped
from hotloop.diagnose.words import count


class CaptureDropped(Rule):
    problems = (
        Problem(
            rule="capture_dropped",
            symptom="a captured step is recorded again and again",
            cause="a recording freezes every setting and attribute that the step reads; one of them keeps changing",
            cost="each time, the steps that audit, warm up and record",
            change="keep it constant, pass it as a tensor argument, or set it less often",
        ),
    )
    least_drops = 2  # a program that changes its phase drops its recording once; from here on it is a habit

    def find(self, case: Case) -> Found:
        """Yield one advice per step function and per thing that changes in it."""
        events = case.of(ev.CaptureDropped)
        for group in grouped(events, lambda event: (event.function, re.sub(r"\d+", "#", event.reason))):
            if len(group) < self.least_drops:
                continue
            function, first_step = group[0].function, min(event.step for event in group)
            again = [event for event in case.of(ev.Captured) if event.function == function and event.step > first_step]
            yield self.problem().advice(
                f"the recording of {function} was dropped {count(len(group), 'time')}: {group[0].reason} changed",
                component=group[0].component,
                times=len(group),
                seconds=sum(event.seconds for event in again),
            )
