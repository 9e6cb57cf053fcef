"""A search as it is started: its workers, what is printed of its trials, and what follows when a worker dies."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, SearchStoppedError, StepLostError
from hotloop.record import DOCUMENT, LINES
from hotloop.report import folds
from hotloop.train import cluster, configure, storage, workers
from hotloop.train.optional import require
from hotloop.train.search import document, preparing, space
from hotloop.train.search.preparing import prepared
from hotloop.train.search.study import Study
from hotloop.train.search.trial import Asked, changed, folds_of, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from hotloop.train.outcome import Outcome
    from hotloop.train.settings import Settings

    Say = Callable[[str], None]

DEATHS = 10
"""Workers that die one after another, with no trial finished between, after which the search stops."""
_EVERY_SECONDS = 2.0
"""How often the document is written, and what has ended is printed, while the search goes on."""
_WORKER = f"{__name__}:work"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a search ended: ``finished``, ``interrupted`` or ``out of time``; its folder and its document."""

    status: str
    folder: Path
    document: dict[str, Any]


def search(settings: Settings, say: Say, objective: str | None = None) -> Ended:
    """Run a search, or go on with it, until every trial is over.

    Args:
        settings: of the search; its study's folder and storage among them.
        say: prints a line.
        objective: ``module:function`` that runs a trial; None trains the recipe.

    Raises:
        ConfigError: settings that cannot be used, or another study's folder; nothing was started or written then.
        DataError: data that cannot be used; the same.
        SearchStoppedError: trial after trial fails, or workers die one after another.
    """
    settings = with_workers(prepared(settings))
    preparing.check(settings)
    folder = Path(settings.hpo.folder)
    _check_folder(settings, folder)
    document.write_settings(settings, folder)
    study = Study(settings, folder)
    study.begin()
    if over := study.begun():
        say(f"{over} of {settings.hpo.n_trials} trials are over already")
    running = _Search(study, say, objective)
    try:
        status = running.run()
    finally:
        written = document.write(study)
        running.say_lines(written)
        if copy := storage.of(settings.run.storage, folder):
            copy.push(say, document.STORED, last=True)
    return Ended(status, folder, written)


def with_workers(settings: Settings) -> Settings:
    """Return the settings of a search with the number of workers that ``hpo.workers=auto`` stands for.

    Raises:
        ConfigError: ``hpo.trial`` cannot be used, or the cluster that is to run trials cannot run them.
        MissingExtraError: Ray is not installed.
    """
    runs = settings_of(settings, {}, Path(settings.hpo.folder))
    return space.with_hpo(settings, workers=cluster.count(settings.hpo.workers, runs, settings.hpo.engine))


def check(settings: Settings, console: Console | None) -> Outcome:
    """Check a search, and one trial of it with the settings that are not searched, as a dry run does.

    Raises:
        ConfigError: settings, a program or a folder that cannot be used.
        DataError: data that cannot be used.
    """
    from hotloop.train import dry  # noqa: PLC0415 - loads torch
    from hotloop.train.start import Start  # noqa: PLC0415

    preparing.check(settings)
    folder = Path(settings.hpo.folder)
    _check_folder(settings, folder)
    dry.check_folder(folder)
    one = settings_of(settings, {}, folder)
    for first in folds_of(one)[:1]:
        one = changed(one, first)
    recipe = importlib.import_module("hotloop.recipes").load(settings.recipe.name)
    found: Outcome = recipe.train(Start(one, folder, dry=True), console)
    return found


def nested(  # noqa: PLR0913, PLR0917 - what is searched, where, by what, and who hears of it
    settings: Settings,
    folder: Path,
    trials: int,
    say: Say,
    later: int = 0,
    objective: Callable[[Asked], float] | None = None,
) -> tuple[str, ...]:
    """Search within a fold, in this process, or go on with it, and return the best values as overrides.

    Args:
        settings: of the inner runs: they see the outer training side alone.
        folder: where the study is kept, in SQLite; an outer fold's own.
        trials: how many.
        say: prints a line.
        later: trials of the searches that come after this one in the process, which use its compiled code.
        objective: runs a trial; None trains the recipe.

    Raises:
        ConfigError: settings that cannot be used.
        KeyboardInterrupt: somebody interrupted; the same call goes on.
        SearchStoppedError: no trial came to its end.
    """
    settings = space.with_hpo(settings, folder=str(folder), n_trials=trials, keep_checkpoints="none")
    settings = preparing.inner(prepared(changed(settings, {"run.storage": None})))
    document.check_folder(settings, folder)
    study = Study(settings, folder)
    study.begin()
    told = _over(study)
    try:
        study.run(objective, later=later)
    finally:  # a search that stops has trials too, and their causes are read in its document
        written = document.write(study)
        for line in _lines(written, told):
            say(line)
    return tuple(space.override(name, value) for name, value in document.best_values(written).items())


