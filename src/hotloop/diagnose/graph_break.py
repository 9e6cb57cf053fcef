"""Graph breaks, by cause: one advice a line, whatever the number of frames that met it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.breaks import ENTRIES, cause_of, what_of
from hotloop.diagnose.compiles import count, recompiles
from hotloop.diagnose.guards import guard_of
from hotloop.diagnose.words import count as counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

__all__ = ["ENTRIES", "find"]

_RESUMED = re.compile(r"^torch_dynamo_resume_in_.*_at_(\d+)$")
_Place = tuple[str | None, str | None, int | None]


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a place that breaks graphs."""
    stays_eager = {(one.component, one.file, one.line) for one in case.of(ev.FrameEager)}  # a rule of its own
    groups: dict[_Place, list[ev.GraphBreak]] = {}
    for event in case.of(ev.GraphBreak):
        if (event.component, event.file, event.line) not in stays_eager:
            groups.setdefault((event.component, event.file, event.line), []).append(event)
    for group in groups.values():
        if not _is_echo(group, groups):
            by_line: dict[tuple[str | None, int | None], list[ev.GraphBreak]] = {}
            for event in group:
                by_line.setdefault((event.by_file, event.by_line), []).append(event)
            known = [lines for (file, _), lines in by_line.items() if file]
            for lines in known or [group]:
                yield _advice(case, lines)


def _is_echo(group: list[ev.GraphBreak], groups: dict[_Place, list[ev.GraphBreak]]) -> bool:
    """Tell a break inside a library's function that was called at another break: tracing it apart breaks again.

    Such a function is a frame of its own, so that no line of the program is known for it.
    """
    first = group[0]
    installed = first.file is not None and not first.by_file and "/lib/python" in first.file.replace("\\", "/")
    return installed and any(
        other[0].component == first.component and other is not group and other[0].reason == first.reason
        for other in groups.values()
    )


def _advice(case: Case, group: list[ev.GraphBreak]) -> Advice:
    told = next((one for one in group if not one.reason.startswith("generic_jump")), group[0])
    entry = cause_of(told.reason, told.source)
    inside = told.by_file is not None
    own = inside and entry.kind == "self_log"  # nobody looks for it in Lightning's own file
    file, line, source = (told.by_file, told.by_line, told.by_source) if own else (told.file, told.line, told.source)
    what = what_of(entry, told.reason)
    if inside and not own:
        what += f" in an installed package, called at {told.by_file}:{told.by_line}: {told.by_source}"
    parts = _resumed(case, told)
    again = [
        one
        for one in recompiles(case)
        if (one.event.function, one.event.component) in {(part.function, part.component) for part in parts}
        and guard_of(one.event).cause == "break_value"
    ]
    if again:
        what += f"; what it gives recompiled the code behind it {counted(len(again), 'time')}"
    return entry.advice(
        what,
        component=told.component,
        file=file,
        line=line,
        source=source,
        times=len(group),
        compiles=len(parts) + count(again),
        seconds=sum(one.seconds for one in again),
    )


def _resumed(case: Case, event: ev.GraphBreak) -> list[ev.Compiled]:
    """Give the first compiles of the code behind a break: torch names it by the line."""
    return [
        one
        for one in case.of(ev.Compiled)
        if one.component == event.component
        and one.phase == "forward"
        and one.file == event.file
        and one.frame.endswith("/0")
        and (found := _RESUMED.match(one.function))
        and int(found[1]) == event.line
    ]
