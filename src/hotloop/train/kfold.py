"""Cross-validation: each fold an ordinary run in a folder of its own, and a summary of all of them.

``STUDY/fold-0``, ``fold-1``, ... are run folders like any other. ``STUDY/kfold.json`` and ``STUDY/report.html`` sum
them up, and are written after each fold. A fold that was cut off goes on from its own last checkpoint.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import importlib
import math
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hotloop import record
from hotloop.errors import ConfigError, DataError, HotloopError, MissingExtraError, StepLostError
from hotloop.report import folds as report
from hotloop.report.page import write_view
from hotloop.train import (
    checkpoint,
    cluster,
    compiling,
    conf_files,
    configure,
    environment,
    folds,
    idle,
    program,
    start,
    storage,
    workers,
)
from hotloop.train.display import Display, figures
from hotloop.train.interrupt import Interrupt, wished
from hotloop.train.nested import leaves
from hotloop.train.outcome import CHECKED
from hotloop.train.scope import DECISIVE, STILL_COMPARABLE
from hotloop.train.search import command, preparing, space
from hotloop.train.turn import folder_held
from hotloop.train.within import Within

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rich.console import Console

    from hotloop.train.folds import Sides
    from hotloop.train.outcome import Outcome
    from hotloop.train.recipe import Recipe
    from hotloop.train.settings import Settings

SPLITS = 5
"""Folds of a plain ``hotloop kfold``."""
PAGE, SEARCH = "report.html", "search"
ATTEMPTS = 2
"""How often a fold is begun at most, by one command, while its workers die."""
_END_ALL = (ConfigError, DataError, MissingExtraError, StepLostError)
"""The user's to mend before any other fold can run, or a GPU that no other fold can use."""
_PATIENCE_SECONDS, _EVERY = 120.0, 0.2
_STORED = (start.SETTINGS, report.DOCUMENT, PAGE)


