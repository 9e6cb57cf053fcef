"""A head, a loss or another part of the step's work runs outside of compiled code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import count, figure, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "eager_part"
LEAST = 0.03
"""Of a step's work: below, compiling it would not be seen."""
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a head or loss is left eager",
        cause="what is called outside the compiled module runs operation by operation, and nothing is fused into it",
        cost="the part's time at eager speed; what compiling it would save was not measured",
        change="put it into the compiled module, or compile it by itself: loss_fn = hotloop.compile(loss_fn)",
        remedy="tier",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a part."""
    groups: dict[tuple[object, ...], list[ev.EagerPart]] = {}
    for event in case.of(ev.EagerPart):
        if event.share >= LEAST:
            groups.setdefault((event.component, event.part, event.file, event.line), []).append(event)
    for group in groups.values():
        event = group[-1]
        took = "" if event.seconds is None else f", {figure(event.seconds * 1e3)} ms a step"
        yield PROBLEMS[0].advice(
            f"{event.part} runs eager: {count(event.operations, 'operation')}, {share(event.share)} of the step's work"
            f"{took}",
            component=event.component,
            file=event.file,
            line=event.line,
            source=event.source,
            times=len(group),
        )
