"""A trial on a cluster: this worker chose its values and hears its reports, and a process on some node trains.

That process is ``python -m hotloop.train.search.away``. The study's storage stays here: nobody else reaches it.
"""

from __future__ import annotations

import importlib
import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import errors
from hotloop.errors import ConfigError, RunPrunedError, StepLostError
from hotloop.train import configure, mirror, run_storage
from hotloop.train.child import DONE, INTERRUPTED, REPLACE, Parent, WorkerLostError
from hotloop.train.cluster import Cluster, RemoteChild
from hotloop.train.interrupt import wished
from hotloop.train.mirror import StorageError
from hotloop.train.search import trial as trials
from hotloop.train.search.study import OUTCOME, Outcome, write_outcome

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.train.mirror import Mirror
    from hotloop.train.search.trial import Asked
    from hotloop.train.settings import Settings

_log = logging.getLogger("hotloop")


class Away:
    """An objective that runs on a cluster, in one process for trial after trial.

    Args:
        cluster: that this process is connected to.
        objective: ``module:function`` that runs a trial there.
        log: has what is printed there.
    """

    def __init__(self, cluster: Cluster, objective: str, log: Path) -> None:
        self.cluster, self.objective, self.log = cluster, objective, log
        self.child: RemoteChild | None = None

    def __call__(self, asked: Asked) -> Sequence[float]:
        """Run a trial and return its objectives.

        Raises:
            WorkerLostError: its process or its node is lost, or has died.
            KeyboardInterrupt: somebody interrupted, here.
        """
        child = self.child = self.child or RemoteChild(self.cluster, "hotloop.train.search.away", self.log)
        stored = _stored(asked.settings, asked.folder)
        try:
            if stored:  # what is there is of another study, or of one whose storage is gone
                stored.remove()
            child.send(_job(asked, self.objective))
            ended = self._heard(child, asked)
        except WorkerLostError:
            self._end()
            raise
        except StorageError as error:
            raise ConfigError(f"{mirror.SETTING}: {error}") from error
        if ended is None:
            raise WorkerLostError(f"its process on the cluster died ({self._end()})")
        mirror.bring(stored, _log.warning)  # the trial's values are known, and worth no failure
        return self._values(asked, ended)

    def _heard(self, child: RemoteChild, asked: Asked) -> dict[str, Any] | None:
        """Answer a trial's reports until it has ended, and say how; None where its process has died.

        Raises:
            KeyboardInterrupt: an interrupt came before the trial had a node, came twice, or ended its process.
        """
        owed = stopping = False
        while True:
            try:
                what = child.hear()
                if what is None and stopping:
                    raise KeyboardInterrupt  # noqa: TRY301 - it was asked to stop, before it could answer
                if what is None or "report" not in what:
                    return what
                owed = True
                child.send({"pruned": _judged(asked, *what["report"])})
                owed = False
            except WorkerLostError:
                if stopping:
                    raise KeyboardInterrupt from None
                raise
            except KeyboardInterrupt:
                if stopping or child.waits:
                    raise
                stopping = True  # the trial finishes its step, as one does that runs here
                asked.stop()  # the trial may end by itself before it hears of this
                child.interrupt()
                if owed:
                    child.send({"pruned": None})
                owed = False

    def _values(self, asked: Asked, ended: Mapping[str, Any]) -> Sequence[float]:
        """Return what a trial came to, or raise what ended it."""
        if ended.get("stop"):
            asked.stop()
        if "values" in ended:
            values: list[float] = ended["values"]
            return values
        kind, text = ended["kind"], ended["text"]
        if kind in ("KeyboardInterrupt", "StepLostError"):
            self._end()
        if kind == "KeyboardInterrupt":
            raise KeyboardInterrupt
        if ended.get("number") is not None:
            raise OSError(ended["number"], text)
        known = getattr(errors, kind, None)
        raise known(text) if known else type(kind, (RuntimeError,), {})(text)

    def _end(self) -> str:
        assert self.child is not None
        how = self.child.end()
        self.child = None
        return how


def _judged(asked: Asked, step: int, value: float) -> str | None:
    """Write a report down, and say why the trial is not worth going on with; None where it is."""
    try:
        asked.report(step, value)
    except RunPrunedError as error:
        return str(error)
    return None


def _job(asked: Asked, objective: str) -> dict[str, Any]:
    return {
        "objective": objective,
        "number": asked.number,
        "settings": configure.to_dict(asked.settings),
        "values": dict(asked.values),
        "folder": str(asked.folder),
        "runs": asked.runs,
        "best": asked.best,
    }


def _stored(settings: Settings, folder: Path) -> Mirror | None:
    """Return the mirror of a trial's folder; None where all nodes share it."""
    return mirror.of(settings.run.storage, folder, Path(settings.hpo.folder))


def _push(stored: Mirror) -> None:
    try:
        stored.add(OUTCOME)
    except StorageError as error:  # whoever asked hears of the values, which are worth no failure
        _log.warning("%s", error)


def main() -> int:
    """Run trials until there is none left, and give the process's exit code."""
    parent, first = Parent(), True
    try:
        while (job := parent.hear()) is not None:
            _run(job, parent)
            trials.give_memory_back(first=first)
            first = False
    except KeyboardInterrupt:
        return INTERRUPTED
    except StepLostError:
        return REPLACE
    return DONE


def _run(job: Mapping[str, Any], parent: Parent) -> None:
    """Run a trial, and tell how it ended; with a storage in a folder of this node's own, which is kept there."""
    settings, folder = configure.from_dict(job["settings"]), Path(job["folder"])
    stored = _stored(settings, folder)
    if stored is None:
        _run_in(folder, settings, job, parent, None)
        return
    with tempfile.TemporaryDirectory(prefix="hotloop-") as here:
        study = Path(here, folder.parents[1].name)
        folder = stored.folder = study / "trials" / folder.name
        settings = trials.changed(settings, {"run.folder": str(folder), "hpo.folder": str(study)})
        _run_in(folder, settings, job, parent, stored)


def _run_in(folder: Path, settings: Settings, job: Mapping[str, Any], parent: Parent, stored: Mirror | None) -> None:
    module, _, function = job["objective"].partition(":")
    stop: list[bool] = []

    def report(step: int, value: float) -> None:
        parent.tell(report=[step, value])
        answer = parent.hear() or {}
        if answer.get("pruned"):
            raise RunPrunedError(answer["pruned"])

    try:
        run_storage.check(settings.run.storage)
        asked = trials.Asked(
            number=job["number"],
            settings=settings,
            values=job["values"],
            folder=folder,
            report=report,
            runs=job["runs"],
            best=job["best"],
            stop=lambda: stop.append(True),
        )
        made = getattr(importlib.import_module(module), function)(asked)
    except KeyboardInterrupt:
        parent.tell(kind="KeyboardInterrupt", text="")
        raise
    except Exception as error:  # what a trial dies of is its cause, and told
        alone = getattr(error, "alone", None) or str(error)
        parent.tell(kind=type(error).__name__, text=alone, number=getattr(error, "errno", None), stop=wished(error))
        if isinstance(error, StepLostError):
            raise
        return
    values = [float(one) for one in ([made] if isinstance(made, int | float) else made)]
    if all(map(math.isfinite, values)):  # found by the command that goes on, if whoever asked is dead
        write_outcome(folder, Outcome("complete", values[0], also=values[1:]))
    if stored:
        _push(stored)
    parent.tell(values=values, stop=bool(stop))


if __name__ == "__main__":
    sys.exit(main())