@dataclasses.dataclass(frozen=True)
class Study:
    """A cross-validation: the settings of the whole, its folder, and the document that an earlier start left.

    ``dry``: all is checked that can be before training, and nothing is trained or written.
    """

    settings: Settings
    folder: Path
    before: dict[str, Any] | None = None
    dry: bool = False
    open: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack, compare=False, repr=False)

    @property
    def which(self) -> tuple[int, ...]:
        """The folds that are run: all of them, or the one that the settings name."""
        kfold = self.settings.kfold
        assert kfold.n_splits is not None
        return tuple(range(kfold.n_splits)) if kfold.fold is None else (kfold.fold,)

    @property
    def again(self) -> str:
        """The command that goes on with it."""
        return configure.again(self.folder, "kfold")


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a cross-validation ended: ``finished``, ``interrupted``, or ``failed`` where a fold has; and its document."""

    status: str
    folder: Path
    document: Mapping[str, Any]


def with_splits(overrides: Sequence[str], config: str | Path | None = None) -> list[str]:
    """Return the overrides of ``hotloop kfold``: those given, and `SPLITS` folds where nothing says how many."""
    if configure.resumed(overrides, config) or configure.compose(overrides, config)["kfold"]["n_splits"] is not None:
        return list(overrides)
    return [*overrides, f"kfold.n_splits={SPLITS}"]


def prepare(overrides: Sequence[str] = (), config: str | Path | None = None) -> Study | None:
    """Compose the settings of a cross-validation and choose its folder; None where they are those of a single run.

    Raises:
        ConfigError: settings that cannot be used or would do nothing, a folder that holds another run, or one that
            cannot be resumed.
    """
    if resumed := configure.resumed(overrides, config):
        return _resume(resumed, overrides, config) if report.SCHEMA.is_at(resumed) else None
    settings = program.filled(configure.load(overrides, config))
    kfold = settings.kfold
    if kfold.n_splits is None or (kfold.fold is not None and kfold.inner_trials is None):
        return None
    if kfold.inner_trials:
        settings = preparing.prepared(configure.load_search(overrides, config))
    idle.refuse_idle(settings, space.varied(settings) if kfold.inner_trials else ())
    return Study(settings, start.new_folder(settings))


def _resume(given: Path, overrides: Sequence[str], config: str | Path | None) -> Study:
    """Take up a cross-validation; overrides go on top of its settings, as far as its folds stay comparable."""
    if config:
        raise ConfigError(f"--config {config} does not go with run.resume: a resumed run keeps its own settings")
    folder, held = given if given.is_dir() else given.parent, contextlib.ExitStack()
    held.enter_context(folder_held(folder))
    document = report.load(folder)
    before = configure.from_dict(document["settings"])
    start.write_settings(start.Start(before, folder, open=held))
    changed = [one for one in overrides if not start.is_about_folder(one)]
    choices = any(one.split("=")[0].strip() in conf_files.groups() for one in changed)
    # The same command may be given again, choices of groups included; those are known where settings are composed.
    now = (
        configure.load(changed, folder / start.SETTINGS)
        if choices
        else configure.from_dict(document["settings"], changed)
    )
    old, new = (dict(leaves(configure.to_dict(one))) for one in (before, now))
    for name in dict.fromkeys([*old, *new]):
        free = space.is_within(name, STILL_COMPARABLE) and name not in DECISIVE
        if not free and old.get(name) != new.get(name):
            raise ConfigError(
                f"{name} cannot change while a cross-validation is resumed ({old.get(name)!r} to {new.get(name)!r}): "
                "its folds could not be compared. Start a new one, in another run.folder"
            )
    storage.check(now.run.storage)
    return Study(now, folder, document, open=held)


def run(study: Study, recipe: Recipe, console: Console | None = None) -> Ended:
    """Run the folds that are not done yet, and sum them up. A fold that fails costs no other fold.

    Args:
        study: the cross-validation.
        recipe: the module of ``study.settings.recipe``.
        console: prints; None prints to stdout.

    Raises:
        ConfigError: settings that cannot be used.
        DataError: data that cannot be used, or folds that nothing can be learned from or judged by.
        StepLostError: the GPU may be lost; this process cannot go on, and one that resumes the study can.
    """
    settings, display = study.settings, Display(console)
    if not hasattr(recipe, "sides"):
        raise ConfigError(f"recipe={settings.recipe.name} cannot be split into folds: leave kfold.n_splits out")
    if settings.kfold.inner_trials is not None:
        preparing.inner(settings)
    if settings.kfold.engine == "ray":
        with cluster.connected(settings, "kfold.engine"):
            pass  # what is wrong with it is said now
    elif recipe.COMPONENTS:
        chosen = compiling.plan(settings, recipe.COMPONENTS)
        compiling.check(chosen, settings, environment.device_of(settings.run).type)
    display.say(f"Cross-validation of recipe {settings.recipe.name} in {settings.kfold.n_splits} folds: {study.folder}")
    found = folds.examine(settings, recipe.sides)
    if all(one.fingerprint for one in found):
        display.say("\n".join([*folds.describe(found), "No group is on both sides of a fold, nor held out by two"]))
    else:
        display.say("What is in the folds is not known: the program did not call fold.split while it was made")
    document = study.before or _begin(settings, found, study.which)
    if document["contents"] != _contents(found):
        raise DataError(
            f"{study.folder} was begun on other data than its settings give now: put the data back as it was, or start "
            "a new cross-validation without run.resume"
        )
    with study.open:
        if study.dry:
            first = folds.of_fold(settings, study.which[0])
            recipe.train(start.Start(first, study.folder, dry=True), console)
            return Ended(CHECKED, study.folder, {**document, "status": CHECKED})
        start.write_settings(start.Start(settings, study.folder, open=study.open))
        document.update(settings=configure.to_dict(settings), status="running", error=None, finished=None)
        document.update(record.this_process(), starts=document.get("starts", 0) + 1)
        state = _State(study.folder, document, display.say)
        state.save()
        return _Running(study, recipe, state, display, console).all()


class _State:
    """The document of a cross-validation, on disk after each change; a failing disk is printed once."""

    def __init__(self, folder: Path, document: dict[str, Any], say: Callable[[str], None]) -> None:
        self.folder, self.document, self._say, self._warned = folder, document, say, False
        self._copy = storage.of(document["settings"]["run"].get("storage"), folder)

    def fold(self, fold: int) -> dict[str, Any]:
        """Return the entry of one fold."""
        found: dict[str, Any] = next(one for one in self.document["folds"] if one["fold"] == fold)
        return found

    def note(self, fold: int, **values: Any) -> None:
        """Set values of a fold, and write the document."""
        self.fold(fold).update(values)
        done = [one for one in self.document["folds"] if one.get("status") == "finished"]
        self.document["metrics"] = {kind: spread([one.get(kind) or {} for one in done]) for kind in ("best", "last")}
        self.save()

    def settle(self, status: str, error: str | None = None) -> None:
        """Write how the whole ended, and its page."""
        self.document.update(status=status, error=error, finished=time.time())
        self.save()
        self.write_page()
        if self._copy:
            self._copy.push(self._say, _STORED, last=True)
        self._say(f"Report of the folds: {self.folder / PAGE}")

    def write_page(self) -> None:
        """Write the page of what is known by now."""
        self._try(lambda: write_view(report.build(self.document), self.folder / PAGE))

    def save(self) -> None:
        """Write the document."""
        self.document["updated"] = time.time()
        self._try(lambda: report.SCHEMA.write(self.folder, self.document))
        if self._copy:
            self._copy.push(self._say, _STORED)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if not self._warned:
                self._say(f"{self.folder} cannot be written: {error}. The folds go on")
            self._warned = True


class _Running:
    """The folds on their way."""

    def __init__(self, study: Study, recipe: Recipe, state: _State, display: Display, console: Console | None) -> None:
        self.study, self.state, self.display = study, state, display
        self.recipe, self.console = recipe, console

    def all(self) -> Ended:
        """Run the folds that are left, and settle the whole however it ends."""
        status, error = "failed", None
        try:
            status = self.rest()
        except KeyboardInterrupt:
            status = "interrupted"
        except BaseException as failure:
            error = _words(failure)
            raise
        finally:
            if status == "interrupted":
                self.display.say(f"Interrupted. Finished folds are kept. Resume with: {self.study.again}")
            self.state.settle(status, error)
        return Ended(status, self.study.folder, self.state.document)

    def rest(self) -> str:
        """Run the folds that are not done; returns the status of the whole."""
        settings, which = self.study.settings, self.study.which
        left = [fold for fold in which if self.state.fold(fold)["status"] != "finished"]
        for fold in which:
            if fold not in left:
                best = self.state.fold(fold).get("best") or {}
                self.display.say(f"Fold {fold}: finished by an earlier start: {figures(best)}")
        asked = settings.kfold.workers
        if settings.kfold.engine == "ray":
            with cluster.connected(settings, "kfold.engine") as found:
                many = found.room if isinstance(asked, str) else asked
                ended = self.at_once(left, many, cluster.RayWorkers(found, _WORKER))
        elif (many := workers.count(asked, settings)) > 1 and len(left) > 1:
            ended = self.at_once(left, many, workers.Workers(_WORKER, self.study.folder / "workers"))
        else:
            ended = self.by_turns(left)
        if not ended:
            return "interrupted"
        failed = [fold for fold in which if self.state.fold(fold)["status"] == "failed"]
        if failed:
            names = ", ".join(map(str, failed))
            self.display.say(f"Failed: fold {names}. Finished folds are kept; to try again: {self.study.again}")
        return "failed" if failed else "finished"

    def by_turns(self, left: Sequence[int]) -> bool:
        """Run folds in this process; returns whether all have ended by themselves."""
        for position, fold in enumerate(left):
            if position:
                _forget()
            self.display.say(f"\nFold {fold} of {self.study.settings.kfold.n_splits}")
            self.state.note(fold, status="running", error=None)
            known = self.state.fold(fold).get("chosen")
            folder, stop = self.study.folder / f"fold-{fold}", False

            def note(chosen: list[str], fold: int = fold) -> None:
                self.state.note(fold, chosen=chosen)

            try:
                outcome = train_fold(
                    self.study.settings, self.study.folder, fold, len(left) - position, self.study.again, known,
                    note, self.recipe, self.console,
                )  # fmt: skip
                self.state.note(fold, **ended(outcome, folder))
                stop = outcome.stop
            except KeyboardInterrupt:
                self.state.note(fold, status="interrupted", **facts(folder))
                raise
            except Exception as error:
                self.failed(fold, error)
                if isinstance(error, _END_ALL):
                    raise
                stop = wished(error)
            if self.state.fold(fold)["status"] == "interrupted" or (stop and fold != left[-1]):
                return False
            self.state.write_page()
        return True

    def failed(self, fold: int, error: BaseException) -> None:
        """Write down that a fold failed, with its cause."""
        if not isinstance(error, HotloopError):
            traceback.print_exception(error, file=sys.stderr)
        self.display.say(f"Fold {fold} failed: {_words(error)}")
        self.state.note(fold, status="failed", error=_words(error), **facts(self.study.folder / f"fold-{fold}"))

    def at_once(self, left: Sequence[int], many: int, pool: workers.Workers | cluster.RayWorkers) -> bool:
        """Run folds in worker processes, one fold each; returns whether all have ended by themselves.

        Raises:
            ConfigError, DataError, MissingExtraError, StepLostError: a fold did, and no other fold can run.
        """
        study, waiting, at = self.study, collections.deque(left), dict[int, int]()
        begun: collections.Counter[int] = collections.Counter()
        failure: BaseException | None = None
        with contextlib.ExitStack() as stack:
            interrupt = stack.enter_context(Interrupt("finishing the steps of all folds, then saving"))
            stack.callback(pool.close)
            asked = False
            while at or waiting:
                for number in range(1, many + 1):
                    if number not in at and waiting and not asked:
                        fold = at[number] = waiting.popleft()
                        begun[fold] += 1
                        self.display.say(f"Fold {fold} began (worker {number}, its output: {pool.log(number)})")
                        self.state.note(fold, status="running", error=None)
                        job = {"settings": configure.to_dict(study.settings), "folder": str(study.folder), "fold": fold}
                        job.update(again=study.again, chosen=self.state.fold(fold).get("chosen"))
                        pool.start(number, job, workers.environment(study.settings, many, number))
                time.sleep(_EVERY)
                for one in pool.ended():
                    fold = at.pop(one.number)
                    if one.died and begun[fold] < ATTEMPTS and not asked:
                        self.display.say(f"Fold {fold}: its worker died ({one.died}); it goes on from its checkpoint")
                        waiting.appendleft(fold)
                        continue
                    failure = self.over(fold, one) or failure
                if (interrupt.signal or failure) and not asked:
                    asked = True
                    pool.interrupt()
                if asked and not at:
                    break
        if failure:
            raise failure
        return not asked

    def over(self, fold: int, one: workers.Ended) -> BaseException | None:
        """Write down how a fold ended in its worker; returns an error that no other fold would escape."""
        folder = self.study.folder / f"fold-{fold}"
        storage.bring(storage.of(self.study.settings.run.storage, folder, self.study.folder), self.display.say)
        if one.result:
            self.state.note(fold, **one.result)
            self.display.say(
                f"Fold {fold} {one.result['status']}: {figures(one.result.get('best') or {})}".rstrip(": ")
            )
            self.state.write_page()
            return None
        if isinstance(one.error, KeyboardInterrupt):
            self.state.note(fold, status="interrupted", **facts(folder))
            return None
        self.failed(fold, one.error or HotloopError(f"its worker died ({one.died}), and so did the one before"))
        return one.error if isinstance(one.error, _END_ALL) else None


_WORKER = f"{__name__}:work"


def work(settings: dict[str, Any], folder: str, fold: int, again: str, chosen: list[str] | None) -> dict[str, Any]:
    """Train one fold in a worker's process, and return its entry in the document."""
    whole, place, kept = configure.from_dict(settings), Path(folder), dict[str, Any]()
    recipe = importlib.import_module("hotloop.recipes").load(whole.recipe.name)
    storage.check(whole.run.storage)
    with folder_held(place / f"fold-{fold}", _PATIENCE_SECONDS):
        outcome = train_fold(
            whole, place, fold, 1, again, chosen, lambda found: kept.update(chosen=found), recipe, None
        )
    return {**ended(outcome, place / f"fold-{fold}"), **kept}


