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
from hotloop.train.interrupt import Interrupt
from hotloop.train.optional import require
from hotloop.train.search import document, preparing, space
from hotloop.train.search.preparing import prepared
from hotloop.train.search.study import CAUSE, DRAWN, Study, trial_folder
from hotloop.train.search.trial import Asked, changed, folds_of, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    from hotloop.train.cluster import Cluster, RayWorkers
    from hotloop.train.outcome import Outcome
    from hotloop.train.settings import Settings
    from hotloop.train.workers import Workers

    Say = Callable[[str], None]

DEATHS = 10
"""Workers that die one after another, with no trial finished between, after which the search stops."""
_EVERY = 0.2
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
    storage.check(settings.run.storage)
    folder = Path(settings.hpo.folder)
    _check_folder(settings, folder)
    document.write_settings(settings, folder)
    study = Study(settings, folder)
    study.begin()
    if over := settings.hpo.n_trials - study.left():
        say(f"{over} of {settings.hpo.n_trials} trials are over already")
    try:
        status = _Search(study, say, objective).run()
    finally:
        written = document.write(study)
        if copy := storage.of(settings.run.storage, folder):
            copy.push(say, document.STORED, last=True)
    return Ended(status, folder, written)


def with_workers(settings: Settings) -> Settings:
    """Return the settings of a search with the number of workers that ``hpo.workers=auto`` stands for.

    Raises:
        ConfigError: ``hpo.trial`` cannot be used, or the cluster that is to run trials cannot run them.
        MissingExtraError: Ray is not installed.
    """
    space.check_trial(settings)
    many, runs = settings.hpo.workers, settings_of(settings, {}, Path(settings.hpo.folder))
    if settings.hpo.engine == "ray":
        with cluster.connected(runs, "hpo.engine") as found:  # what is wrong with it is said before anything is written
            many = found.room if many == "auto" else many
    return space.with_hpo(settings, workers=workers.count(many, runs))


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
    lines = _Lines(study)
    try:
        study.run(objective, later=later)
    finally:  # a search that stops has trials too, and their causes are read in its document
        for line in lines.new():
            say(line)
        written = document.write(study)
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
    """A search on its way."""

    def __init__(self, study: Study, say: Say, objective: str | None) -> None:
        self.study, self.say, self.objective, self.settings = study, say, objective, study.settings
        self.hpo = study.settings.hpo
        self.runs = settings_of(self.settings, {}, study.folder)
        self.until = time.time() + self.hpo.timeout_seconds if self.hpo.timeout_seconds else math.inf
        self.lines, self.command = _Lines(study), secrets.token_hex(4)
        self.deaths, self.stopped, self.proxy = 0, "", ""

    def run(self) -> str:
        """Run workers until every trial is over, and return the status of the search."""
        with contextlib.ExitStack() as stack:
            pool = self._pool(stack)
            interrupt = stack.enter_context(Interrupt("finishing the steps of all trials"))
            stack.callback(pool.close)
            for number in range(1, min(self.hpo.at_once, self.study.left()) + 1):
                self._start(pool, number)
            asked, written = False, time.monotonic()
            while pool.running:
                time.sleep(_EVERY)
                for one in pool.ended():
                    self._ended(one, pool, stopping=asked)
                for line in self.lines.new():
                    self.say(line)
                    self.deaths = 0
                if (interrupt.signal or self.stopped) and not asked:
                    asked = True
                    pool.interrupt()
                if time.monotonic() - written >= document.EVERY_SECONDS:
                    document.write(self.study, importances=False)
                    written = time.monotonic()
            for line in self.lines.new():
                self.say(line)
            if self.stopped:
                raise SearchStoppedError(self.stopped)
            if interrupt.signal:
                return "interrupted"
        return "out of time" if time.time() >= self.until and self.study.left() else "finished"

    def _pool(self, stack: contextlib.ExitStack) -> Workers | RayWorkers:
        if self.hpo.engine != "ray":
            return workers.Workers(_WORKER, self.study.folder / "workers")
        found = stack.enter_context(cluster.connected(self.runs, "hpo.engine"))
        self.proxy = stack.enter_context(_served(self.study, found))
        return cluster.RayWorkers(found, _WORKER)

    def _start(self, pool: Workers | RayWorkers, number: int) -> None:
        given = {
            "settings": configure.to_dict(self.settings),
            "worker": {"number": number, "command": self.command},
            "until": self.until,
            "proxy": self.proxy or None,
            "objective": self.objective,
        }
        pool.start(number, given, workers.environment(self.runs, self.hpo.at_once, number))

    def _ended(self, one: workers.Ended, pool: Workers | RayWorkers, *, stopping: bool) -> None:
        if one.died:
            self.study.lost({"number": one.number, "command": self.command})
            self.deaths += 1
            self.say(
                f"worker {one.number} died ({one.died}); its trial is begun again. Its log: {pool.log(one.number)}"
            )
        elif one.error and not isinstance(one.error, (KeyboardInterrupt, StepLostError)):
            again = "" if isinstance(one.error, SearchStoppedError) else ". Mend it, and the same command goes on"
            self.stopped = self.stopped or f"{str(one.error).rstrip('.')}{again}"
        if self.deaths >= DEATHS:
            self.stopped = f"{DEATHS} workers died one after another ({one.died} the last): {pool.log(one.number)}"
        replace = one.died or isinstance(one.error, StepLostError)
        if replace and not stopping and not self.stopped and time.time() < self.until:
            self._start(pool, one.number)


