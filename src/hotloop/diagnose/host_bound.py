"""The device waits for the host and stands idle between kernels."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule
from hotloop.diagnose.words import count, figure


class HostBound(Rule):
    problems = (
        Problem(
            rule="host_bound",
            symptom="steps are host-bound: the device stands idle between kernels",
            cause="Python and the launches take longer than the kernels",
            cost="the idle time of every step",
            change="capture the whole step (a tier with +graph), or make the batch larger",
            remedy="tier",
        ),
    )
    busy_enough = 0.85  # share of a step in which the device works; above it there is little to gain

    def find(self, case: Case) -> Found:
        """Yield one advice for the run, from the last time that it was profiled."""
        events = case.of(ev.HostBound)
        if events and events[-1].busy < self.busy_enough:
            event = events[-1]
            yield self.problem().advice(
                f"the device works {event.busy:.0%} of a step of {figure(event.step_seconds * 1e3)} ms, in "
                f"{count(event.kernels, 'kernel')}",
                component=event.component,
                milliseconds=event.step_seconds * (1 - event.busy) * 1e3,
                times=len(events),
            )
