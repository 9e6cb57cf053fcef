"""The ledger: what ran compiled and what ran eager, for each component and mode, and why.

Compiled code is shared between components whose code and settings are equal, so a count kept in the code would land on
whichever came first. A component's entry therefore puts its tally into `active`, and each graph counts there.
"""

from __future__ import annotations

import collections
import dataclasses
import linecache
import threading
from dataclasses import field
from typing import Any

from hotloop import events as ev
from hotloop.diagnose.recompile import words_of

_Place = tuple[str, str | None, int | None]
"""A reason or the name of a function, with its file and line."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why something is not what was asked for."""

    reason: str
    stage: str
    file: str | None = None
    line: int | None = None
    source: str = ""
    hint: str = ""

    @property
    def location(self) -> str:
        """The file and line as ``file:line``; empty where there is none."""
        return f"{self.file}:{self.line}" if self.file else ""

    def to_dict(self) -> dict[str, Any]:
        """Return the cause as plain JSON data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, eq=False)
class GraphInfo:
    """One compiled graph: the preset it was meant for, the rung it runs on, and what part of the component it is."""

    requested: str
    running: str
    region: str
    fallback: ev.Fallback | None = None


class Pace(collections.Counter[int]):
    """How many calls lie between two optimizer steps, and how often."""

    _before = 0

    def boundary(self, calls: int) -> None:
        """Pass a boundary, after so many calls in all; intervals without a call are left out."""
        if calls != self._before:
            self[calls - self._before] += 1
            self._before = calls

    def to_dict(self) -> dict[str, int]:
        """Return the counts as plain JSON data, which has no numbers for keys."""
        return {str(calls): times for calls, times in sorted(self.items())}


@dataclasses.dataclass(slots=True, eq=False)
class Tally:
    """The counts of one component in one mode (``training`` or ``inference``), and the causes behind them."""

    component: str
    mode: str
    ladder: Any = None
    suppress: bool = True
    """Whether torch is to run a frame eager that it cannot compile; else it raises."""
    calls: int = 0
    executed: int = 0
    """Graphs that ran, on any rung."""
    graphs: collections.defaultdict[GraphInfo, int] = field(default_factory=lambda: collections.defaultdict(int))
    """How often each graph ran."""
    eager_calls: int = 0
    compiles: int = 0
    recompiles: int = 0
    graph_breaks: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    compile_seconds: float = 0.0
    per_step: Pace = field(default_factory=Pace)
    shapes: collections.Counter[str] = field(default_factory=collections.Counter)
    in_backward: int = 0
    copied: int = 0
    copied_bytes: int = 0
    cudagraphs_skipped: collections.Counter[str] = field(default_factory=collections.Counter)
    limited: list[ev.RecompileLimit] = field(default_factory=list)
    failures: list[ev.FrameEager] = field(default_factory=list)
    causes: dict[_Place, Cause] = field(default_factory=dict)
    recompiled: dict[_Place, Cause] = field(default_factory=dict)
    events: collections.deque[ev.Event] = field(default_factory=lambda: collections.deque(maxlen=1024))
    """The newest events."""
    said: set[tuple[str, ...]] = field(default_factory=set)
    """Keys of the events that were logged."""

    def note(self, event: ev.Event) -> None:
        """Count an event."""
        self.events.append(event)
        if isinstance(event, ev.Compiled):
            self.compiles += event.phase == "forward"
            self.compile_seconds += event.seconds
            self.cache_hits += event.cache_hits
            self.cache_misses += event.cache_misses
            if event.cudagraphs_skipped:
                self.cudagraphs_skipped[event.cudagraphs_skipped] += 1
        elif isinstance(event, ev.Recompiled):
            self.recompiles += 1
            reason, change = words_of(event)
            self.recompiled[event.function, event.file, event.line] = Cause(
                reason, event.kind, event.file, event.line, event.source, change
            )
        elif isinstance(event, ev.GraphBreak):
            # One place breaks once in the component's entry, and again in the function that holds it.
            self.graph_breaks += (event.reason, event.file, event.line) not in self.causes
        elif isinstance(event, ev.RecompileLimit):
            if all(event.function != known.function for known in self.limited):  # fullgraph hits it at every call
                self.limited.append(event)
        elif isinstance(event, ev.FrameEager):
            self.failures.append(event)
        if not isinstance(event, ev.Compiled | ev.Recompiled):
            self._note_cause(event)

    def _note_cause(self, event: ev.Event) -> None:
        reason = getattr(event, "reason", "") or getattr(event, "missing", "")
        file, line = getattr(event, "file", None), getattr(event, "line", None)
        source = getattr(event, "source", "") or (linecache.getline(file, line).strip() if file and line else "")
        if isinstance(event, ev.RunFailed):
            stage, hint = "run", event.remedy
        else:
            stage, hint = str(getattr(event, "stage", event.kind)), getattr(event, "hint", "")
        self.causes[reason, file, line] = Cause(reason, stage, file, line, source, hint)

    def to_dict(self) -> dict[str, Any]:
        """Return the counts of the mode as plain JSON data; see ``modes`` of `ComponentStatus`."""
        eager_graphs = sum(count for info, count in self.graphs.items() if info.running == "none")
        counts: dict[str, Any] = {
            "calls": self.calls,
            "frames_compiled": self.executed - eager_graphs,
            "frames_eager": eager_graphs + self.eager_calls,
            "compiles": self.compiles,
            "recompiles": self.recompiles,
            "calls_per_step": self.per_step.to_dict(),
        }
        if self.shapes:  # which are counted under CUDA graphs only
            counts["calls_in_backward"] = self.in_backward
            counts["shapes"] = dict(self.shapes)
        return counts


class Call:
    """One call of a component, and what its tally held when the call began."""

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._executed, self._failed = tally.executed, len(tally.failures)

    def compiles(self) -> None:
        """Learn that dynamo is about to trace a frame in the call."""

    def breaks(self) -> None:
        """Learn of a graph break in the call."""

    def reached_graph(self) -> bool:
        """Return whether a graph has run in the call."""
        return self.tally.executed != self._executed

    def failures(self) -> list[ev.FrameEager]:
        """Return what tracing gave up in the call."""
        return self.tally.failures[self._failed :]


NOBODY = Tally("", "")


class _Active(threading.local):
    """Whose compiled code runs in this thread, and the settings of a compile that is going on in it."""

    tally: Tally = NOBODY
    call: Call = Call(NOBODY)
    window: Any = None


active = _Active()
