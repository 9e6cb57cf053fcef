"""A loop could not run a tier, or found that it does not agree with its reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.case import number
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import several

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "tier_declined"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a tier is declined",
        cause="the step does something that a tier cannot repeat, or the tier did not agree with its reference",
        cost="what the tier would have saved a step, where it was measured",
        change="do what the hint says; the line is named where there is one",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a reason and line, with all tiers that it rules out; host syncs and undone steps have rules."""
    waits = {(event.file, event.line) for event in case.of(ev.HostSync) if event.file}
    groups: dict[tuple[object, ...], list[ev.TierDeclined]] = {}
    undone = {(event.function, event.tier, event.reason) for event in case.of(ev.StepUndone)}
    for event in case.of(ev.TierDeclined):
        others = (event.file, event.line) in waits or (event.function, event.tier, event.reason) in undone
        if not others:
            groups.setdefault((event.function, event.reason, event.file, event.line), []).append(event)
    eager = number(case.way("eager").get("step_ms"))
    for group in groups.values():
        event = group[0]
        steps = [number(case.way(one.tier).get("step_ms")) for one in group]
        fastest = min((each for each in steps if each is not None), default=None)
        saves = eager - fastest if eager is not None and fastest is not None and fastest < eager else None
        yield PROBLEMS[0].advice(
            f"{several(one.tier for one in group)} of {event.function} was declined: {event.reason}",
            component=event.component,
            file=event.file,
            line=event.line,
            source=event.source or case.source(event.file, event.line),
            milliseconds=saves,
            times=len(group),
            change=event.hint or PROBLEMS[0].change,
        )
