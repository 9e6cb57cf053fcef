"""A search as it is started: workers as processes, what they tell, and what follows when one of them dies."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import queue
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError, SearchStoppedError
from hotloop.record import DOCUMENT, LINES
from hotloop.report import folds
from hotloop.train import child, configure, gpus, mirror, run_storage
from hotloop.train.child import DONE, INTERRUPTED, REPLACE
from hotloop.train.cluster import connected
from hotloop.train.interrupt import Interrupt
from hotloop.train.kept import Kept
from hotloop.train.search import before, document, space, told
from hotloop.train.search.preparing import prepared
from hotloop.train.search.study import NUMBER, Study
from hotloop.train.search.told import Said, SearchBegan, Tell, TrialBegan, TrialEnded
from hotloop.train.search.trial import settings_of, train
from hotloop.train.search.worker import STOPPED, Job

if TYPE_CHECKING:
    from hotloop.train.search.told import Told
    from hotloop.train.settings import Settings

DEATHS = 10
"""Workers that die one after another, with no trial finished between, after which the search stops."""
_EVERY = 0.2
_GRACE_SECONDS = 600.0
"""How long a worker that was asked to stop may take to finish its step."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a search ended: ``finished``, ``interrupted`` or ``out of time``; its folder and its document."""

    status: str
    folder: Path
    document: dict[str, Any]


@dataclasses.dataclass
class _Process:
    """A worker that runs: its process, and the trial that it is at."""

    number: int
    process: subprocess.Popen[str]
    log: Path


def search(settings: Settings, tell: Tell, objective: str = f"{train.__module__}:{train.__name__}") -> Ended:
    """Run a search, or go on with it, until every trial is over.

    Args:
        settings: of the search; its study's folder and storage among them.
        tell: hears of each trial, in this process.
        objective: ``module:function`` that runs a trial.

    Raises:
        ConfigError: settings that cannot be used, or another study's folder; nothing was started or written then.
        DataError: data that cannot be used; the same.
        SearchStoppedError: every trial fails, the storage is gone, or workers die one after another.
    """
    settings = with_workers(prepared(settings))
    before.check(settings)
    run_storage.check(settings.run.storage)
    folder = Path(settings.hpo.folder)
    document.check_folder(settings, folder)
    if any((folder / name).exists() for name in (LINES, DOCUMENT, folds.DOCUMENT)):
        raise ConfigError(f"hpo.folder={folder} holds a run, whose report would be overwritten: name another folder")
    study = Study(settings, folder, lambda line: tell(Said(line)))
    with contextlib.ExitStack() as stack:
        interrupt = stack.enter_context(Interrupt())
        stack.callback(study.storage.close)
        supervisor = _Supervisor(settings, study, tell, objective)
        stack.callback(supervisor.end_all)
        try:
            document.write_settings(settings, folder)
            began = _began(study)
            document.write(study, importances=False)
            tell(began)
            status = supervisor.run(interrupt)
        except study.storage.errors as error:
            raise study.storage.gone(error) from error
        except OSError as error:
            why = f"the study's folder {folder} cannot be written ({error.strerror or error})"
            raise SearchStoppedError(f"{why}: finished trials are kept; the same command goes on") from error
        finally:
            written = document.write(study)
            kept = Kept(mirror.of(settings.run.storage, folder))
            kept.push_last(lambda line: tell(Said(line)), document.STORED)
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
        with connected(runs, "hpo.engine") as cluster:  # what is wrong with it is told before anything is written
            many = cluster.room if many == "auto" else many
    else:
        many = gpus.workers(many, runs)
    return space.with_hpo(settings, workers=many)


