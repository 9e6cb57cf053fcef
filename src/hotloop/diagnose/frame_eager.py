"""A function that could not be traced and stays eager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.breaks import RAISED, cause_of, what_of
from hotloop.diagnose.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "frame_eager"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a whole function stays eager",
        cause="tracing stopped where it cannot go on in a new graph: inside try, with, or a loop over a generator",
        cost="everything in that function runs at eager speed; what it calls may still be compiled",
        change="mend the line as a graph break is mended, or move it out of the try, with or loop",
    ),
    RAISED,
)
_RESUMED = "torch_dynamo_resume_in_"


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a line that keeps functions eager."""
    groups: dict[tuple[object, ...], list[ev.FrameEager]] = {}
    for event in case.of(ev.FrameEager):
        if event.file is None and event.function.startswith(_RESUMED):
            continue  # the rest of a function of torch's own: nobody can change it, none of the work is in it
        key = (event.component, event.file, event.line, "" if event.file else event.function)
        groups.setdefault(key, []).append(event)
    for group in groups.values():
        event = group[0]
        source = event.source or case.source(event.file, event.line)
        known = cause_of(event.reason, source)
        function = event.function
        if function.startswith(_RESUMED):
            function = f"the rest of {function.removeprefix(_RESUMED).rpartition('_at_')[0]}"
        place = {"file": event.file, "line": event.line, "source": source, "times": len(group)}
        if known is RAISED:
            yield RAISED.advice(
                f"{function} stays eager: it raised exceptions of its own", component=event.component, **place
            )
            continue
        change = (
            PROBLEMS[0].change if known.kind == "other" else f"{known.change}; or move the line out of the try or with"
        )
        why = event.reason if known.kind == "other" else what_of(known, event.reason)
        yield PROBLEMS[0].advice(
            f"{function} stays eager: {why}",
            component=event.component,
            **place,
            milliseconds=case.waited_ms(event.file, event.line),
            cause=PROBLEMS[0].cause if "Unsupported" in event.reason else "torch's tracing failed in it",
            change=event.hint if known.kind == "other" and event.hint and not event.file else change,
        )
