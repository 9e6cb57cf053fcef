"""Which compiles a recompile caused, and what they took."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hotloop import events as ev

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
    """Give every recompile, in order; its compiles follow it under the same frame."""
    found: list[Recompile] = []
    latest: dict[tuple[str | None, str], Recompile] = {}
    for event in case.events:
        if isinstance(event, ev.Recompiled):
            found.append(Recompile(event))
            if event.frame:
                latest[event.component, event.frame] = found[-1]
        elif isinstance(event, ev.Compiled) and (owner := latest.get((event.component, event.frame))):
            owner.compiles.append(event)
    return found


def count(group: Iterable[Recompile]) -> int:
    """Give how many times code was compiled; a backward compiled with its forward counts as one with it."""
    return sum(max(1, sum(one.phase == "forward" for one in each.compiles)) for each in group)
