"""Activation checkpointing is around the compiled part instead of inside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "checkpoint_outside"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="activation checkpointing wraps compiled code from outside",
        cause="its recomputation calls the compiled code a second time as it is: the compiler cannot choose what to "
        "keep, nor fuse the recomputation into the backward",
        cost="a whole second forward in each backward, where inside the compiled part only what is cheap is recomputed",
        change="compile the module that calls torch.utils.checkpoint (use_reentrant=False), not the one inside it",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a place."""
    groups: dict[tuple[object, ...], list[ev.CheckpointOutside]] = {}
    for event in case.of(ev.CheckpointOutside):
        groups.setdefault((event.component, event.file, event.line, event.function), []).append(event)
    for group in groups.values():
        event = group[0]
        yield PROBLEMS[0].advice(
            f"activation checkpointing wraps {event.function} from outside",
            component=event.component,
            file=event.file,
            line=event.line,
            source=event.source or case.source(event.file, event.line),
            times=len(group),
        )
