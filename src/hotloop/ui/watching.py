"""Runs as pages show them, read again only where their files have changed; it can be dropped at any time."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.errors import RecordError
from hotloop.report import build, folds, runs, study
from hotloop.report.text import line, number, seconds
from hotloop.train import requests
from hotloop.ui import compiles, processes
from hotloop.ui.places import signature

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hotloop.report import View
    from hotloop.report.folds import FoldsView
    from hotloop.report.study import StudyView
    from hotloop.ui.compiles import Compiles

KEPT = 8
"""Runs whose documents are kept in memory, which can be a hundred megabytes each."""
SHARE = 0.04
"""Share of a core that showing a run may take while it trains: the longer its record, the rarer its page is renewed."""
LEAST_SECONDS = 2.0
WHOLE_SECONDS = 5.0
"""For searches and cross-validations, whose pages are loaded as a whole."""


@dataclasses.dataclass
class Shown:
    """A run at one moment.

    Args:
        row: as in lists.
        view: what its report shows; None while there is none.
        status: the row's, or ``starting`` (its process has written nothing yet), ``stopping`` or ``not started`` (it
            ended before it had a record).
        process: what works in its folder now.
        done: the share of the steps that are done; None where it is not known.
        left: how long the rest will take, in words; empty where it is not known.
        saved: how many seconds the hot loop has saved, in words.
        seconds: of the processor to make this, and the parts of its page.
        serial: another number for each look at it.
        asked: what the process answers after a step, and whether it was asked for that already.
        compiles: of the process, so far; None where none runs.
        parts: what was rendered of it, by name: the same for whoever watches it.
    """

    row: runs.Row
    view: View | FoldsView | StudyView | None
    status: str
    process: processes.Process | None
    done: float | None = None
    left: str = ""
    saved: str = ""
    seconds: float = 0.0
    serial: int = 0
    asked: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    compiles: Compiles | None = None
    parts: dict[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def runs_now(self) -> bool:
        """Whether something works in the folder, or its record says so of another machine."""
        return self.process is not None or self.status == "running"

    @property
    def pause(self) -> float:
        """How many seconds should pass before it is looked at again."""
        return max(LEAST_SECONDS if self.row.kind == runs.RUN else WHOLE_SECONDS, self.seconds / SHARE)


_serials = itertools.count(1)


class _Entry:
    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.follower = record.Follower(path)
        self.seen: tuple[Any, ...] = ()
        self.known: tuple[Any, ...] = ()
        self.made = 0.0
        self.shown: Shown | None = None


class Watching:
    """What is known of runs; several threads may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Path, _Entry] = OrderedDict()
        self._rows: dict[Path, tuple[Any, Shown]] = {}
        self._ended = 0

    def run(self, path: Path) -> Shown:
        """Return a run with its view."""
        with self._lock:
            entry = self._entries.pop(path, None) or _Entry(path)
            self._entries[path] = entry
            while len(self._entries) > KEPT:
                self._entries.popitem(last=False)
        with entry.lock:
            process, began = processes.find(path), time.monotonic()
            asked = (processes.asked_to_stop(path, process), _asked(path, process))
            seen, known = (signature(path), process), (process, asked)
            # However many watch a run, it is looked at no more often than it should be, unless somebody acts on it.
            waits = entry.shown is not None and entry.known == known and began - entry.made < entry.shown.pause
            if entry.shown is None or (entry.seen != seen and not waits):
                spent = time.thread_time()
                shown = _shown(path, process, entry.follower)
                took, serial = time.thread_time() - spent, next(_serials)
                entry.shown = dataclasses.replace(shown, seconds=took, serial=serial, asked=asked[1])
                entry.seen, entry.known, entry.made = seen, known, time.monotonic()
            return entry.shown

    @property
    def list_pause(self) -> float:
        """How many seconds should pass before the list is looked at again."""
        return max([LEAST_SECONDS, *(one.pause for _, one in list(self._rows.values()) if one.process is not None)])

    def row(self, path: Path) -> Shown:
        """Return a run without its view: what lists show."""
        process = processes.find(path)
        seen = None if process else signature(path)  # `run` knows itself how fresh a run is that something works in
        known = self._rows.get(path)
        if known is None or seen is None or known[0] != seen:
            shown = self.run(path) if process else _judged(path, process, runs.read(path), None, {})
            self._ended += known is not None and known[1].process is not None and shown.process is None
            known = self._rows[path] = (seen, dataclasses.replace(shown, view=None))
        return known[1]

    def working(self) -> tuple[int, list[int]]:
        """Return how many rows ended and the serials of those that something works in: an end changes no file."""
        live = [path for path, (_, one) in list(self._rows.items()) if one.process is not None]
        serials = [self.row(path).serial for path in live]
        return self._ended, serials


def _asked(path: Path, process: processes.Process | None) -> dict[str, bool]:
    return {one: requests.is_asked(path, one) for one in requests.answered_by(path)} if process else {}


def _shown(path: Path, process: processes.Process | None, follower: record.Follower) -> Shown:
    kind = runs.kind_of(path)
    view: View | FoldsView | StudyView | None = None
    document: Mapping[str, Any] = {}
    try:
        if kind == runs.FOLDS:
            document = folds.load(path)
            view = folds.build(document)
        elif kind == runs.SEARCH:
            document = study.load(path)
            view = study.build(document)
        elif kind == runs.RUN:
            document = follower.look()
            view = build(document)
    except RecordError as error:
        return _judged(path, process, runs.Row(path, kind, problem=line(str(error), 300)), None, {})
    row = runs.row(path, document) if kind == runs.RUN else runs.read(path)
    return _judged(path, process, row, view, document)


def _judged(
    path: Path, process: processes.Process | None, row: runs.Row, view: Any, document: Mapping[str, Any]
) -> Shown:
    begun = row.status not in ("unreadable", "unknown")
    if process is not None:
        asked = processes.asked_to_stop(path, process)
        # A run that goes on shows how it ended before, until its new process writes.
        before = row.kind == runs.RUN and row.status != "running" and document.get("pid") != process.pid
        status = "stopping" if asked else "running" if begun and not before else "starting"
    elif not begun:
        row = dataclasses.replace(row, problem=row.problem if row.kind != runs.UNKNOWN else "")
        status = "not started"
    else:
        status = row.status
    works = process is not None and row.kind == runs.RUN
    done, left = _progress(document) if works else (None, "")
    saved = number(row.figures.get("seconds_saved")) or number(document.get("measurements", {}).get("seconds_saved"))
    made = compiles.of(document) if works else None
    return Shown(row, view, status, process, done, left, seconds(saved) if saved else "", compiles=made)


def _progress(document: Mapping[str, Any], recent: int = 50) -> tuple[float | None, str]:
    """Return the share of the steps that are done, and how long the rest will take by the last steps."""
    total, steps = number(document["measurements"].get("steps_total")), document["steps"]
    done = number(steps[-1].get("step")) if steps else 0.0
    if not total or done is None:
        return None, ""
    took = [value for one in steps[-recent:] if (value := number(one.get("seconds"))) is not None]
    left = seconds((total - done) * sum(took) / len(took)) if took else ""
    return min(1.0, done / total), left
