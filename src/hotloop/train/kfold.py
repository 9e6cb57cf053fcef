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
    conf_files,
    configure,
    folds,
    idle,
    program,
    start,
    storage,
    workers,
)
from hotloop.train.display import Display, figures
from hotloop.train.interrupt import wished
from hotloop.train.outcome import CHECKED
from hotloop.train.search import command, preparing, space
from hotloop.train.search.study import comparable
from hotloop.train.turn import folder_held
from hotloop.train.within import Within

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Console

    from hotloop.train.folds import Sides
    from hotloop.train.recipe import Recipe
    from hotloop.train.settings import Settings

SPLITS = 5
"""Folds of a plain ``hotloop kfold``."""
PAGE, SEARCH = "report.html", "search"
ATTEMPTS = 2
"""How often a fold is begun at most, by one command, while its workers die."""
_END_ALL = (ConfigError, DataError, MissingExtraError, StepLostError)
"""The user's to mend before any other fold can run, or a GPU that no other fold can use."""
_PATIENCE_SECONDS = 120.0
_STORED = (start.SETTINGS, report.DOCUMENT, PAGE)
_WORKER = f"{__name__}:work"


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
    # The same command may be given again, choices of groups included; those are known where settings are composed.
    choices = any(one.split("=")[0].strip() in conf_files.groups() for one in changed)
    now = (
        configure.load(changed, folder / start.SETTINGS)
        if choices
        else configure.from_dict(document["settings"], changed)
    )
    old, new = comparable(before), comparable(now)
    if other := ", ".join(name for name in sorted({*old, *new}) if old.get(name) != new.get(name)):
        raise ConfigError(f"{other} cannot change while a cross-validation is resumed: start a new one")
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
    many = cluster.count(settings.kfold.workers, settings, settings.kfold.engine)
    display.say(f"Cross-validation of recipe {settings.recipe.name} in {settings.kfold.n_splits} folds: {study.folder}")
    found = folds.examine(settings, recipe.sides)
    if all(one.fingerprint for one in found):
        display.say("\n".join([*folds.describe(found), "No group is on both sides of a fold, nor held out by two"]))
    else:
        display.say("What is in the folds is not known: the program did not call fold.split while it was made")
    document = study.before or _begin(settings, found, study.which)
    if document["contents"] != _contents(found):
        raise DataError(f"{study.folder} was begun on other data: put it back, or start a new cross-validation")
    with study.open:
        if study.dry:
            first = folds.of_fold(settings, study.which[0])
            recipe.train(start.Start(first, study.folder, dry=True), console)
            return Ended(CHECKED, study.folder, {**document, "status": CHECKED})
        start.write_settings(start.Start(settings, study.folder, open=study.open))
        document.update(settings=configure.to_dict(settings), status="running", error=None, finished=None)
        document.update(record.this_process(), starts=document.get("starts", 0) + 1)
        return _Running(study, recipe, document, display, console).all(many)