def work(
    settings: dict[str, Any], worker: dict[str, Any], until: float, proxy: str | None, objective: str | None
) -> None:
    """Run trials in a worker's process until none is left."""
    chosen = configure.from_dict(settings)
    act = None
    if objective:
        module, _, function = objective.partition(":")
        act = getattr(importlib.import_module(module), function)
    Study(chosen, Path(chosen.hpo.folder), proxy).run(act, worker, until)


class _Search:
    """A search on its way: gives its workers work, and tells of its trials."""

    def __init__(self, study: Study, say: Say, objective: str | None) -> None:
        self.study, self.say, self.objective, self.hpo = study, say, objective, study.settings.hpo
        self.until = time.time() + self.hpo.timeout_seconds if self.hpo.timeout_seconds else math.inf
        self.told, self.command = _over(study), secrets.token_hex(4)
        self.deaths, self.written, self.proxy = 0, time.monotonic(), ""

    def run(self) -> str:
        """Run workers until every trial is over, and return the status of the search."""
        study, runs = self.study, settings_of(self.study.settings, {}, self.study.folder)
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(cluster.pool(_WORKER, runs, self.hpo.engine, study.folder / "workers"))
            if self.hpo.engine == "ray":
                self.proxy = stack.enter_context(_served(study))
            stopped = cluster.watch(pool, runs, self.hpo.at_once, self.more, self.over, self.tell)
        if stopped:
            return "interrupted"
        return "out of time" if time.time() >= self.until and study.left() else "finished"

    def more(self, number: int) -> dict[str, Any] | None:
        """Return what a worker is given."""
        if not self.study.left() or time.time() >= self.until:
            return None
        worker, plain = {"number": number, "command": self.command}, configure.to_dict(self.study.settings)
        told = {"until": self.until, "proxy": self.proxy or None, "objective": self.objective}
        return {"settings": plain, "worker": worker, **told}

    def over(self, one: workers.Ended) -> None:
        """Put back the trial of a worker that died; any other error ends the search."""
        if one.died:
            self.study.lost({"number": one.number, "command": self.command})
            self.deaths += 1
            self.say(f"worker {one.number} died ({one.died}); its trial is begun again")
        elif one.error and not isinstance(one.error, (KeyboardInterrupt, StepLostError)):
            raise SearchStoppedError(str(one.error))
        if self.deaths >= DEATHS:
            raise SearchStoppedError(f"{DEATHS} workers died one after another: {one.died}")

    def tell(self) -> None:
        """Write the document from time to time, and print the trials that have ended."""
        if time.monotonic() - self.written >= _EVERY_SECONDS:
            self.say_lines(document.write(self.study, importances=False))
            self.written = time.monotonic()

    def say_lines(self, found: dict[str, Any]) -> None:
        """Print the trials that have ended."""
        for line in _lines(found, self.told):
            self.say(line)
            self.deaths = 0


def _over(study: Study) -> set[int]:
    return {one.number for one in study.trials() if one.state.is_finished()}


def _lines(found: dict[str, Any], told: set[int]) -> Iterator[str]:
    """Yield a line for each trial of a document that has ended, and that was not told of."""
    for one in found["trials"]:
        if one["state"] == "running" or one["number"] in told:
            continue
        told.add(one["number"])
        value = "" if one["value"] is None else f" {one['value']:.4f}"
        best = " (best so far)" if one["number"] == found["best"] else ""
        cause = one["cause"] and f": {one['cause']}"
        yield f"trial {one['number']} {one['state']}{value}{best}: {_values(one['values'])}{cause}"


def _values(values: dict[str, Any]) -> str:
    """Return a trial's settings in a line, each by the end of its name."""
    shown = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in values.items()}
    return "  ".join(f"{name.rsplit('.', 1)[-1]} {value}" for name, value in shown.items())


def _check_folder(settings: Settings, folder: Path) -> None:
    document.check_folder(settings, folder)
    if any((folder / name).exists() for name in (LINES, DOCUMENT, folds.DOCUMENT)):
        raise ConfigError(f"hpo.folder={folder} holds a run, whose report would be overwritten: name another folder")


@contextlib.contextmanager
def _served(study: Study) -> Iterator[str]:
    """Serve the study's storage to workers on a cluster, and yield ``host:port``."""
    optuna, ray = require("optuna", "hotloop hpo", "search"), require("ray", "hpo.engine=ray", "ray")
    host = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    serve = optuna.storages.run_grpc_proxy_server
    threading.Thread(target=serve, args=(study.storage,), kwargs={"host": host, "port": port}, daemon=True).start()
    yield f"{host}:{port}"


__all__ = ["Ended", "check", "nested", "search", "with_workers", "work"]