class _Supervisor:
    """Starts workers, passes on what they tell, and replaces those that die."""

    def __init__(self, settings: Settings, study: Study, tell: Tell, objective: str) -> None:
        self.settings, self.study, self.tell, self.objective = settings, study, tell, objective
        self.runs, self.workers = settings_of(settings, {}, study.folder), settings.hpo.at_once
        limit = settings.hpo.timeout_seconds
        self.deadline = time.time() + limit if limit else math.inf
        self.heard: queue.Queue[tuple[_Process, Told | None]] = queue.Queue()
        self.running: dict[int, _Process] = {}
        self.deaths, self.stopped, self.interrupted = 0, "", False
        self.written = time.monotonic()

    def run(self, interrupt: Interrupt) -> str:
        """Run until every worker is done."""
        for number in range(1, min(self.workers, max(1, self.study.left())) + 1):
            self.start(number)
        while self.running:
            with contextlib.suppress(queue.Empty):
                self.hear(*self.heard.get(timeout=_EVERY))
            if interrupt.signal and not self.interrupted:
                self.interrupted = True
                self.ask_to_stop()
        if self.stopped:
            raise SearchStoppedError(self.stopped)
        if self.interrupted:
            return "interrupted"
        return "out of time" if time.time() >= self.deadline and self.study.left() else "finished"

    def start(self, number: int) -> None:
        """Start a worker, with its share of the GPUs where there are several."""
        log = self.study.folder / "workers" / f"{number}.log"
        job = Job(
            settings=configure.to_dict(self.settings),
            folder=str(self.study.folder),
            number=number,
            since=self.study.since,
            deadline=self.deadline,
            objective=self.objective,
        )
        here = self.settings.hpo.engine == "local"
        share = gpus.environment(self.runs, self.workers, number) if here else {}
        process = child.started("hotloop.train.search.worker", log, share)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it died at once; `ended` hears of that
            process.stdin.write(job.to_json() + "\n")
            process.stdin.flush()
        one = _Process(number, process, log)
        self.running[number] = one
        threading.Thread(target=self.listen, args=(one,), name=f"worker {number}", daemon=True).start()

    def listen(self, one: _Process) -> None:
        """Pass on what a worker tells, in a thread of its own; None is its end."""
        assert one.process.stdout is not None
        for line in one.process.stdout:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill can cut a line in two
                self.heard.put((one, told.from_dict(json.loads(line))))
        one.process.wait()
        self.heard.put((one, None))

    def hear(self, one: _Process, what: Told | None) -> None:
        """Record what a worker tells, or its end."""
        if what is None:
            self.ended(one)
            return
        if isinstance(what, Said) and what.stops:
            self.stop(what.text)
            return
        self.tell(what)
        if isinstance(what, TrialBegan) and (self.interrupted or self.stopped):
            _ask(one)  # whatever it was at has swallowed the first time; asked within a trial again it would lose it
        if isinstance(what, TrialEnded) and what.state != "interrupted":
            self.deaths = 0
            if time.monotonic() - self.written >= document.EVERY_SECONDS:
                document.write(self.study, importances=False)
                self.written = time.monotonic()

    def ended(self, one: _Process) -> None:
        """Record a worker's end, and replace one that died."""
        del self.running[one.number]
        for pipe in (one.process.stdin, one.process.stdout):
            with contextlib.suppress(OSError):
                pipe.close() if pipe else None
        code = one.process.returncode
        if code in (DONE, STOPPED, INTERRUPTED) or self.interrupted or self.stopped:
            return
        if code != REPLACE:
            self.deaths += 1
            again = "the trial it was at is begun again, once"
            self.tell(Said(f"worker {one.number} died ({child.how(code)}); {again}. Its log: {one.log}"))
        if self.deaths >= DEATHS:
            self.stop(
                f"{DEATHS} workers died one after another ({child.how(code)} the last), and no trial was finished "
                f"between: {one.log} may say why. The same command goes on"
            )
        elif time.time() < self.deadline:
            self.start(one.number)

    def stop(self, why: str) -> None:
        """Let no worker begin another trial: the search cannot go on."""
        self.stopped = self.stopped or why
        self.ask_to_stop()

    def ask_to_stop(self) -> None:
        """Stop each worker within its trial, which is open again then."""
        for one in self.running.values():
            _ask(one)

    def end_all(self) -> None:
        """Leave no worker behind, whatever ended this process's own work."""
        self.ask_to_stop()
        until = time.monotonic() + (_GRACE_SECONDS if self.stopped else 5.0)
        for one in self.running.values():
            try:
                one.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()


def _began(study: Study) -> SearchBegan:
    """Say what is over already, and what is the best of it."""
    over, best = study.over(), study.best()
    about = None
    if best is not None:
        about = {"number": best.user_attrs[NUMBER], "value": best.values[0], "values": dict(best.params)}
    return SearchBegan(study.settings.hpo.n_trials, over, about)


def _ask(one: _Process) -> None:
    with contextlib.suppress(OSError):
        one.process.send_signal(signal.SIGINT)