def train_fold(  # noqa: PLR0913, PLR0917 - a fold, what it is part of, and who hears of it
    settings: Settings,
    study: Path,
    fold: int,
    runs: int,
    again: str,
    known: Sequence[str] | None,
    note: Callable[[list[str]], None],
    recipe: Recipe,
    console: Console | None,
) -> Outcome:
    """Train a fold from its start, or from its last checkpoint, after a search of its own where there is one.

    Args:
        settings: of the whole.
        study: the folder of the whole.
        fold: its number.
        runs: how many folds, this one included, will use what is compiled in this process.
        again: the command that goes on with the whole.
        known: the overrides that its inner search chose in an earlier start.
        note: takes those that it chose in this one.
        recipe: trains.
        console: prints.
    """
    folder, one, say = study / f"fold-{fold}", folds.of_fold(settings, fold), Display(console).say
    if (trials := settings.kfold.inner_trials) is not None:
        later = (runs - 1) * trials
        if known is None:
            say(f"Inner search: {trials} trials on the training side of fold {fold}, in {folder / SEARCH}")
            known = command.nested(folds.with_search(settings, fold), folder / SEARCH, trials, say, later)
            note(list(known))
        say(f"Inner search of fold {fold} chose: {' '.join(known) or 'no change'}")
        for changed in known:
            if changed.lstrip("+~").split(".")[0] in space.KEPT:
                raise ConfigError(f"the inner search chose {changed}: a search within a fold has no say in it")
        one = configure.from_dict(configure.to_dict(one), known)
        runs += later * settings.kfold.inner_splits
    within = Within(runs=runs, study=study.name, fold=fold, folder=study, resume=again)
    return recipe.train(start.take_up(one, folder, within), console)


