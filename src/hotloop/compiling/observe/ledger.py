"""The ledger: what ran compiled and what ran eager, for each component and mode, and why.

Compiled code is shared between components whose code and settings are equal, so a count kept in the code would land on
whichever came first. A component's entry therefore puts its tally into `active`, and each graph counts there.
"""

from __future__ import annotations

import collections
import dataclasses
import linecache
import threading
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.diagnose.recompile_words import words_of

if TYPE_CHECKING:
    from collections.abc import Callable

_KEPT_EVENTS = 1024


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why something is not what was asked for."""

    reason: str
    stage: str
    file: str | None
    line: int | None
    source: str
    hint: str

    def to_dict(self) -> dict[str, Any]:
        """Give the cause as plain JSON data."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, eq=False)
class GraphInfo:
    """One compiled graph: the preset it was meant for, the rung it runs on, and what part of the component it is."""

    requested: str
    running: str
    region: str
    fallback: ev.Fallback | None = None


class Pace:
    """How often something was called between two boundaries, which are optimizer steps or marked steps."""

    __slots__ = ("_before", "_boundary", "counts")

    def __init__(self) -> None:
        self.counts: collections.Counter[int] = collections.Counter()
        self._before = 0
        self._boundary = 0

    def boundary(self, calls: int) -> None:
        """A boundary is passed, after so many calls in all; intervals without a call are not counted."""
        if calls != self._before:
            self.counts[calls - self._before] += 1
            self._before = calls

    def at(self, number: int, calls: int) -> None:
        """Boundaries have numbers: one was passed where it is another than the last time."""
        if number != self._boundary:
            self._boundary = number
            self.boundary(calls)


class Tally:
    """The account of one component in one mode (``training`` or ``inference``)."""

    __slots__ = (
        "cache_hits",
        "cache_misses",
        "calls",
        "causes",
        "compile_seconds",
        "compiles",
        "component",
        "copied",
        "copied_bytes",
        "cudagraphs_skipped",
        "eager_calls",
        "events",
        "executed",
        "failures",
        "graph_breaks",
        "graphs",
        "healed_calls",
        "hindered",
        "in_backward",
        "ladder",
        "limited",
        "mode",
        "per_mark",
        "per_step",
        "recompiled",
        "recompiles",
        "said",
        "shapes",
        "suppress",
    )

    def __init__(self, component: str, mode: str, *, ladder: Any = None, suppress: bool = True) -> None:
        self.component = component
        self.mode = mode
        self.ladder = ladder
        self.suppress = suppress
        self.executed = 0
        self.said: set[tuple[str, ...]] = set()
        self.calls = 0
        self.eager_calls = 0
        self.healed_calls = 0
        self.graphs: collections.defaultdict[GraphInfo, int] = collections.defaultdict(int)
        self.per_step, self.per_mark = Pace(), Pace()
        self.shapes: collections.Counter[str] = collections.Counter()
        self.hindered: Callable[[], str] = str
        """Gives nothing, or why no code is to be compiled any more."""
        self.in_backward = 0
        self.copied = self.copied_bytes = 0
        self.cudagraphs_skipped: collections.Counter[str] = collections.Counter()
        self.compiles = self.recompiles = self.graph_breaks = 0
        self.cache_hits = self.cache_misses = 0
        self.compile_seconds = 0.0
        self.limited: list[ev.RecompileLimit] = []
        self.failures: list[ev.FrameEager] = []
        self.causes: dict[tuple[str, str | None, int | None], Cause] = {}
        self.recompiled: dict[tuple[str, str | None, int | None], Cause] = {}
        self.events: collections.deque[ev.Event] = collections.deque(maxlen=_KEPT_EVENTS)

    def note(self, event: ev.Event) -> None:
        """Enter an event into the account."""
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
            place = event.function, event.file, event.line
            what, change = words_of(event)
            self.recompiled[place] = Cause(what, event.kind, event.file, event.line, event.source, change)
        elif isinstance(event, ev.GraphBreak):
            # One place breaks once in the component's entry, and again in the function that holds it.
            self.graph_breaks += (event.reason, event.file, event.line) not in self.causes
        elif isinstance(event, ev.RecompileLimit):
            if all(event.function != known.function for known in self.limited):  # fullgraph hits it at every call
                self.limited.append(event)
        elif isinstance(event, ev.FrameEager):
            self.failures.append(event)
        if not isinstance(event, ev.Compiled | ev.Recompiled):
            self._explain(event)

    def _explain(self, event: ev.Event) -> None:
        reason = getattr(event, "reason", "") or getattr(event, "missing", "")
        file, line = getattr(event, "file", None), getattr(event, "line", None)
        source = getattr(event, "source", "") or (linecache.getline(file, line).strip() if file and line else "")
        if isinstance(event, ev.RunFailed):
            stage, hint = "run", event.remedy
        else:
            stage, hint = str(getattr(event, "stage", event.kind)), getattr(event, "hint", "")
        self.causes[reason, file, line] = Cause(reason, stage, file, line, source, hint)

    def heal_limit(self) -> None:
        """The recompile limit was others' doing, and this component now has code of its own: only the count stays."""
        for event in self.limited:
            self.causes.pop((event.reason, event.file, event.line), None)
        self.limited.clear()
        self.healed_calls += 1

    def forget_failures(self, since: int) -> list[ev.FrameEager]:
        """Strike out the failures from the given number on, which turned out to be the user's own exception."""
        struck = self.failures[since:]
        del self.failures[since:]
        for event in struck:
            self.causes.pop((event.reason, event.file, event.line), None)
            if event in self.events:  # it keeps the newest only
                self.events.remove(event)
        return struck


NOBODY = Tally("", "")


class _Active(threading.local):
    """Whose compiled code runs in this thread, and the settings of a compile that is going on in it."""

    tally: Tally = NOBODY
    window: Any = None
    put_off: str = ""
    """Why nothing is compiled in the call that is going on."""
    executed: int = 0
    """Graphs that its component had run when the call began."""
    unasked: bool = False
    """Whether it compiles without asking other processes: code of the user's own that is compiled with fullgraph would
    raise out of the middle of the call, which could not be run again then."""


active = _Active()
