"""A `hotloop.Loop` could not run a tier, or the tier did not agree with its reference."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped, number
from hotloop.diagnose.words import several


class TierDeclined(Rule):
    problems = (
        Problem(
            rule="tier_declined",
            symptom="a tier is declined",
            cause="the step does something that a tier cannot repeat, or the tier did not agree with its reference",
            cost="what the tier would have saved a step, if it was measured",
            change="do what the hint says; the advice names the line if it is known",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per reason and line, with all tiers that it rules out; host syncs and undone steps apart."""
        waits = {(event.file, event.line) for event in case.of(ev.HostSync) if event.file}
        undone = {(event.function, event.tier, event.reason) for event in case.of(ev.StepUndone)}
        events = [
            event
            for event in case.of(ev.TierDeclined)
            if (event.file, event.line) not in waits and (event.function, event.tier, event.reason) not in undone
        ]  # `host_sync` and `step_undone` advise on the others
        for group in grouped(events, lambda event: (event.function, event.reason, event.file, event.line)):
            event = group[0]
            yield self.problem().advice(
                f"{several(declined.tier for declined in group)} of {event.function} was declined: {event.reason}",
                **case.place(event),
                milliseconds=self.saved_ms(case, group),
                times=len(group),
                change=event.hint or self.problem().change,
            )

    @staticmethod
    def saved_ms(case: Case, group: list[ev.TierDeclined]) -> float | None:
        """Return the ms a step that the fastest of the declined tiers would save; None if it was not measured."""
        eager = number(case.way("eager").get("step_ms"))
        steps = [number(case.way(event.tier).get("step_ms")) for event in group]
        fastest = min((step for step in steps if step is not None), default=None)
        return eager - fastest if eager is not None and fastest is not None and fastest < eager else None
