"""Which compiles a recompile caused, and what they took."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.guards import LEFT_BEHIND

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hotloop.diagnose.case import Case


@dataclasses.dataclass
class Recompile:
    """A recompile with the compiles of its frame, backward among them."""

    event: ev.Recompiled
    compiles: list[ev.Compiled] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """What it took."""
        return sum(one.seconds for one in self.compiles)


def recompiles(case: Case) -> list[Recompile]:
    """Give every recompile with its compiles, of the same frame: before it where a batch size got code of its own."""
    found: list[Recompile] = []
    latest: dict[tuple[str | None, str], Recompile] = {}
    before: dict[tuple[str | None, str], list[ev.Compiled]] = {}
    for event in case.events:
        if isinstance(event, ev.Recompiled):
            key = event.component, event.frame
            found.append(Recompile(event, before.pop(key, [])))
            if event.frame:
                latest[key] = found[-1]
        elif isinstance(event, ev.Compiled) and event.frame:
            key = event.component, event.frame
            owner = latest.get(key)
            (owner.compiles if owner else before.setdefault(key, [])).append(event)
    return found


def count(group: Iterable[Recompile]) -> int:
    """Give how many times code was compiled; a backward compiled with its forward counts as one with it."""
    return sum(max(1, sum(one.phase == "forward" for one in each.compiles)) for each in group)


_RESUMED = re.compile(r"^torch_dynamo_resume_in_.*_at_(?P<line>\d+)$")


def resumed_at(function: str) -> int | None:
    """Give the line of the graph break behind which a function goes on; None for any other function."""
    found = _RESUMED.match(function)
    return int(found["line"]) if found else None


def is_breaks(one: Recompile, broken: ev.GraphBreak) -> bool:
    """Tell whether a recompile comes from a graph break: of what the break gave, or of what Lightning's log keeps."""
    event = one.event
    if event.component != broken.component:
        return False
    places = {(broken.file, broken.line), (broken.by_file, broken.by_line)}
    if LEFT_BEHIND.search(event.reason):
        return (event.file, resumed_at(event.function)) in places
    return "_ResultCollection.log" in broken.reason and "_results" in event.reason
