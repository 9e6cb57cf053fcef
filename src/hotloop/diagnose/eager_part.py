"""A head, a loss or another part of a step runs outside of compiled code."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped
from hotloop.diagnose.words import count, figure


class EagerPart(Rule):
    problems = (
        Problem(
            rule="eager_part",
            symptom="a head or loss is left eager",
            cause="code that is called outside the compiled module runs operation by operation, without fusion",
            cost="the part's time at eager speed; what compiling it would save was not measured",
            change="put it into the compiled module, or compile it by itself: loss_fn = hotloop.compile(loss_fn)",
            remedy="tier",
        ),
    )
    least_share = 0.03  # of a step's work: compiling a smaller part would not be noticed

    def find(self, case: Case) -> Found:
        """Yield one advice per part."""
        events = [event for event in case.of(ev.EagerPart) if event.share >= self.least_share]
        for group in grouped(events, lambda event: (event.component, event.part, event.file, event.line)):
            event = group[-1]
            took = "" if event.seconds is None else f", {figure(event.seconds * 1e3)} ms a step"
            yield self.problem().advice(
                f"{event.part} runs eager: {count(event.operations, 'operation')}, {event.share:.0%} of the step's "
                f"work{took}",
                **case.place(event),
                times=len(group),
            )