class _Lines:
    """The trials of a study as lines for people; those that were over before are left out."""

    def __init__(self, study: Study) -> None:
        self._study = study
        self._over = {one.number for one in study.trials() if one.state.is_finished()}
        self._began = set(self._over)

    def new(self) -> Iterator[str]:
        """Yield a line for each trial that has begun or ended since the last call."""
        every = self._study.trials()
        best, standing = self._study.best(every), {one.number for one in self._study.standing(every)}
        for one in every:
            if one.number not in self._began and DRAWN in one.user_attrs:
                self._began.add(one.number)
                yield f"trial {one.number} began: {values_line(one.params)}"
            if one.number in self._over or not one.state.is_finished():
                continue
            self._over.add(one.number)
            state = {"FAIL": "failed" if one.number in standing else "interrupted"}.get(one.state.name)
            value = f" {one.value:.4f}" if one.state.name == "COMPLETE" else ""
            first = " (best so far)" if best and best.number == one.number else ""
            cause = f": {one.user_attrs[CAUSE]}" if CAUSE in one.user_attrs else ""
            took = f" after {one.duration.total_seconds():.1f} s" if one.duration else ""
            yield f"trial {one.number} {state or one.state.name.lower()}{value}{first}{took}{cause}"


def values_line(values: dict[str, Any]) -> str:
    """Return a trial's settings in a line, each by the end of its name."""
    shown = {name: f"{value:.3g}" if isinstance(value, float) else value for name, value in values.items()}
    return "  ".join(f"{name.rsplit('.', 1)[-1]} {value}" for name, value in shown.items())


def _check_folder(settings: Settings, folder: Path) -> None:
    document.check_folder(settings, folder)
    if any((folder / name).exists() for name in (LINES, DOCUMENT, folds.DOCUMENT)):
        raise ConfigError(f"hpo.folder={folder} holds a run, whose report would be overwritten: name another folder")


@contextlib.contextmanager
def _served(study: Study, found: Cluster) -> Iterator[str]:
    """Serve the study's storage to workers on a cluster, and yield ``host:port``."""
    optuna = require("optuna", "hotloop hpo", "search")
    host = found.ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    serve = optuna.storages.run_grpc_proxy_server
    threading.Thread(target=serve, args=(study.storage,), kwargs={"host": host, "port": port}, daemon=True).start()
    yield f"{host}:{port}"


__all__ = ["Ended", "check", "nested", "search", "trial_folder", "with_workers", "work"]
