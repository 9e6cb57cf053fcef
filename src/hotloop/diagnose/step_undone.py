"""Steps failed in their tier, and were undone and run eagerly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import count, several

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "step_undone"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a step failed in its tier and was undone",
        cause="compiled or captured code failed where eager does not; no parameter had been written, so eager ran it",
        cost="the step twice, and the tier from then on",
        change="mend what the reason names, or choose a tier below it: run='eager'",
        remedy="tier",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a tier and reason."""
    groups: dict[tuple[str, str, str], list[ev.StepUndone]] = {}
    for event in case.of(ev.StepUndone):
        groups.setdefault((event.function, event.tier, event.reason), []).append(event)
    for (function, tier, reason), group in groups.items():
        declined = next((one for one in case.of(ev.TierDeclined) if (one.function, one.tier) == (function, tier)), None)
        yield PROBLEMS[0].advice(
            f"{count(len(group), 'step')} of {function} failed in {tier} and ran eagerly instead "
            f"(step {several(one.step for one in group)}): {reason}",
            component=group[0].component,
            file=declined.file if declined else None,
            line=declined.line if declined else None,
            source=declined.source if declined else "",
            times=len(group),
        )
