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
class RecompiledFrame:
    """A recompile with the compiles of its frame, backward among them."""

    event: ev.Recompiled
    compiles: list[ev.Compiled] = dataclasses.field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds that the compiles took."""
        return sum(compiled.seconds for compiled in self.compiles)

    def is_caused_by(self, broken: ev.GraphBreak) -> bool:
        """Return whether a graph break caused it: a value that the break left behind, or what Lightning's log keeps."""
        if self.event.component != broken.component:
            return False
        if LEFT_BEHIND.search(self.event.reason):
            places = {(broken.file, broken.line), (broken.by_file, broken.by_line)}
            return (self.event.file, resumed_at(self.event.function)) in places
        return "_ResultCollection.log" in broken.reason and "_results" in self.event.reason


def recompiles(case: Case) -> list[RecompiledFrame]:
    """Return every recompile with the compiles of the same frame.

    They follow the recompile; if a batch size got code of its own, they come before it.
    """
    found: list[RecompiledFrame] = []
    latest: dict[tuple[str | None, str], RecompiledFrame] = {}
    before: dict[tuple[str | None, str], list[ev.Compiled]] = {}
    for event in case.events:
        if isinstance(event, ev.Recompiled):
            key = event.component, event.frame
            found.append(RecompiledFrame(event, before.pop(key, [])))
            if event.frame:
                latest[key] = found[-1]
        elif isinstance(event, ev.Compiled) and event.frame:
            key = event.component, event.frame
            owner = latest.get(key)
            (owner.compiles if owner else before.setdefault(key, [])).append(event)
    return found


def count(recompiled: Iterable[RecompiledFrame]) -> int:
    """Return how many times code was compiled; a backward counts as one with its forward."""
    return sum(max(1, sum(compiled.phase == "forward" for compiled in frame.compiles)) for frame in recompiled)


def resumed_at(function: str) -> int | None:
    """Return the line of the graph break behind which a function goes on; None for any other function."""
    resumed = re.match(r"^torch_dynamo_resume_in_.*_at_(?P<line>\d+)$", function)
    return int(resumed["line"]) if resumed else None
