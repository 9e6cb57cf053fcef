"""Cross-validation: each fold an ordinary run in a folder of its own, and a summary of all of them.

``STUDY/fold-0``, ``fold-1``, ... are run folders like any other: record, report, settings, checkpoints. What is known
of the whole is in ``STUDY/kfold.json`` and on ``STUDY/report.html``, both written anew after each fold. A fold is done
once the document says so; one that is not goes on from its own last checkpoint, so that a kill at any moment costs the
steps behind that and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import traceback
from typing import TYPE_CHECKING, Any

import torch

from hotloop import record
from hotloop.errors import ConfigError, DataError, HotloopError, MissingExtraError, StepLostError
from hotloop.report import folds as report
from hotloop.train import (
    checkpoint,
    compiling,
    conf_files,
    configure,
    environment,
    folds,
    gpus,
    idle,
    kfold_state,
    program,
    run_storage,
    start,
)
from hotloop.train.cluster import connected
from hotloop.train.display import Display, figures
from hotloop.train.fold_workers import FoldWorkers
from hotloop.train.interrupt import Interrupt, wished
from hotloop.train.kfold_state import State
from hotloop.train.nested import leaves
from hotloop.train.one_fold import OneFold, words
from hotloop.train.outcome import CHECKED
from hotloop.train.scope import DECISIVE, STILL_COMPARABLE
from hotloop.train.search import space
from hotloop.train.search.nested import check
from hotloop.train.search.preparing import prepared
from hotloop.train.turn import folder_held

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from hotloop.train.cluster import Cluster
    from hotloop.train.recipe import Recipe
    from hotloop.train.settings import Settings

SPLITS = 5
"""Folds of a plain ``hotloop kfold``."""


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
        settings = prepared(configure.load_search(overrides, config))
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
        free = any(f"{name}.".startswith(f"{one}.") for one in STILL_COMPARABLE) and name not in DECISIVE
        if not free and old.get(name) != new.get(name):
            raise ConfigError(
                f"{name} cannot change while a cross-validation is resumed ({old.get(name)!r} to {new.get(name)!r}): "
                "its folds could not be compared. Start a new one, in another run.folder"
            )
    run_storage.check_resumed(now.run.storage, folder)
    return Study(now, folder, document, open=held)


def run(study: Study, recipe: Recipe, console: Console | None = None) -> Ended:
    """Run the folds that are not done yet, one after another, and sum them up.

    A fold that fails is recorded with its cause, and the others still run.

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
        raise ConfigError(
            f"recipe={settings.recipe.name} cannot be split into folds: it has no function `sides` (see "
            "hotloop.recipes.Recipe). Leave kfold.n_splits out"
        )
    # What can be refused is refused here, before anything is loaded or written.
    _check_search(settings)
    if settings.kfold.engine == "ray":
        with connected(settings, "kfold.engine"):
            pass  # what is wrong with it is told now; what a node's device cannot do, its first fold says
    else:
        device = environment.device_of(settings.run)
        if recipe.COMPONENTS:
            compiling.check(compiling.plan(settings, recipe.COMPONENTS), settings, device.type)
    display.say(f"Cross-validation of recipe {settings.recipe.name} in {settings.kfold.n_splits} folds: {study.folder}")
    found = folds.examine(settings, recipe.sides)
    if all(one.fingerprint for one in found):
        table = [*folds.describe(found), "No group is on both sides of a fold, nor held out by two of them"]
        display.say("\n".join(table))
    else:
        display.say("What is in the folds is not known: the program did not call fold.split while it was made")
    document = study.before or kfold_state.begin(settings, found, study.which)
    if document["contents"] != kfold_state.contents_of(found):
        raise DataError(
            f"{study.folder} was begun on other data than its settings give now: put the data back as it was, or start "
            "a new cross-validation without run.resume"
        )
    if study.dry:
        return _checked(study, document, recipe, console)
    start.write_settings(start.Start(settings, study.folder, open=study.open))
    document.update(settings=configure.to_dict(settings), status="running", error=None, finished=None)
    document.update(record.this_process(), starts=document.get("starts", 0) + 1)
    state = State(study.folder, document, display.say)
    state.save()
    with study.open:
        return _Running(study, recipe, state, display, console).all()


def _checked(study: Study, document: dict[str, Any], recipe: Recipe, console: Console | None) -> Ended:
    """Check the run of the first fold, as a dry run does."""
    with study.open:
        first = folds.of_fold(study.settings, study.which[0])
        recipe.train(start.Start(first, study.folder, dry=True), console)
    return Ended(CHECKED, study.folder, {**document, "status": CHECKED})