class _Running:
    """The folds on their way, and the document of the whole, written after each change."""

    def __init__(
        self, study: Study, recipe: Recipe, document: dict[str, Any], display: Display, console: Console | None
    ) -> None:
        self.study, self.recipe, self.document, self.say = study, recipe, document, display.say
        self.console, self._copy = console, storage.of(study.settings.run.storage, study.folder)

    def fold(self, fold: int) -> dict[str, Any]:
        """Return the entry of one fold."""
        found: dict[str, Any] = next(one for one in self.document["folds"] if one["fold"] == fold)
        return found

    def note(self, fold: int, **values: Any) -> None:
        """Set values of a fold, and write the document."""
        self.fold(fold).update(values)
        self.save()

    def save(self, *, last: bool = False) -> None:
        """Write the document and its page."""
        done = [one for one in self.document["folds"] if one.get("status") == "finished"]
        self.document["metrics"] = {kind: spread([one.get(kind) or {} for one in done]) for kind in ("best", "last")}
        self.document["updated"] = time.time()
        report.SCHEMA.write(self.study.folder, self.document)
        write_view(report.build(self.document), self.study.folder / PAGE)
        if self._copy:
            self._copy.push(self.say, _STORED, last=last)

    def all(self, many: int) -> Ended:
        """Run the folds that are left, ``many`` at a time, and settle the whole however it ends."""
        study, status = self.study, "failed"
        error: str | None = None
        left = [fold for fold in study.which if self.fold(fold)["status"] != "finished"]
        self.save()
        try:
            apart = study.settings.kfold.engine == "ray" or (many > 1 and len(left) > 1)
            stopped = self.at_once(left, many) if apart else self.by_turns(left)
            states = [self.fold(fold)["status"] for fold in study.which]
            status = "interrupted" if stopped else "failed" if "failed" in states else "finished"
        except KeyboardInterrupt:
            status = "interrupted"
        except BaseException as failure:
            error = _words(failure)
            raise
        finally:
            if status != "finished":
                self.say(f"{status.capitalize()}. Finished folds are kept. Resume with: {study.again}")
            self.document.update(status=status, error=error, finished=time.time())
            self.save(last=True)
            self.say(f"Report of the folds: {study.folder / PAGE}")
        return Ended(status, study.folder, self.document)

    def by_turns(self, left: Sequence[int]) -> bool:
        """Run folds in this process; returns whether somebody interrupted."""
        study = self.study
        for position, fold in enumerate(left):
            if position:
                _forget()
            self.say(f"\nFold {fold} of {study.settings.kfold.n_splits}")
            self.note(fold, status="running", error=None)
            runs = len(left) - position
            try:
                found = train_fold(study.settings, study.folder, fold, runs, study.again, self.recipe, self.console)
                stop = found.pop("stop")
                self.note(fold, **found)
            except KeyboardInterrupt:
                self.note(fold, status="interrupted", **facts(study.folder / f"fold-{fold}"))
                raise
            except Exception as error:
                self.failed(fold, error)
                if isinstance(error, _END_ALL):
                    raise
                stop = wished(error)
            if self.fold(fold)["status"] == "interrupted" or (stop and fold != left[-1]):
                return True
        return False

    def failed(self, fold: int, error: BaseException) -> None:
        """Write down that a fold failed, with its cause."""
        if not isinstance(error, HotloopError):
            traceback.print_exception(error, file=sys.stderr)
        self.say(f"Fold {fold} failed: {_words(error)}")
        self.note(fold, status="failed", error=_words(error), **facts(self.study.folder / f"fold-{fold}"))

    def at_once(self, left: Sequence[int], many: int) -> bool:
        """Run folds in worker processes, one fold each; returns whether somebody interrupted.

        Raises:
            ConfigError, DataError, MissingExtraError, StepLostError: a fold did, and no other fold can run.
        """
        study, waiting, at = self.study, collections.deque(left), dict[int, int]()
        begun: collections.Counter[int] = collections.Counter()

        def more(number: int) -> dict[str, Any] | None:
            if not waiting:
                return None
            fold = at[number] = waiting.popleft()
            begun[fold] += 1
            self.say(f"Fold {fold} began (worker {number}, its output: {pool.log(number)})")
            self.note(fold, status="running", error=None)
            settings = configure.to_dict(study.settings)
            return {"settings": settings, "folder": str(study.folder), "fold": fold, "again": study.again}

        def over(one: workers.Ended) -> None:
            fold = at.pop(one.number)
            folder = study.folder / f"fold-{fold}"
            if one.died and begun[fold] < ATTEMPTS:
                self.say(f"Fold {fold}: its worker died ({one.died}); it goes on from its checkpoint")
                waiting.appendleft(fold)
                return
            storage.bring(storage.of(study.settings.run.storage, folder, study.folder), self.say)
            if one.result:
                self.note(fold, **one.result)
                self.say(f"Fold {fold} {one.result['status']}: {figures(one.result['best'])}".rstrip(": "))
            elif isinstance(one.error, KeyboardInterrupt):
                self.note(fold, status="interrupted", **facts(folder))
            else:
                died = HotloopError(f"its worker died ({one.died}), and so did the one before")
                self.failed(fold, one.error or died)
                if isinstance(one.error, _END_ALL):
                    raise one.error

        with cluster.pool(_WORKER, study.settings, study.settings.kfold.engine, study.folder / "workers") as pool:
            return cluster.watch(pool, study.settings, many, more, over, lambda: None)


