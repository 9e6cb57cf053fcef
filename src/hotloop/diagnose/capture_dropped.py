"""A captured step is recorded anew again and again."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "capture_dropped"
LEAST = 2
"""Once is a program that changes its phase; from here on it is a habit."""
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a captured step is recorded again and again",
        cause="a recording freezes every setting and attribute that the step reads; one of them keeps changing",
        cost="the steps that look, warm up and record, each time",
        change="keep it constant, pass it as a tensor argument, or set it less often",
    ),
)
_NUMBER = re.compile(r"\d+")


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a step function and what changes."""
    groups: dict[tuple[str, str], list[ev.CaptureDropped]] = {}
    for event in case.of(ev.CaptureDropped):
        groups.setdefault((event.function, _NUMBER.sub("#", event.reason)), []).append(event)
    for (function, _), group in groups.items():
        if len(group) < LEAST:
            continue
        steps = {event.step for event in group}
        again = [one for one in case.of(ev.Captured) if one.function == function and one.step > min(steps)]
        yield PROBLEMS[0].advice(
            f"the recording of {function} was dropped {count(len(group), 'time')}: {group[0].reason} changed",
            component=group[0].component,
            times=len(group),
            seconds=sum(one.seconds for one in again),
        )
