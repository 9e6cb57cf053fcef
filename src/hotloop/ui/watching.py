"""Runs as pages show them, read again only where their files have changed; it can be dropped at any time."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.errors import RecordError
from hotloop.report import build, folds, runs, study
from hotloop.report.text import line, number, seconds
from hotloop.train import requests
from hotloop.ui import processes
from hotloop.ui.places import signature

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from hotloop.report import View
    from hotloop.report.folds import FoldsView
    from hotloop.report.study import StudyView

KEPT = 8
"""Runs whose documents are kept in memory, which can be a hundred megabytes each."""
MEMBERS = 200
"""Folds or trials that a page lists at most: the last."""
_RECENT = 50
"""Steps by which it is judged how long the rest will take."""


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
        saves: whether the process was asked for a checkpoint; None where it cannot be asked.
        compiles: graphs that it has compiled so far, and the seconds for them.
        serial: another number for each look at it.
    """

    row: runs.Row
    view: View | FoldsView | StudyView | None
    status: str
    process: processes.Process | None
    done: float | None = None
    left: str = ""
    saved: str = ""
    saves: bool | None = None
    compiles: tuple[int, float] = (0, 0.0)
    serial: int = dataclasses.field(default_factory=itertools.count(1).__next__)

    @property
    def runs_now(self) -> bool:
        """Whether something works in the folder, or its record says so of another machine."""
        return self.process is not None or self.status in ("running", runs.ON_CLUSTER)


class _Entry:
    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self.follower = record.Follower(path)
        self.seen: object = None
        self.shown: Shown | None = None


class Watching:
    """What is known of runs; several threads may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Path, _Entry] = OrderedDict()
        self._rows: dict[Path, tuple[object, Shown]] = {}

    def run(self, path: Path) -> Shown:
        """Return a run with its view."""
        with self._lock:
            entry = self._entries.pop(path, None) or _Entry(path)
            self._entries[path] = entry
            while len(self._entries) > KEPT:
                self._entries.popitem(last=False)
        with entry.lock:
            process = processes.find(path)
            gone = entry.shown is not None and record.was_killed(entry.shown.row.writer)
            seen = (signature(path), process, gone)
            if entry.shown is None or entry.seen != seen:
                entry.seen, entry.shown = seen, _shown(path, process, entry.follower)
            return entry.shown

    def row(self, path: Path) -> Shown:
        """Return a run without its view: what lists show."""
        process, known = processes.find(path), self._rows.get(path)
        if process is not None:
            return self.run(path)
        seen = (signature(path), known is not None and record.was_killed(known[1].row.writer))
        if known is None or known[0] != seen:
            known = self._rows[path] = (seen, _judged(path, None, runs.read(path), None, {}))
        return known[1]

    def members(self, path: Path) -> tuple[list[tuple[Path, Shown]], int]:
        """Return the last folds or trials of a run, as lists show them, and how many are left out."""
        folders = runs.member_folders(path)
        return [(one, self.row(one)) for one in folders[-MEMBERS:]], max(0, len(folders) - MEMBERS)


def _shown(path: Path, process: processes.Process | None, follower: record.Follower) -> Shown:
    kind = runs.kind_of(path)
    view: View | FoldsView | StudyView | None = None
    document: Mapping[str, Any] = {}
    try:
        if kind == runs.FOLDS:
            view = folds.build(folds.load(path))
        elif kind == runs.SEARCH:
            view = study.build(study.SCHEMA.load(path))
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
    saved = number(row.figures.get("seconds_saved")) or number(document.get("measurements", {}).get("seconds_saved"))
    shown = Shown(row, view, row.status, process, saved=seconds(saved) if saved else "")
    begun = row.status not in ("unreadable", "unknown")
    if process is None:
        shown.status = row.status if begun else "not started"
        if row.kind == runs.UNKNOWN:
            shown.row = dataclasses.replace(row, problem="")
        return shown
    # A run that goes on shows how it ended before, until its new process writes.
    ended = row.kind == runs.RUN and row.status not in ("running", runs.ON_CLUSTER)
    before = ended and document.get("pid") != process.pid
    asked = processes.asked_to_stop(path, process)
    shown.status = "stopping" if asked else "running" if begun and not before else "starting"
    shown.saves = requests.is_asked(path)
    if not begun:  # that nothing is written yet is no fault
        shown.row = dataclasses.replace(row, problem="")
    if document:
        shown.done, shown.left = _progress(document)
        took = [number(one.get("seconds")) or 0.0 for one in document["events"] if one.get("kind") == "compiled"]
        shown.compiles = (len(took), sum(took))
    return shown


def _progress(document: Mapping[str, Any]) -> tuple[float | None, str]:
    """Return the share of the steps that are done, and how long the rest will take by the last steps."""
    total, steps = number(document["measurements"].get("steps_total")), document["steps"]
    done = number(steps[-1].get("step")) if steps else 0.0
    if not total or done is None:
        return None, ""
    took = [number(one.get("seconds")) or 0.0 for one in steps[-_RECENT:]]
    return min(1.0, done / total), seconds((total - done) * sum(took) / len(took)) if took else ""
