"""A study of Optuna's in its storage, and the loop in which a worker runs its trials.

A trial whose worker died is put back with the same values, and so is one that was interrupted. Nothing that decides
about the next trial is kept in a process, so any of them may die at any moment.
"""

from __future__ import annotations

import json
import math
import re
import time
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    RunPrunedError,
    SearchStoppedError,
    StepLostError,
    TrainingFailedError,
)
from hotloop.train import configure
from hotloop.train.interrupt import wished
from hotloop.train.nested import leaves
from hotloop.train.optional import require
from hotloop.train.scope import DECISIVE, STILL_COMPARABLE
from hotloop.train.search import space as spaces
from hotloop.train.search import trial as trials
from hotloop.train.search.trial import Asked, folds_of, settings_of, study_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    import optuna

    from hotloop.train.settings import Settings

FILE = "study.db"
WORKER, CAUSE = "worker", "cause"
"""Attributes of a trial: its process, and why it failed."""
_SETTINGS, _EXHAUSTED = "settings", "exhausted"
"""Attributes of a study: what its trials are compared by, and that a grid has no value left."""
_FREE = (
    "n_trials", "workers", "engine", "timeout_seconds", "storage", "folder", "heartbeat_seconds", "keep_checkpoints",
)  # fmt: skip
"""Settings of the group ``hpo`` that may be others each time a study goes on."""
GIVE_UP_AFTER = 5
"""Trials that fail one after another, after which a search stops."""
_RETRIES = 2
"""How often a trial is begun again after its worker died."""
_ENDS_ALL = (KeyboardInterrupt, DataError, MissingExtraError, SearchStoppedError)
"""What any other trial would meet as well: the trial is put back, and the search ends."""


class _FailedError(Exception):
    """A trial failed; its cause is written down in the study."""


_NAMED_SECONDS = 5.0
"""Until the process that has begun a trial must have written down which one it is."""


