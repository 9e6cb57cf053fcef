"""The device waits for the host: it stands idle between kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import count, figure, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "host_bound"
BUSY = 0.85
"""Share of a step in which the device works, above which there is little to gain."""
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="steps are host-bound: the device stands idle between kernels",
        cause="Python and the launches take longer than the kernels",
        cost="the idle time of every step",
        change="capture the whole step (a tier with +graph), or make the batch larger",
        remedy="tier",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice for the run, from the last time that it was looked at."""
    found = case.of(ev.HostBound)
    if found and found[-1].busy < BUSY:
        event = found[-1]
        yield PROBLEMS[0].advice(
            f"the device works {share(event.busy)} of a step of {figure(event.step_seconds * 1e3)} ms, in "
            f"{count(event.kernels, 'kernel')}",
            component=event.component,
            milliseconds=event.step_seconds * (1 - event.busy) * 1e3,
            times=len(found),
        )
