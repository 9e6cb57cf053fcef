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
WORKER, DRAWN, DIED, CAUSE = "worker", "drawn", "died", "cause"
"""Attributes of a trial: its process, whether it has all its values, how many workers died of it, why it failed."""
_HISTORY = "retry_history"
"""The attribute in which Optuna keeps the numbers of the trials that a trial repeats."""
_SETTINGS = "settings"
_FREE = (
    "n_trials", "workers", "engine", "timeout_seconds", "storage", "folder", "heartbeat_seconds", "keep_checkpoints",
)  # fmt: skip
"""Settings of the group ``hpo`` that may be others each time a study goes on."""
GIVE_UP_AFTER = 5
"""Trials that fail one after another, after which a search stops."""
_DEATHS = 2
"""Workers that may die of a trial before it has failed."""
_LOCKED_SECONDS = 60


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
        except ConfigError:
            raise
        except Exception as error:  # SQLAlchemy, SQLite and psycopg have classes of their own
            raise ConfigError(
                f"hpo.storage={masked(self.url)} cannot be used: {' '.join(str(error).split())[:300]}"
            ) from error
        self.study.pruner, self.study.sampler = self._pruner(), self._drawing()
        self._stop = False

    # -- what is known ---------------------------------------------------------------------------------------------

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return every trial so far."""
        found: list[optuna.trial.FrozenTrial] = self.study.get_trials(deepcopy=False)
        return found

    def standing(self, every: Iterable[optuna.trial.FrozenTrial] | None = None) -> list[optuna.trial.FrozenTrial]:
        """Return the trials that no later one repeats."""
        every = list(self.trials() if every is None else every)
        repeated = {number for one in every for number in one.system_attrs.get(_HISTORY, ())}
        return [one for one in every if one.number not in repeated]

    def left(self, every: Iterable[optuna.trial.FrozenTrial] | None = None) -> int:
        """Count the trials that are neither over nor running."""
        begun = sum(one.state != self._states.WAITING for one in self.standing(every))
        wanted: int = self.settings.hpo.n_trials
        return max(0, wanted - begun)

    def best(self, every: Iterable[optuna.trial.FrozenTrial] | None = None) -> optuna.trial.FrozenTrial | None:
        """Return the best complete trial."""
        done = [one for one in self.standing(every) if one.state == self._states.COMPLETE]
        choose = max if self.settings.hpo.towards == "maximize" else min
        return choose(done, key=lambda one: one.value or 0.0, default=None)

    # -- what is changed -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Put back the trials of a command that was killed, and queue the values that are known beforehand."""
        for one in self.trials():
            worker = one.user_attrs.get(WORKER)
            if one.state == self._states.RUNNING and worker and record.was_killed({"status": "running", **worker}):
                self.again(one, died=False)
        first = list(self.settings.hpo.enqueue)
        more = spaces.grid(self.space, self.settings) if self.settings.hpo.sampler == "grid" else ()
        if not self.trials():
            for given in [*(dict(spaces.flat(one)) for one in first), *more][: self.settings.hpo.n_trials]:
                self.study.enqueue_trial(given)

    def lost(self, worker: Mapping[str, Any]) -> None:
        """Put back the trial that a worker was at when it died."""
        for one in self.trials():
            about = one.user_attrs.get(WORKER, {})
            if one.state == self._states.RUNNING and all(about.get(key) == value for key, value in worker.items()):
                self.again(one, died=True)

    def again(self, one: optuna.trial.FrozenTrial, *, died: bool) -> None:
        """End a trial, and queue it anew with the same values; one of which several workers died has failed."""
        deaths = one.user_attrs.get(DIED, 0) + died
        if one.state == self._states.RUNNING:
            if deaths >= _DEATHS:
                self.storage.set_trial_user_attr(one._trial_id, CAUSE, "its worker died, and so did the one before")  # noqa: SLF001 - storages know trials by nothing else
            self.study.tell(one.number, state=self._states.FAIL, skip_if_finished=True)
        if deaths < _DEATHS:
            drawn = one.user_attrs.get(DRAWN)
            history = [*one.system_attrs.get(_HISTORY, ()), one.number]
            queued = self._optuna.create_trial(
                state=self._states.WAITING,
                params=one.params if drawn else {},
                distributions=one.distributions if drawn else {},
                user_attrs={DIED: deaths},
                system_attrs={"failed_trial": history[0], _HISTORY: history, **_fixed(one)},
            )
            self.study.add_trial(queued)

    def run(
        self,
        objective: Callable[[Asked], float] | None = None,
        worker: Mapping[str, Any] | None = None,
        until: float = math.inf,
        later: int = 0,
    ) -> None:
        """Run trials in this process until none is left.

        Args:
            objective: runs a trial; None trains the recipe.
            worker: what distinguishes this worker.
            until: `time.time` after which no trial is begun.
            later: trials of later searches that will use what is compiled in this one.

        Raises:
            KeyboardInterrupt: somebody interrupted; the trial is open again, if it was not at its end.
            ConfigError, DataError, MissingExtraError: no trial can run so; the trial is open again.
            SearchStoppedError: trial after trial fails, or there is no such metric.
            StepLostError: a trial took the GPU's context with it, so that this process can run no other.
        """
        act = objective or trials.train
        while time.time() < until:
            every = self.trials()
            self._check_failures(every)
            if not self.left(every):
                return
            self._one(act, {**record.this_process(), **(worker or {})}, later)
            if self._stop:
                raise KeyboardInterrupt

    def _one(self, act: Callable[[Asked], float], worker: Mapping[str, Any], later: int) -> None:
        """Run one trial; its failure is written down, and only one that no other trial would escape is raised."""
        at: list[int] = []

        def objective(trial: optuna.Trial) -> float:
            at.append(trial.number)
            trial.set_user_attr(WORKER, dict(worker))
            values = self.space.suggest(trial, self.settings)
            trial.set_user_attr(DRAWN, True)
            try:
                return self._checked(act(self._asked(trial, values, later)))
            except RunPrunedError as error:
                trial.set_user_attr(CAUSE, str(error))
                self._stop = self._stop or wished(error)
                raise self._optuna.TrialPruned(str(error)) from error
            except Exception as error:
                trial.set_user_attr(CAUSE, _cause(error))
                raise

        try:
            self.study.optimize(objective, n_trials=1)
        except (Exception, KeyboardInterrupt) as error:
            if not at or isinstance(error, StepLostError):
                raise
            if self._ends_all(error):
                self.again(self.trials()[at[0]], died=False)
                raise
            self._stop = self._stop or wished(error)
        self._tidy(at[0])

    def _checked(self, value: float) -> float:
        if not math.isfinite(value):
            raise TrainingFailedError(f"the objective {self.settings.hpo.metric} is {value}")
        return float(value)

    def _ends_all(self, error: BaseException) -> bool:
        """Return whether an error would end any other trial too; of a searched setting another value may do."""
        if isinstance(error, ConfigError):
            return not any(_names(one.name, str(error)) for one in self.space.searched)
        return isinstance(error, KeyboardInterrupt | DataError | MissingExtraError | SearchStoppedError)

    def _asked(self, trial: optuna.Trial, values: Mapping[str, Any], later: int) -> Asked:
        folder, hpo = trial_folder(self.folder, trial.number), self.settings.hpo
        every = self.trials()
        best = self.best(every)

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
            runs=self.space.shared_runs(1 + self.left(every) / hpo.at_once + later),
            best=best.value if best else None,
            stop=stop,
        )

    def _tidy(self, number: int) -> None:
        """Keep the checkpoints that the settings say, and give memory back that the next trial needs."""
        trials.give_memory_back()
        keep = None
        every = self.trials()
        if self.settings.hpo.keep_checkpoints == "best" and (best := self.best(every)):
            keep = best.number
        for one in every:
            if one.number != keep and one.state.is_finished():
                trials.drop_checkpoints(trial_folder(self.folder, one.number))
        if keep == number:
            trials.drop_last(trial_folder(self.folder, number))

    def _check_failures(self, every: list[optuna.trial.FrozenTrial]) -> None:
        ended = [one for one in self.standing(every) if one.state.is_finished()][-GIVE_UP_AFTER:]
        if len(ended) == min(GIVE_UP_AFTER, self.settings.hpo.n_trials) and all(
            one.state == self._states.FAIL for one in ended
        ):
            why = ended[-1].user_attrs.get(CAUSE, "its worker died")
            raise SearchStoppedError(
                f"{len(ended)} trials failed one after another, so the search stops. The last one: {why}. Mend the "
                "cause, and search anew under another hpo.name"
            )

    # -- how it is made --------------------------------------------------------------------------------------------

    def _opened(self) -> Any:
        sql = require("sqlalchemy", "hotloop hpo", "search")
        url = sql.engine.make_url(self.url)
        options: dict[str, Any] = {"connect_args": {"timeout": _LOCKED_SECONDS}}
        if url.get_backend_name() == "postgresql":
            require("psycopg", "hpo.storage=postgresql://...", "postgres")
            url = url.set(drivername="postgresql+psycopg")
            options = {"connect_args": {"connect_timeout": 10}, "pool_pre_ping": True}
        elif url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
            Path(url.database).parent.mkdir(parents=True, exist_ok=True)
        else:
            raise ConfigError(
                f"hpo.storage={masked(self.url)}: expected postgresql://user@host/database, sqlite:///file, or null"
            )
        every = self.settings.hpo.heartbeat_seconds
        storages = self._optuna.storages
        retry = storages.RetryHeartbeatStaleTrialCallback(max_retry=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return storages.RDBStorage(
                url.render_as_string(hide_password=False),
                engine_kwargs=options,
                heartbeat_interval=every,
                grace_period=2 * every,
                heartbeat_stale_trial_callback=retry,
            )

    def _proxied(self, address: str) -> Any:
        name, _, port = address.rpartition(":")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            return self._optuna.storages.GrpcStorageProxy(host=name, port=int(port))

    def _created(self) -> optuna.Study:
        name, towards, ours = study_name(self.settings), self.settings.hpo.towards, comparable(self.settings)
        made = {"study_name": name, "storage": self.storage, "direction": towards}
        study: optuna.Study = self._optuna.create_study(**made, load_if_exists=True)
        theirs = study.user_attrs.get(_SETTINGS)
        if theirs is not None and theirs != ours:
            if any(one.state.is_finished() and one.state != self._states.FAIL for one in study.get_trials()):
                other = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
                changed = "; ".join(f"{one} {theirs.get(one)!r}, now {ours.get(one)!r}" for one in other)
                raise ConfigError(
                    f"the study {name} in {masked(self.url)} was begun with other settings: {changed}. Go on with "
                    "those, or name another study, in a folder of its own: hpo.name=... hpo.folder=..."
                )
            self._optuna.delete_study(study_name=name, storage=self.storage)  # none of its trials would be missed
            study = self._optuna.create_study(**made)
            theirs = None
        if theirs is None:
            study.set_user_attr(_SETTINGS, ours)
        return study

    def _drawing(self) -> Any:
        """Make a sampler that is seeded anew for each trial by how many stand before it: any worker draws alike."""
        whole = self

        class Drawing(self._optuna.samplers.BaseSampler):  # type: ignore[misc, name-defined]
            own = whole._sampler(0)  # of a process that tells how a trial ended, and draws none

            def before_trial(self, study: Any, trial: Any) -> None:  # noqa: ARG002 - Optuna's own signature
                self.own = whole._sampler(sum(one.number < trial.number for one in whole.standing()))

            def infer_relative_search_space(self, study: Any, trial: Any) -> Any:
                return self.own.infer_relative_search_space(study, trial)

            def sample_relative(self, study: Any, trial: Any, search_space: Any) -> Any:
                return self.own.sample_relative(study, trial, search_space)

            def sample_independent(self, *given: Any) -> Any:
                return self.own.sample_independent(*given)

            def after_trial(self, *given: Any) -> None:
                self.own.after_trial(*given)

        return Drawing()

    def _sampler(self, number: int) -> Any:
        hpo, samplers = self.settings.hpo, self._optuna.samplers
        seed = zlib.crc32(f"{self.settings.run.seed}/{number}".encode())
        tpe = samplers.TPESampler(seed=seed, n_startup_trials=hpo.startup_trials, constant_liar=hpo.at_once > 1)
        if hpo.sampler in ("random", "grid"):
            return samplers.RandomSampler(seed=seed)
        if hpo.sampler == "qmc":  # one sequence for all trials
            return samplers.QMCSampler(seed=self.settings.run.seed, scramble=True, warn_independent_sampling=False)
        if hpo.sampler == "gp":
            return samplers.GPSampler(seed=seed, n_startup_trials=hpo.startup_trials, independent_sampler=tpe)
        if hpo.sampler == "cmaes":
            require("cmaes", "hpo.sampler=cmaes", "search")
            return samplers.CmaEsSampler(seed=seed, independent_sampler=tpe, warn_independent_sampling=False)
        return tpe

    def _pruner(self) -> Any:
        hpo, pruners = self.settings.hpo, self._optuna.pruners
        trial = settings_of(self.settings, {}, Path())
        most = len(folds_of(trial)) or trial.training.num_epochs
        if hpo.pruner == "median":
            return pruners.MedianPruner(n_startup_trials=hpo.startup_trials)
        if hpo.pruner == "successive_halving":
            return pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=hpo.reduction_factor)
        if hpo.pruner == "hyperband":
            return pruners.HyperbandPruner(1, max(1, most), hpo.reduction_factor)
        return pruners.NopPruner()


