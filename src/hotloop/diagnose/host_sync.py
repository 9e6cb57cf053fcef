"""Python waits for the device inside a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import several, times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "host_sync"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a step waits for the device at a line",
        cause="a value is read on the host (.item(), float(), print, .cpu(), a branch): on a GPU nothing can be "
        "launched ahead, and the step cannot be captured",
        cost="the wait, and the gap that the device has after it",
        change="return the tensor from the step and read it outside, every so many steps",
    ),
)
IN_A_PACKAGE = "an installed package"
"""What the reason of an event says where the value is read in code that is not the user's."""
IN_A_SCALER = "torch's GradScaler looks whether the gradients are finite"
"""The same where it is a GradScaler's step that reads, which no line of the user's can put off."""
SCALED = (
    "pass fused=True to the optimizer (Adam, AdamW, SGD, Adagrad): it takes the scaler's finding on the device; "
    "where the framework forbids it (Lightning, with gradient clipping), train in bfloat16, which needs no scaler"
)
"""What to change there."""
_NOT_YOURS = (
    "see at the package's line what the value is read for: an argument or setting may spare it, and compiled or "
    "captured code often takes another path; hotloop.Loop says whether it keeps the step from being captured"
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a line, with the tiers that it rules out; a line that breaks a graph has its advice there."""
    broken = {(event.file, event.line) for event in case.of(ev.GraphBreak)}
    broken |= {(event.file, event.line) for event in case.of(ev.FrameEager)}
    declined: dict[tuple[str, int | None], list[str]] = {}
    for event in case.of(ev.TierDeclined):
        if event.file:
            declined.setdefault((event.file, event.line), []).append(event.tier)
    groups: dict[tuple[object, ...], list[ev.HostSync]] = {}
    for sync in case.of(ev.HostSync):
        if sync.file and (sync.file, sync.line) in broken:
            continue
        groups.setdefault((sync.component, sync.file, sync.line, sync.reason), []).append(sync)
    for group in groups.values():
        one = group[-1]
        tiers = several(declined.get((one.file or "", one.line), ()))
        waits = "on a GPU the step would wait for the device" if case.on_cpu else "the step waits for the device"
        yield PROBLEMS[0].advice(
            f"{waits} {times(one.times)} a step: {one.reason}" + (f"; it rules out {tiers}" if tiers else ""),
            component=one.component,
            file=one.file,
            line=one.line,
            source=one.source or case.source(one.file, one.line),
            milliseconds=None if one.seconds is None else one.seconds * 1e3,
            times=len(group),
            change=_change(one.reason),
        )


def _change(reason: str) -> str:
    """Give what to change by who reads: the user's line, a package's, or a GradScaler."""
    if IN_A_SCALER in reason:
        return SCALED
    return _NOT_YOURS if IN_A_PACKAGE in reason else PROBLEMS[0].change
