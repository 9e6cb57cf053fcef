"""Python waits for the device inside a step."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.case import Case, grouped
from hotloop.diagnose.rule import Found, Problem
from hotloop.diagnose.sized_results import remedy_of
from hotloop.diagnose.switches import switch_at
from hotloop.diagnose.words import several, times

IN_A_SCALER = "torch's GradScaler checks whether the gradients are finite"
"""Part of an event's reason if the step of a GradScaler reads the value, which no line of the user's can put off."""
SCALED = (
    "pass fused=True to the optimizer (Adam, AdamW, SGD, Adagrad): it takes the scaler's finding on the device; "
    "where the framework forbids it (Lightning, with gradient clipping), train in bfloat16, which needs no scaler"
)
"""What to change about a GradScaler's read."""

LIBRARYS = (
    "see at the library's line what the value is read for: an argument or setting may spare it, and compiled or "
    "captured code often takes another path"
)
"""What to do about a value that a library reads, and that no line of the user's can return."""


def spared_by(place: str) -> str:
    """Return the argument that spares the value which a library reads at a place, or where to look for one."""
    return switch_at(place) or LIBRARYS


PROBLEM = Problem(
    rule="host_sync",
    symptom="a step waits for the device at a line",
    cause="a value is read on the host (.item(), float(), print, .cpu(), a branch): on a GPU nothing can be "
    "launched ahead, and the step cannot be captured",
    cost="the wait, and the gap that the device has after it",
    change="return the tensor from the step and read it outside, every so many steps",
)


def find(case: Case) -> Found:
    """Yield one advice per line, with the tiers that it rules out, except for lines that break a graph."""
    # Rules `graph_break` and `frame_eager` advise on these lines.
    broken = {(event.file, event.line) for event in case.of(ev.GraphBreak)}
    broken |= {(event.file, event.line) for event in case.of(ev.FrameEager)}
    events = [event for event in case.of(ev.HostSync) if not event.file or (event.file, event.line) not in broken]
    waits = "on a GPU the step would wait for the device" if case.on_cpu else "the step waits for the device"
    declined = [event for event in case.of(ev.TierDeclined) if event.file]
    for group in grouped(events, lambda event: (event.component, event.file, event.line, event.reason)):
        event = group[-1]
        tiers = several(one.tier for one in declined if (one.file, one.line) == (event.file, event.line))
        rules_out = f"; it rules out {tiers}" if tiers else ""
        yield PROBLEM.advice(
            f"{waits} {times(event.times)} a step: {event.reason}{rules_out}",
            **case.place(event),
            milliseconds=None if event.seconds is None else event.seconds * 1e3,
            times=len(group),
            change=_change(event.reason, event.source),
        )


def _change(reason: str, source: str) -> str:
    """Return what to change, by who reads the value: a GradScaler, a package, or the user's own line."""
    if IN_A_SCALER in reason:
        return SCALED
    if "an installed package" in reason:
        return f"{spared_by(reason)}; hotloop.Loop says whether it keeps the step from being captured"
    return remedy_of(reason, source) or PROBLEM.change
