"""Turns torch's callbacks and metrics into events: for the component that compiled, the watchers and the log."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop._torch import dynamo
from hotloop._torch.ledger import CapabilityMissingError
from hotloop._torch.settings import CompileWindow
from hotloop._torch.versions import check
from hotloop.compiling.observe import explain
from hotloop.compiling.observe.ledger import NOBODY, Tally, active
from hotloop.compiling.observe.watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("hotloop")


class Collector:
    """The one listener on dynamo in this process. It costs two comparisons a call while nothing compiles."""

    _KEPT_OWNERS = 256
    """Frames whose owner is remembered until torch's metric of them comes."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reader: dynamo.Reader | None = None
        self._callbacks = dynamo.Callbacks(self._started, self._ended)
        self.listens = self._callbacks.installed
        """Returns whether dynamo still calls us: ``torch.compiler.reset`` removes our callbacks."""
        self._watchers: list[list[ev.Event]] = []
        self._owners: collections.OrderedDict[str, Tally] = collections.OrderedDict()
        self._dirty = False
        self._frames = 0
        self.since: float | None = None
        """The `time.monotonic` at which the compile now in progress began, from any thread; None otherwise."""
        self.missing: str | None = None
        """Why this torch cannot be listened to; None where it can."""
        self._watchdog = Watchdog()

    def install(self) -> None:
        """Listen to dynamo from now on; where this torch cannot be listened to, `missing` says why."""
        with self._lock:
            if self.missing is not None:
                return
            try:
                if self._reader is None:
                    self._reader = dynamo.Reader()
                    self._frames = self._reader.frames()
                elif not self.listens():  # what happened while nobody listened is no component's
                    self._owners.clear()  # a reset numbers its compiles anew
                    previous, active.tally = active.tally, NOBODY
                    self.poll(force=True)
                    active.tally = previous
                self._callbacks.install()
            except CapabilityMissingError as error:
                self.missing = str(error)
                _log.warning("hotloop cannot observe this torch: %s", error)

    def _started(self, frame: str, of_a_frame: bool) -> None:
        self.since = time.monotonic()
        self.poll(force=True)  # torch keeps its last 64 metrics only
        self._dirty = True
        self._owners[frame] = active.tally
        while len(self._owners) > self._KEPT_OWNERS:
            self._owners.popitem(last=False)
        if active.tally is NOBODY:
            return
        if of_a_frame:
            active.call.compiles()
        if active.window is not None:  # of the component around this one, which may have asked for other settings
            active.window.close()
        unguarded_requires_grad = check() == (2, 11)  # that torch does not guard it by itself
        active.window = CompileWindow(suppress=active.tally.suppress, guard_requires_grad=unguarded_requires_grad)
        active.window.open()
        self._watchdog.start()

    def _ended(self) -> None:
        self._watchdog.stop()
        self.since = None
        self._dirty = True
        self._read_breaks()  # here, in the thread that compiled: a graph break does not name its component

    def hung(self) -> str:
        """Return which compiler hung since this was last asked; empty where none did."""
        return self._watchdog.news()

    def due(self) -> bool:
        """Return whether there may be something to read: after a compile, or when a frame was refused one."""
        return self._dirty or (self._reader is not None and self._reader.frames() != self._frames)

    def poll(self, *, force: bool = False) -> None:
        """Read what is new, and hand it on as events."""
        if self._reader is None or not (force or self.due()):
            return
        with self._lock:
            self._dirty = self.since is not None
            self._frames = self._reader.frames()
            self._read_breaks()
            for metric in self._reader.metrics():
                owner = self._owners.get(metric.frame, active.tally)
                for event in explain.metric_events(metric, owner.component or None):
                    self.emit(event, owner)

    def _read_breaks(self) -> None:
        with self._lock:
            for entry in self._reader.breaks() if self._reader is not None else ():
                active.call.breaks()
                self.emit(explain.break_event(entry, active.tally.component or None), active.tally)

    def emit(self, event: ev.Event, tally: Tally | None = None) -> None:
        """Hand an event to its component (the active one by default), the watchers and (once a reason) the log."""
        owner = active.tally if tally is None else tally
        if owner is not NOBODY:
            owner.note(event)
        with self._lock:
            for watcher in self._watchers:
                watcher.append(event)
        # A failed run is raised instead. A function that tracing gave up is logged when its call ends, as the cause may
        # be the user's own error.
        waits = isinstance(event, ev.FrameEager) and owner is active.tally is not NOBODY
        if not waits and not isinstance(event, ev.RunFailed):
            self.say(event, owner)

    def say(self, event: ev.Event, tally: Tally) -> None:
        """Put an event on the log, each reason once a component."""
        line = explain.log_line(event)
        key = explain.log_key(event)
        if line and key not in tally.said:
            tally.said.add(key)
            # Graph breaks cost speed and are common, so they are no warnings.
            _log.log(logging.INFO if isinstance(event, ev.GraphBreak) else logging.WARNING, "%s", line)

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[ev.Event]]:
        """See `watch`."""
        self.install()
        self.poll(force=True)
        seen: list[ev.Event] = []
        with self._lock:
            self._watchers.append(seen)
        try:
            yield seen
        finally:
            self.poll(force=True)
            with self._lock:
                self._watchers = [watcher for watcher in self._watchers if watcher is not seen]


collector = Collector()


def watch() -> contextlib.AbstractContextManager[list[ev.Event]]:
    """Collect everything that is observed in this process while the block runs, as a list of typed events.

    The list grows as things happen: at the end of a compiled component's call, at an optimizer step, and at the end of
    the block. It covers code compiled by ``torch.compile`` without hotloop as well; there ``component`` is None.
    """
    return collector.watch()


def compiling_since() -> float | None:
    """Return the `time.monotonic` at which the compile now in progress in this process began; None without one."""
    return collector.since