def trial_folder(folder: Path, number: int) -> Path:
    """Return the folder of a trial."""
    return folder / "trials" / f"{number:04d}"


def comparable(settings: Settings) -> dict[str, Any]:
    """Return the settings that make a study what it is, as flat JSON data."""
    flat = {**dict(leaves(configure.to_dict(settings))), "hpo.direction": settings.hpo.towards}
    free = (*(f"hpo.{one}" for one in _FREE), *STILL_COMPARABLE)
    kept = {key: value for key, value in flat.items() if key in DECISIVE or not spaces.is_within(key, free)}
    plain: dict[str, Any] = json.loads(json.dumps(kept))
    return plain


def default_url(folder: Path) -> str:
    """Return the URL of the file that a study has in its own folder."""
    return f"sqlite:///{folder.resolve() / FILE}"


def masked(url: str) -> str:
    """Return a URL as it may be shown and written down: without its password."""
    return re.sub(r"([?&]password=)[^&]*", r"\1***", re.sub(r"(://[^/@:]*):[^@]*@", r"\1:***@", url))


def _fixed(one: optuna.trial.FrozenTrial) -> dict[str, Any]:
    """Return the values that a queued trial was given, under Optuna's own name for them."""
    return {key: value for key, value in one.system_attrs.items() if key == "fixed_params"}


def _cause(error: BaseException) -> str:
    """Return why a trial failed; our own errors speak for themselves."""
    text = " ".join((error.alone if isinstance(error, TrainingFailedError) else str(error)).split())
    ours = type(error).__module__ == "hotloop.errors" and text
    return (text if ours else f"{type(error).__name__}: {text}".rstrip(": "))[: record.ERROR_LENGTH]


def _names(name: str, text: str) -> bool:
    """Return whether a text names a setting, and not another one whose name begins or ends so."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)", text) is not None
