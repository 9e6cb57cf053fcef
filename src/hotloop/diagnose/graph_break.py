"""Graph breaks, by cause: one advice a line, whatever the number of frames that met it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.breaks import PROBLEMS, cause_of, what_of
from hotloop.diagnose.compiles import count, is_breaks, recompiles, resumed_at
from hotloop.diagnose.words import times as often

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

__all__ = ["PROBLEMS", "find"]

_INSTALLED = re.compile(r"(?:^|[/\\])(?:lib[/\\]python3|Lib[/\\]|site-packages[/\\]|dist-packages[/\\])")
_TORCHS = re.compile(r"(?:^|[/\\])site-packages[/\\]torch[/\\]")
_OUTER = "step_unsupported"
"""torch's reason for the line that calls a function which breaks inside."""
_Place = tuple[str | None, str | None, int | None]


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a place that breaks graphs; inside an installed package, one a line that leads there."""
    stays_eager = {(one.component, one.file, one.line) for one in case.of(ev.FrameEager) if one.file}  # its own rule's
    groups: dict[_Place, list[ev.GraphBreak]] = {}
    for event in case.of(ev.GraphBreak):
        if (event.component, event.file, event.line) not in stays_eager:
            groups.setdefault((event.component, event.file, event.line), []).append(event)
    for group in groups.values():
        if _is_no_news(group, groups):
            continue
        leads: dict[tuple[str, int | None], list[ev.GraphBreak]] = {}
        for event in group:
            if event.by_file:
                leads.setdefault((event.by_file, event.by_line), []).append(event)
        for told in leads.values() or [group]:
            yield _advice(case, told)


def _is_no_news(group: list[ev.GraphBreak], groups: dict[_Place, list[ev.GraphBreak]]) -> bool:
    """Tell a break that only repeats another one, or that torch's own code asks for (its optimizers do).

    The call of a function that broke breaks again, and so does that function traced apart. What torch traces apart is a
    frame of its own: inside a library, no line of the program is known for it.
    """
    first, led = group[0], any(event.by_file for event in group)
    if not led and _TORCHS.search(first.file or "") and cause_of(first.reason, first.source).kind == "asked":
        return True
    others = [other for other in groups.values() if other is not group and other[0].component == first.component]
    if all(event.reason == _OUTER for event in group):
        return any(other[0].reason != _OUTER for other in others)
    installed = not led and _INSTALLED.search(first.file or "") is not None
    return installed and any(other[0].reason == first.reason for other in others)


def _advice(case: Case, group: list[ev.GraphBreak]) -> Advice:
    told = next((one for one in group if not one.reason.startswith("generic_jump")), group[0])
    problem = cause_of(told.reason, told.source)
    inside = told.by_file is not None
    own = inside and problem.kind == "self_log"  # nobody looks for it in Lightning's own file
    file, line, source = (told.by_file, told.by_line, told.by_source) if own else (told.file, told.line, told.source)
    what = what_of(problem, told.reason)
    if inside and not own:
        what += f" in an installed package, called at {told.by_file}:{told.by_line}: {told.by_source}"
    parts = _resumed(case, told)
    again = [one for one in recompiles(case) if is_breaks(one, told)]
    if again:
        what += f"; the code behind it was recompiled {often(len(again))}, since what it gave changed"
    return problem.advice(
        what,
        component=told.component,
        file=file,
        line=line,
        source=source,
        times=len(group),
        milliseconds=case.waited_ms(file, line),
        compiles=len(parts) + count(again),
        seconds=sum(one.seconds for one in again),
    )


def _resumed(case: Case, event: ev.GraphBreak) -> list[ev.Compiled]:
    """Give the first compiles of the code behind a break: torch names it by the line."""
    places = {(event.file, event.line), (event.by_file, event.by_line)}
    return [
        one
        for one in case.of(ev.Compiled)
        if one.component == event.component
        and one.phase == "forward"
        and one.frame.endswith("/0")
        and (one.file, resumed_at(one.function)) in places
    ]
