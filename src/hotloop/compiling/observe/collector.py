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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("hotloop")
_UNGUARDED_REQUIRES_GRAD = (2, 11)
_KEPT_OWNERS = 256


class Collector:
    """The one listener on dynamo in this process. It costs two comparisons a call while nothing compiles."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._reader: dynamo.Reader | None = None
        self._callbacks = dynamo.Callbacks(self._started, self._ended)
        self.listens = self._callbacks.installed
        """Tells whether dynamo still calls us: ``torch.compiler.reset`` takes our callbacks off."""
        self._watchers: list[list[ev.Event]] = []
        self._owners: collections.OrderedDict[str, Tally] = collections.OrderedDict()
        self._dirty = False
        self._frames = 0
        self._since: float | None = None
        self.missing: str | None = None
        self.ask: Callable[[], str] = str
        """Asked before a component's code is compiled: gives nothing, or why that has to wait for a later call."""
        self.tell: Callable[[], object] = str
        """Told when a compile is over."""

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

    def compiling_since(self) -> float | None:
        """Give the `time.monotonic` at which the compile now in progress began, from any thread; None otherwise."""
        return self._since

    def _started(self, frame: str, of_a_frame: bool) -> None:
        self._since = time.monotonic()
        self.poll(force=True)  # torch keeps its last 64 metrics only
        if of_a_frame and active.tally is not NOBODY:
            hindered = active.tally.hindered()
            active.put_off = active.put_off or hindered or ("" if active.skips_rendezvous else self.ask())
            if hindered and active.tally.executed == active.executed:  # else each function in the call is tried
                raise dynamo.leave_call(hindered)
            if active.put_off:
                raise dynamo.put_off(active.put_off)
        self._dirty = True
        self._owners[frame] = active.tally
        while len(self._owners) > _KEPT_OWNERS:
            self._owners.popitem(last=False)
        if active.tally is NOBODY:
            return
        if active.window is not None:  # of the component around this one, which may have asked for something else
            active.window.close()
        active.window = CompileWindow(
            suppress=active.tally.suppress, guard_requires_grad=check() == _UNGUARDED_REQUIRES_GRAD
        )
        active.window.open()

    def _ended(self) -> None:
        self._since = None
        self._dirty = True
        self.tell()
        self._read_breaks()  # here, in the thread that compiled: a graph break does not tell whose it is

    def due(self) -> bool:
        """Tell whether there may be something to read: after a compile, or when a frame was refused one."""
        return self._dirty or (self._reader is not None and self._reader.frames() != self._frames)

    def poll(self, *, force: bool = False) -> list[ev.Event]:
        """Read what is new, hand it on, and give it back."""
        if self._reader is None or not (force or self.due()):
            return []
        with self._lock:
            self._dirty = self._since is not None
            self._frames = self._reader.frames()
            found = self._read_breaks()
            for metric in self._reader.metrics():
                owner = self._owners.get(metric.frame, active.tally)
                events = explain.metric_events(metric, owner.component or None)
                for event in events:
                    self.emit(event, owner)
                found += events
            return found

    def _read_breaks(self) -> list[ev.Event]:
        found: list[ev.Event] = []
        with self._lock:
            for entry in self._reader.breaks() if self._reader is not None else ():
                event = explain.break_event(entry, active.tally.component or None)
                self.emit(event, active.tally)
                found.append(event)
        return found

    def emit(self, event: ev.Event, tally: Tally | None = None) -> None:
        """Hand an event to its component (the active one by default), the watchers and (once a reason) the log."""
        owner = active.tally if tally is None else tally
        if owner is not NOBODY:
            owner.note(event)
        with self._lock:
            for watcher in self._watchers:
                watcher.append(event)
        if not (isinstance(event, ev.FrameEager) and owner is active.tally is not NOBODY):
            self.say(
                event, owner
            )  # a function that was given up is told when its call ends: it may be the user's error

    def say(self, event: ev.Event, tally: Tally) -> None:
        """Put an event on the log, each reason once a component."""
        line = explain.log_line(event)
        key = explain.log_key(event)
        if line and key not in tally.said:
            tally.said.add(key)
            _log.log(explain.log_level(event), "%s", line)

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
    """Give the `time.monotonic` at which a compile now in progress in this process began, or None; from any thread."""
    return collector.compiling_since()