def judge(folder: Path, fold: int | None, recipe: Recipe, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Judge the best checkpoint of one fold, or of every fold that has one, on its own held-out rows.

    Raises:
        ConfigError: there is no such fold, or no checkpoint of any.
    """
    known = [one["fold"] for one in report.load(folder)["folds"]]
    if fold is not None and fold not in known:
        raise ConfigError(f"fold={fold}: {folder} has the folds {', '.join(map(str, known))}")
    kept = [folder / f"fold-{one}" / checkpoint.FOLDER for one in known]
    has_best = getattr(recipe, "GOAL", None) or any((one / checkpoint.BEST).is_file() for one in kept)
    name = checkpoint.BEST if has_best else checkpoint.LAST  # a program without a goal has no best validation
    paths = {one: place / name for one, place in zip(known, kept, strict=True)}
    wanted = [one for one in known if one == fold or (fold is None and paths[one].is_file())]
    if not wanted:
        raise ConfigError(
            f"no fold of {folder} has a checkpoint yet: go on with it by {configure.again(folder, 'kfold')}"
        )
    found = []
    for one in wanted:
        document = checkpoint.load(paths[one])
        settings = start.settings_to_judge(document, overrides)
        metrics = recipe.evaluate(settings, checkpoint.judged(document))
        step = document["position"]["step"]
        found.append({"fold": one, "checkpoint": str(paths[one]), "step": step, "metrics": metrics})
    return found


def _begin(settings: Settings, contents: Sequence[Sides], which: Iterable[int]) -> dict[str, Any]:
    return {
        "schema": report.SCHEMA.version,
        "recipe": settings.recipe.name,
        "created": time.time(),
        "starts": 0,
        "settings": configure.to_dict(settings),
        "contents": _contents(contents),
        "folds": [{"fold": fold, "folder": f"fold-{fold}", "status": "pending"} for fold in which],
        "metrics": {},
    }


def _contents(found: Sequence[Sides]) -> list[dict[str, Any]]:
    return [
        {"train": one.train.to_dict(), "validation": one.validation.to_dict(), "fingerprint": one.fingerprint}
        if one.fingerprint
        else {}
        for one in found
    ]


def ended(outcome: Outcome, folder: Path) -> dict[str, Any]:
    """Return the entry of a fold that ended by itself or was interrupted."""
    return {
        "status": outcome.status,
        "error": None,
        "step": outcome.step,
        "best_step": outcome.best_step,
        "best": dict(outcome.best),
        **facts(folder),
    }


def facts(folder: Path) -> dict[str, Any]:
    """Return the last validation of a fold, its step and seconds, and its compiles; empty without a record."""
    try:
        document = record.load(folder)
    except HotloopError:
        return {}
    validations = [one for one in document["metrics"] if one.get("split") == "validation"]
    latest = validations[-1] if validations else {}
    compiles = [one for one in document["events"] if one.get("kind") == "compiled"]
    # A hot loop has measured all of its preparing; else the compiles are all that there was.
    prepared = document["measurements"].get("prepare_seconds")
    running = next((one.get("running") for one in document["components"].values()), None)
    return {
        "last": {key: value for key, value in latest.items() if key not in ("step", "epoch", "split", "time")},
        "last_step": latest.get("step"),
        "seconds": _sum(document["steps"]),
        "compiled": {
            "running": "eager" if running == "none" else running,
            "compiles": len(compiles),
            "captured": sum(one.get("kind") == "captured" for one in document["events"]),
            "seconds": prepared if isinstance(prepared, int | float) else _sum(compiles),
        },
    }


def _sum(entries: Iterable[Mapping[str, Any]]) -> float:
    return math.fsum(one["seconds"] for one in entries if isinstance(one.get("seconds"), int | float))


def spread(metrics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Return mean and sample standard deviation of each metric that all of several mappings have."""
    names = [name for name in (metrics[0] if metrics else ()) if all(name in one for one in metrics)]
    found: dict[str, dict[str, float | None]] = {}
    for name in names:
        values = [float(one[name]) for one in metrics]  # "nan" is read as well: a fold that has it must be seen
        finite = all(map(math.isfinite, values))
        std = statistics.stdev(values) if finite and len(values) > 1 else math.nan
        found[name] = {"mean": statistics.fmean(values), "std": std if len(values) > 1 else None}
    return found


def _words(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return (said if isinstance(error, HotloopError) else f"{type(error).__name__}: {said}")[: record.ERROR_LENGTH]


def _forget() -> None:
    """Free the memory of a fold's model before the next one is made; compiled code stays."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