def work(settings: dict[str, Any], folder: str, fold: int, again: str) -> dict[str, Any]:
    """Train one fold in a worker's process, and return its entry in the document."""
    whole, place = configure.from_dict(settings), Path(folder)
    recipe = importlib.import_module("hotloop.recipes").load(whole.recipe.name)
    with folder_held(place / f"fold-{fold}", _PATIENCE_SECONDS):
        found = train_fold(whole, place, fold, 1, again, recipe, None)
    del found["stop"]
    return found


def train_fold(  # noqa: PLR0913, PLR0917 - a fold, and what it is part of
    settings: Settings, study: Path, fold: int, runs: int, again: str, recipe: Recipe, console: Console | None
) -> dict[str, Any]:
    """Train a fold from its start, or from its last checkpoint, after a search of its own where there is one.

    Args:
        settings: of the whole.
        study: the folder of the whole.
        fold: its number.
        runs: how many folds, this one included, will use what is compiled in this process.
        again: the command that goes on with the whole.
        recipe: trains.
        console: prints.

    Returns:
        The fold's entry in the document, and ``stop``: somebody wished to, when it was too late for this fold.
    """
    folder, one, say = study / f"fold-{fold}", folds.of_fold(settings, fold), Display(console).say
    found: dict[str, Any] = {"error": None}
    if (trials := settings.kfold.inner_trials) is not None:
        later = (runs - 1) * trials
        say(f"Inner search: {trials} trials on the training side of fold {fold}, in {folder / SEARCH}")
        # One that is done gives its values again.
        chosen = command.nested(folds.with_search(settings, fold), folder / SEARCH, trials, say, later)
        say(f"Inner search of fold {fold} chose: {' '.join(chosen) or 'no change'}")
        one = configure.from_dict(configure.to_dict(one), chosen)
        runs += later * settings.kfold.inner_splits
        found["chosen"] = list(chosen)
    within = Within(runs=runs, study=study.name, fold=fold, folder=study, resume=again)
    outcome = recipe.train(start.take_up(one, folder, within), console)
    found.update(status=outcome.status, step=outcome.step, best_step=outcome.best_step, best=dict(outcome.best))
    return {**found, **facts(folder), "stop": outcome.stop}


def judge(folder: Path, fold: int | None, recipe: Recipe, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Judge the best checkpoint of one fold, or of every fold that has one, on its own held-out rows.

    Raises:
        ConfigError: there is no such fold, or no checkpoint of any.
    """
    known = [one["fold"] for one in report.load(folder)["folds"]]
    kept = {one: folder / f"fold-{one}" / checkpoint.FOLDER for one in known if fold in (None, one)}
    # A program without a goal has no best validation.
    has_best = getattr(recipe, "GOAL", None) or any((one / checkpoint.BEST).is_file() for one in kept.values())
    name = checkpoint.BEST if has_best else checkpoint.LAST
    paths = {one: path / name for one, path in kept.items() if (path / name).is_file()}
    if not paths:
        raise ConfigError(f"fold={fold}: {folder} has the folds {', '.join(map(str, known))}, and no such checkpoint")
    found = []
    for one, path in paths.items():
        document = checkpoint.load(path)
        settings = start.settings_to_judge(document, overrides)
        metrics = recipe.evaluate(settings, checkpoint.judged(document))
        step = document["position"]["step"]
        found.append({"fold": one, "checkpoint": str(path), "step": step, "metrics": metrics})
    return found


def _begin(settings: Settings, contents: Sequence[Sides], which: Iterable[int]) -> dict[str, Any]:
    return {
        "schema": report.SCHEMA.version,
        "recipe": settings.recipe.name,
        "created": time.time(),
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
        # "nan" is read as well: a fold that has it must be seen.
        values = torch.tensor([float(one[name]) for one in metrics], dtype=torch.float64)
        found[name] = {"mean": values.mean().item(), "std": values.std().item() if len(values) > 1 else None}
    return found


def _words(error: BaseException) -> str:
    said = " ".join(str(error).split())
    return (said if isinstance(error, HotloopError) else f"{type(error).__name__}: {said}")[: record.ERROR_LENGTH]


def _forget() -> None:
    """Free the memory of a fold's model before the next one is made; compiled code stays."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