class Study:
    """One study in its storage.

    Args:
        settings: the search's; a study that is there already has to have the same.
        folder: its folder.
        proxy: ``host:port`` of a process that has the storage; None opens it here.

    Raises:
        ConfigError: the study was begun with other settings, or its storage cannot be opened.
    """

    def __init__(self, settings: Settings, folder: Path, proxy: str | None = None) -> None:
        self._optuna: Any = require("optuna", "hotloop hpo", "search")
        self._optuna.logging.set_verbosity(self._optuna.logging.ERROR)
        warnings.filterwarnings("ignore", category=self._optuna.exceptions.ExperimentalWarning)
        self.settings, self.folder, self._states = settings, folder, self._optuna.trial.TrialState
        self.url = settings.hpo.storage or default_url(folder)
        self.space = spaces.parse(settings)
        try:
            self.storage = self._proxied(proxy) if proxy else self._opened()
            self.study = self._created()
        except (ConfigError, MissingExtraError):
            raise
        except Exception as error:  # SQLAlchemy, SQLite and psycopg have classes of their own
            said = " ".join(str(error).split())[:300]
            raise ConfigError(f"hpo.storage={masked(self.url)} cannot be used: {said}") from error
        self._open = (self._states.RUNNING, self._states.FAIL)
        self._at: int | None = None
        self._stop = False

    # -- what is known ---------------------------------------------------------------------------------------------

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return every trial so far."""
        found: list[optuna.trial.FrozenTrial] = self.study.get_trials(deepcopy=False)
        return found

    def standing(self, every: Iterable[optuna.trial.FrozenTrial] | None = None) -> list[optuna.trial.FrozenTrial]:
        """Return the trials that no later one repeats."""
        every = list(self.trials() if every is None else every)
        repeated = {number for one in every for number in history(one)}
        return [one for one in every if one.number not in repeated]

    def begun(self) -> int:
        """Count the trials that are over or running."""
        return sum(one.state != self._states.WAITING for one in self.standing())

    def left(self) -> int:
        """Count the trials that are neither over nor running; a grid that has no more values has those put back."""
        more = max(0, self.settings.hpo.n_trials - self.begun())
        waiting = self.study.get_trials(deepcopy=False, states=(self._states.WAITING,))
        return min(more, len(waiting)) if _EXHAUSTED in self.study.user_attrs else more

    def best(self) -> optuna.trial.FrozenTrial | None:
        """Return the best complete trial."""
        if not self.study.get_trials(deepcopy=False, states=(self._states.COMPLETE,)):
            return None
        best: optuna.trial.FrozenTrial = self.study.best_trial
        return best

    # -- what is changed -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Put back the trials of a command that was killed, and queue the values that are known beforehand."""
        every = self.trials()
        if any(self._is_nobodys(one) for one in every):  # its worker names itself at once, unless it was killed first
            time.sleep(_NAMED_SECONDS)
            every = self.trials()
        for one in every:
            worker = one.user_attrs.get(WORKER, {})
            killed = worker and record.was_killed({"status": "running", **worker})
            if one.state == self._states.RUNNING and (killed or self._is_nobodys(one)):
                self.again(one)
        for given in () if every else self.settings.hpo.enqueue:
            self.study.enqueue_trial(dict(spaces.flat(given)))

    def _is_nobodys(self, one: optuna.trial.FrozenTrial) -> bool:
        return one.state == self._states.RUNNING and WORKER not in one.user_attrs

    def lost(self, worker: Mapping[str, Any]) -> None:
        """Put back the trial that a worker was at when it died; one of which several died has failed."""
        for one in self.trials():
            about = one.user_attrs.get(WORKER, {})
            if one.state == self._states.RUNNING and all(about.get(key) == value for key, value in worker.items()):
                self.again(one, _RETRIES)

    def again(self, one: optuna.trial.FrozenTrial, most: int | None = None) -> None:
        """End a trial, and queue it anew with the same values, as Optuna does, unless it began so often already."""
        self.study.tell(one.number, state=self._states.FAIL, skip_if_finished=True)
        self._optuna.storages.RetryHeartbeatStaleTrialCallback(max_retry=most)(self.study, one)

    def run(
        self,
        act: Callable[[Asked], float] | None = None,
        worker: Mapping[str, Any] | None = None,
        until: float = math.inf,
        later: int = 0,
    ) -> None:
        """Run trials in this process until none is left.

        Args:
            act: runs a trial; None trains the recipe.
            worker: what distinguishes this worker.
            until: `time.time` after which no trial is begun.
            later: trials of later searches that will use what is compiled in this one.

        Raises:
            KeyboardInterrupt: somebody interrupted; the trial is open again, if it was not at its end.
            DataError, MissingExtraError: no trial can run so; the trial is open again.
            SearchStoppedError: trial after trial fails, or there is no such metric.
            StepLostError: a trial took the GPU's context with it, so that this process can run no other.
        """
        about = {**record.this_process(), **(worker or {})}

        def over(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
            self._at = None
            self._tidy(trial)
            self._check_failures()
            if self._stop:
                raise KeyboardInterrupt
            if not self.left() or time.time() >= until:
                study.stop()
            study.sampler = self._sampler(about)

        if not self.left() or time.time() >= until:
            return
        self.study.sampler, self.study.pruner = self._sampler(about), self._pruner()
        objective = self._objective(act or trials.train, about, later)
        try:
            self.study.optimize(objective, callbacks=[over], catch=(_FailedError,), gc_after_trial=True)
        except _ENDS_ALL:
            if self._at is not None and (one := self.trials()[self._at]).state in self._open:
                self.again(one)
            raise
        if self.settings.hpo.sampler == "grid" and self.left() and time.time() < until:
            self.study.set_user_attr(_EXHAUSTED, value=True)

    def _objective(
        self, act: Callable[[Asked], float], worker: Mapping[str, Any], later: int
    ) -> Callable[[optuna.Trial], float]:
        def objective(trial: optuna.Trial) -> float:
            self._at = trial.number
            trial.set_user_attr(WORKER, dict(worker))
            try:
                return self._checked(act(self._asked(trial, later)))
            except _ENDS_ALL:
                raise
            except Exception as error:
                self._stop = self._stop or wished(error)
                trial.set_user_attr(CAUSE, _cause(error))
                if isinstance(error, StepLostError):
                    raise
                raise (self._optuna.TrialPruned if isinstance(error, RunPrunedError) else _FailedError) from error

        return objective

    def _checked(self, value: float) -> float:
        if not math.isfinite(value):
            raise TrainingFailedError(f"the objective {self.settings.hpo.metric} is {value}")
        return float(value)

    def _asked(self, trial: optuna.Trial, later: int) -> Asked:
        folder, hpo = trial_folder(self.folder, trial.number), self.settings.hpo
        values = self.space.suggest(trial, self.settings)

        def report(step: int, value: float) -> None:
            trial.report(value, step)
            if trial.should_prune():
                raise RunPrunedError(f"{hpo.pruner}: {hpo.metric} {value:.4f} at report {step} is not worth more steps")

        def stop() -> None:
            self._stop = True

        return Asked(
            number=trial.number,
            settings=settings_of(self.settings, values, folder),
            values=values,
            folder=folder,
            report=report,
            runs=self.space.shared_runs(1 + self.left() / hpo.at_once + later),
            stop=stop,
        )

    def _tidy(self, ended: optuna.trial.FrozenTrial) -> None:
        """Keep the checkpoints of the best trial alone."""
        best = self.best()
        if best is None or best.number != ended.number:
            trials.drop_checkpoints(trial_folder(self.folder, ended.number))
            return
        for one in self.trials():
            if one.number != ended.number and one.state.is_finished():
                trials.drop_checkpoints(trial_folder(self.folder, one.number))

    def _check_failures(self) -> None:
        ended = [one for one in self.standing() if one.state.is_finished()][-GIVE_UP_AFTER:]
        if len(ended) == GIVE_UP_AFTER and all(one.state == self._states.FAIL for one in ended):
            why = ended[-1].user_attrs.get(CAUSE, "its worker died")
            raise SearchStoppedError(
                f"{len(ended)} trials failed one after another, so the search stops. The last one: {why}. Mend the "
                "cause, and search anew under another hpo.name"
            )

    # -- how it is made --------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        every, storages = self.settings.hpo.heartbeat_seconds, self._optuna.storages
        options: dict[str, Any] = {}
        if self.url.startswith("postgresql://"):
            require("psycopg", "hpo.storage=postgresql://...", "postgres")
        if self.url.startswith("sqlite:///"):
            options = {"connect_args": {"timeout": 60}}
            Path(self.url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        return storages.RDBStorage(
            self.url.replace("postgresql://", "postgresql+psycopg://"),
            engine_kwargs={"pool_pre_ping": True, **options},
            heartbeat_interval=every,
            grace_period=2 * every,
            heartbeat_stale_trial_callback=storages.RetryHeartbeatStaleTrialCallback(max_retry=_RETRIES),
        )

    def _proxied(self, address: str) -> Any:
        name, _, port = address.rpartition(":")
        return self._optuna.storages.GrpcStorageProxy(host=name, port=int(port))

    def _created(self) -> optuna.Study:
        name, ours = study_name(self.settings), comparable(self.settings, (f"hpo.{one}" for one in _FREE))
        study: optuna.Study = self._optuna.create_study(
            study_name=name, storage=self.storage, direction=self.settings.hpo.towards, load_if_exists=True
        )
        theirs = study.user_attrs.get(_SETTINGS)
        if theirs is None:
            study.set_user_attr(_SETTINGS, ours)
        elif theirs != ours:
            other = ", ".join(key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key))
            raise ConfigError(
                f"the study {name} in {masked(self.url)} was begun with other settings: {other}. Go on with those, or "
                "name another study, in a folder of its own: hpo.name=... hpo.folder=..."
            )
        return study

    def _sampler(self, worker: Mapping[str, Any]) -> Any:
        """Make a sampler, seeded by how many trials began: a search that goes on draws as one that never stopped."""
        hpo, quiet = self.settings.hpo, {"warn_independent_sampling": False}
        seed = zlib.crc32(f"{self.settings.run.seed}/{self.begun()}/{worker.get('number', 1)}".encode())
        startup = {"n_startup_trials": hpo.startup_trials}
        makers: dict[str, tuple[str, dict[str, Any]]] = {
            "tpe": ("TPESampler", {**startup, "constant_liar": hpo.at_once > 1}),
            "gp": ("GPSampler", startup),
            "cmaes": ("CmaEsSampler", quiet),
            "qmc": ("QMCSampler", {"scramble": True, **quiet}),
            "random": ("RandomSampler", {}),
            "grid": ("BruteForceSampler", {}),
        }
        name, more = makers[hpo.sampler]
        # One sequence for all trials is evenly spread.
        return getattr(self._optuna.samplers, name)(
            seed=self.settings.run.seed if hpo.sampler == "qmc" else seed, **more
        )

    def _pruner(self) -> Any:
        hpo, trial = self.settings.hpo, settings_of(self.settings, {}, Path())
        most = max(1, len(folds_of(trial)) or trial.training.num_epochs)
        name, more = {
            "median": ("MedianPruner", {"n_startup_trials": hpo.startup_trials}),
            "successive_halving": ("SuccessiveHalvingPruner", {"min_resource": 1}),
            "hyperband": ("HyperbandPruner", {"min_resource": 1, "max_resource": most}),
            "none": ("NopPruner", {}),
        }[hpo.pruner]
        factor = {"reduction_factor": hpo.reduction_factor} if "min_resource" in more else {}
        return getattr(self._optuna.pruners, name)(**more, **factor)


def history(one: optuna.trial.FrozenTrial) -> list[int]:
    """Return the numbers of the trials that a trial repeats."""
    found: list[int] = one.system_attrs.get("retry_history", [])
    return found


def trial_folder(folder: Path, number: int) -> Path:
    """Return the folder of a trial."""
    return folder / "trials" / f"{number:04d}"


def comparable(settings: Settings, free: Iterable[str] = ()) -> dict[str, Any]:
    """Return the settings by which runs are compared, as flat JSON data; ``free`` are not among them."""
    flat, out = leaves(json.loads(json.dumps(configure.to_dict(settings)))), (*free, *STILL_COMPARABLE)
    return {key: value for key, value in flat if key in DECISIVE or not spaces.is_within(key, out)}


def default_url(folder: Path) -> str:
    """Return the URL of the file that a study has in its own folder."""
    return f"sqlite:///{folder.resolve() / FILE}"


def masked(url: str) -> str:
    """Return a URL as it may be shown and written down: without its password."""
    return re.sub(r"([?&]password=)[^&]*", r"\1***", re.sub(r"(://[^/@:]*):[^@]*@", r"\1:***@", url))


def _cause(error: BaseException) -> str:
    """Return why a trial failed; our own errors speak for themselves."""
    text = " ".join((error.alone if isinstance(error, TrainingFailedError) else str(error)).split())
    ours = type(error).__module__ == "hotloop.errors" and text
    return (text if ours else f"{type(error).__name__}: {text}".rstrip(": "))[: record.ERROR_LENGTH]
