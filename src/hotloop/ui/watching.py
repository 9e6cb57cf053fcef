"""Runs as pages show them, read again only where their files have changed; it can be dropped at any time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.errors import RecordError
from hotloop.report import build, folds, runs, study
from hotloop.report.series import Line, Steps
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
MEMBERS = 200
"""Folds or trials that a page lists at most: the last."""
SHARE = 0.006
"""Share of a core that showing a run may take while it trains: the longer its record, the rarer its page is renewed."""
REQUEST_SECONDS = 0.0025
"""Of the processor to answer one request of a page that is followed, beside what is rendered for it: on busy cores."""
LEAST_SECONDS = 2.0
LOOK_SECONDS = 5.0
"""How rarely a run is asked for whether it ended, however rarely its page is renewed."""
WHOLE_SECONDS = 5.0
"""For searches and cross-validations, which change more slowly and have many files."""


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
        return self.process is not None or self.status in ("running", runs.ON_CLUSTER)

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
        self._members: dict[Path, tuple[float, tuple[list[tuple[Path, Shown]], int]]] = {}
        self._ended = 0

    def run(self, path: Path) -> Shown:
        """Return a run with its view."""
        entry = self._entry(path)
        with entry.lock:
            process, began = processes.find(path), time.monotonic()
            asked = (processes.asked_to_stop(path, process), _asked(path, process))
            gone = entry.shown is not None and record.was_killed(entry.shown.row.writer)
            seen, known = (signature(path), process, gone), (process, asked, gone)
            # However many watch a run, it is looked at no more often than it should be, unless somebody acts on it.
            waits = entry.shown is not None and entry.known == known and began - entry.made < entry.shown.pause
            if entry.shown is None or (entry.seen != seen and not waits):
                spent = time.thread_time()
                shown = _shown(path, process, entry.follower)
                took, serial = time.thread_time() - spent, next(_serials)
                entry.shown = dataclasses.replace(shown, seconds=took, serial=serial, asked=asked[1])
                gone = record.was_killed(shown.row.writer)
                entry.seen, entry.known, entry.made = (*seen[:2], gone), (*known[:2], gone), time.monotonic()
            return entry.shown

    def elapsed(self, path: Path) -> Line:
        """Return how many seconds training had taken at the end of each step of a run, thinned."""
        entry = self._entry(path)
        with entry.lock, contextlib.suppress(RecordError):  # one that cannot be read is said in its row
            steps = Steps.read(entry.follower.look()["steps"])
            took = steps.line("seconds", "")
            return Line("", took.steps, tuple(itertools.accumulate(took.values))).thinned()
        return Line("", (), ())

    def members(self, path: Path) -> tuple[list[tuple[Path, Shown]], int]:
        """Return the last folds or trials of a run, as lists show them, and how many are left out.

        However many watch, they are looked at no more often than the page of a search is.
        """
        made, found = self._members.get(path, (-WHOLE_SECONDS, ([], 0)))
        if time.monotonic() - made >= WHOLE_SECONDS:
            folders = runs.member_folders(path)
            found = [(one, self.row(one)) for one in folders[-MEMBERS:]], max(0, len(folders) - MEMBERS)
            self._members[path] = (time.monotonic(), found)
        return found

    def _entry(self, path: Path) -> _Entry:
        with self._lock:
            entry = self._entries.pop(path, None) or _Entry(path)
            self._entries[path] = entry
            while len(self._entries) > KEPT:
                self._entries.popitem(last=False)
        return entry

    @property
    def list_pause(self) -> float:
        """How many seconds should pass before the list is looked at again."""
        pauses = [one.pause for _, one in list(self._rows.values()) if one.process is not None]
        return min(LOOK_SECONDS, max([LEAST_SECONDS, *pauses]))

    def row(self, path: Path) -> Shown:
        """Return a run without its view: what lists show."""
        process, known = processes.find(path), self._rows.get(path)
        # `run` knows itself how fresh a run is that something works in.
        seen = None if process else (signature(path), known is not None and record.was_killed(known[1].row.writer))
        if known is None or seen is None or known[0] != seen:
            shown = self.run(path) if process else _judged(path, process, runs.read(path), None, {})
            self._ended += known is not None and known[1].process is not None and shown.process is None
            known = self._rows[path] = (seen, dataclasses.replace(shown, view=None))
        return known[1]

    def working(self) -> tuple[int, list[int], int]:
        """Return what tells of runs whose end changes no file.

        How many rows ended, the serials of those that something works in, and how many processes of records are gone.
        """
        rows = list(self._rows.items())
        serials = [self.row(path).serial for path, (_, one) in rows if one.process is not None]
        return self._ended, serials, sum(record.was_killed(one.row.writer) for _, (_, one) in rows)


def _asked(path: Path, process: processes.Process | None) -> dict[str, bool]:
    return {requests.SAVE: requests.is_asked(path)} if _asks(process) else {}


def _asks(process: processes.Process | None) -> bool:
    """Return whether a process can be asked through its folder: not where that is on another machine."""
    return process is not None and process.here


def _shown(path: Path, process: processes.Process | None, follower: record.Follower) -> Shown:
    kind = runs.kind_of(path)
    view: View | FoldsView | StudyView | None = None
    document: Mapping[str, Any] = {}
    try:
        if kind == runs.FOLDS:
            document = folds.load(path)
            view = folds.build(document)
        elif kind == runs.SEARCH:
            document = study.SCHEMA.load(path)
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
        ended = row.kind == runs.RUN and row.status not in ("running", runs.ON_CLUSTER)
        before = ended and process.here and document.get("pid") != process.pid
        status = "stopping" if asked else "running" if begun and not before else "starting"
        row = row if begun else dataclasses.replace(row, problem="")  # that nothing is written yet is no fault
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
