"""Steps failed in their tier, and were undone and run eagerly."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped
from hotloop.diagnose.words import count, several


class StepUndone(Rule):
    problems = (
        Problem(
            rule="step_undone",
            symptom="a step failed in its tier and was undone",
            cause="compiled or captured code failed where eager does not; no parameter had been written, so the step "
            "was repeated in eager",
            cost="the step twice, and the tier from then on",
            change="fix what the reason names, or choose a lower tier: run='eager'",
            remedy="tier",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per tier and reason."""
        places = {(event.function, event.tier): event for event in reversed(case.of(ev.TierDeclined))}
        for group in grouped(case.of(ev.StepUndone), lambda event: (event.function, event.tier, event.reason)):
            event = group[0]
            declined = places.get((event.function, event.tier))
            yield self.problem().advice(
                f"{count(len(group), 'step')} of {event.function} failed in {event.tier} and ran eagerly instead "
                f"(step {several(undone.step for undone in group)}): {event.reason}",
                component=event.component,
                file=declined.file if declined else None,
                line=declined.line if declined else None,
                source=declined.source if declined else "",
                times=len(group),
            )