class _Running:
    """The folds on their way.

    Args:
        study: the cross-validation.
        recipe: trains a fold.
        state: what is known of it.
        display: prints.
        console: what a fold prints to.
    """

    def __init__(self, study: Study, recipe: Recipe, state: State, display: Display, console: Console | None) -> None:
        self.study, self.state, self.display = study, state, display
        self.fold = OneFold(study.settings, study.folder, study.again, recipe, console)
        self.stop = False  # somebody wished it, too late for the fold that ran

    def all(self) -> Ended:
        """Run what is left, and settle the whole however it ends."""
        status, error = "failed", None
        try:
            status = self.rest()
        except KeyboardInterrupt:
            status = "interrupted"
        except BaseException as failure:
            error = words(failure)
            raise
        finally:
            if status == "interrupted":
                self.display.say(f"Interrupted. Finished folds are kept. Resume with: {self.study.again}")
            self.state.settle(status, error)
        return Ended(status, self.study.folder, self.state.document)

    def rest(self) -> str:
        """Run the folds that are not done; gives the status of the whole."""
        which = self.study.which
        left = [fold for fold in which if self.state.fold(fold)["status"] != "finished"]
        for fold in which:
            if fold not in left:
                best = self.state.fold(fold).get("best") or {}
                self.display.say(f"Fold {fold}: finished by an earlier start: {figures(best)}")
        settings, asked = self.study.settings, self.study.settings.kfold.workers
        if settings.kfold.engine == "ray":
            with connected(settings, "kfold.engine") as cluster:
                ended = self.at_once(left, cluster.room if asked == "auto" else asked, cluster)
        elif (workers := gpus.workers(asked, settings)) > 1 and len(left) > 1:
            ended = self.at_once(left, workers)
        else:
            ended = self.by_turns(left)
        if not ended:
            return "interrupted"
        failed = [fold for fold in which if self.state.fold(fold)["status"] == "failed"]
        if failed:
            names = ", ".join(map(str, failed))
            self.display.say(f"Failed: fold {names}. What finished is kept; to try again: {self.study.again}")
        return "failed" if failed else "finished"

    def by_turns(self, left: Sequence[int]) -> bool:
        """Run folds in this process; says whether all have ended by themselves."""
        for position, fold in enumerate(left):
            if position:
                _forget()
            self.display.say(f"\nFold {fold} of {self.study.settings.kfold.n_splits}")
            status = self.one(fold, runs=len(left) - position)
            if status == "interrupted" or (self.stop and fold != left[-1]):
                return False
            self.state.write_page()
        return True

    def at_once(self, left: Sequence[int], workers: int, cluster: Cluster | None = None) -> bool:
        """Run folds in worker processes, here or on a cluster; says whether all have ended by themselves."""
        study = self.study
        job: dict[str, Any] = {"settings": configure.to_dict(study.settings), "folder": str(study.folder)}
        job.update(again=study.again, away=cluster is not None)
        with Interrupt("finishing the steps of all folds, then saving") as interrupt:
            pool = FoldWorkers(job, study.settings, self.state, self.display.say, min(workers, len(left)), cluster)
            return pool.run(left, lambda: interrupt.signal is not None)

    def one(self, fold: int, runs: int) -> str:
        """Run one fold, or go on with it; gives how it ended. A failure is noted with its cause."""
        self.state.note(fold, status="running", error=None)
        folder = self.study.folder / f"fold-{fold}"
        known = self.state.fold(fold).get("chosen")
        try:
            outcome = self.fold.train(fold, runs, known, lambda chosen: self.state.note(fold, chosen=chosen))
        except KeyboardInterrupt:
            self.state.note(fold, status="interrupted", **kfold_state.facts(folder))
            raise
        except (ConfigError, DataError, MissingExtraError, StepLostError) as error:
            # The user's to mend before any other fold can run, or a GPU that no other fold can use.
            self.state.note(fold, status="failed", error=words(error), **kfold_state.facts(folder))
            raise
        except Exception as error:  # noqa: BLE001 - whatever ends one fold is told, and costs no other fold
            if not isinstance(error, HotloopError):
                traceback.print_exception(error, file=sys.stderr)
            self.display.say(f"Fold {fold} failed: {words(error)}")
            self.state.note(fold, status="failed", error=words(error), **kfold_state.facts(folder))
            self.stop = wished(error)
            return "failed"
        self.stop = outcome.stop
        self.state.note(fold, **kfold_state.ended(outcome, folder))
        return outcome.status


def _check_search(settings: Settings) -> None:
    """Refuse, before hours of it, an inner search that cannot begin.

    Raises:
        ConfigError: its space or ``hpo.trial`` cannot be used, or names the data, the folds or the run itself.
    """
    if settings.kfold.inner_trials is not None:
        check(settings)


def _forget() -> None:
    """Free the memory of a fold's model before the next one is made; compiled code stays."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
