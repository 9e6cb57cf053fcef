"""A worker: takes one trial after another, runs it, and writes down how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import math
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from hotloop.errors import (
    ConfigError,
    DataError,
    MissingExtraError,
    RunPrunedError,
    SearchStoppedError,
    StepLostError,
    TrainingFailedError,
)
from hotloop.train.child import WorkerLostError
from hotloop.train.interrupt import wished
from hotloop.train.mirror import StorageError
from hotloop.train.quantise import shared_runs
from hotloop.train.search import space as spaces
from hotloop.train.search import trial as trials
from hotloop.train.search.study import CAUSE, NUMBER, Outcome, Study, Taken, how_ended
from hotloop.train.search.told import Said, Tell, TrialBegan, TrialEnded, TrialReported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hotloop.errors import HotloopError
    from hotloop.train.search.trial import Asked

    Objective = Callable[[Asked], float | Sequence[float]]

GIVE_UP_AFTER = 5
"""Trials that fail, and none that does not, after which a search stops."""
_SHOWN = 3
_ANEW = "search anew, since failed trials are over: under another hpo.name, or with a higher hpo.n_trials"
_AWAY = 3
"""Trials, with none complete between, that a storage may fail while they are begun."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Which worker of a command this is, and when it ends.

    Args:
        number: from 1.
        deadline: `time.time` after which no trial is begun.
        later: trials of later searches that will use what is compiled in this one: those of the outer folds to come.
    """

    number: int = 1
    deadline: float = math.inf
    later: int = 0


class Worker:
    """Runs trials of a study in this process.

    Args:
        study: the study.
        tell: hears of each trial.
        objective: runs a trial; the recipe's training, or something cheaper in tests of the machinery.
        part: which of the command's workers this is.
    """

    def __init__(self, study: Study, tell: Tell, objective: Objective = trials.train, part: Part | None = None) -> None:
        self.study, self.tell, self.objective, self.part = study, tell, objective, part or Part()
        self.space, self.away, self.stopping, self.frozen = spaces.parse(study.settings), 0, False, False

    def run(self) -> None:
        """Run trials until none is left.

        Raises:
            KeyboardInterrupt: somebody interrupted; the trial is open again, if it was not at its end.
            ConfigError: no trial can run with these settings; the trial is open again.
            DataError: nor with this data; the same.
            MissingExtraError: nor without this package; the same.
            SearchStoppedError: every trial fails, there is no such metric, or the storage is gone.
            StepLostError: a trial took the GPU's context with it, so that this process can run no other.
        """
        while time.time() < self.part.deadline:
            self.check_failures()
            taken = self.study.take()
            if taken is None:
                return
            self.one(taken)
            if self.stopping:
                raise KeyboardInterrupt

    def one(self, taken: Taken) -> None:
        """Run one trial that was taken."""
        began = time.monotonic()
        lost: BaseException | None = None
        with self.beating(taken):
            try:
                outcome = self.judged(self.value(taken))
            except RunPrunedError as error:
                outcome = Outcome("pruned", cause=str(error))
                self.stopping |= wished(error)
            except KeyboardInterrupt as error:
                outcome, lost = Outcome("interrupted", cause="interrupted"), error
            except StepLostError as error:
                outcome, lost = Outcome("failed", cause=_cause(error)), error
            except (ConfigError, DataError, MissingExtraError, SearchStoppedError) as error:
                outcome, lost = self.setup_failure(error)
            except self.study.storage.errors as error:
                outcome, lost = self.storage_failure(error)
            except OSError as error:
                outcome, lost = self.system_failure(error)
            except Exception as error:  # noqa: BLE001 - what a trial dies of is its cause, and no reason to end the study
                lost_away = isinstance(error, WorkerLostError)
                outcome = Outcome("died" if lost_away else "failed", cause=_cause(error))
                self.stopping |= wished(error)
            counts, interrupted = self.finished(taken, outcome)
        lost = lost or interrupted
        if outcome.state == "complete":
            self.away = 0
        best = self.tidy(taken) and counts and outcome.state == "complete"
        seconds = time.monotonic() - began
        self.tell(
            TrialEnded(taken.number, self.part.number, outcome.state, outcome.value, outcome.cause, seconds, best)
        )
        if lost is not None:
            raise lost

    def finished(self, taken: Taken, outcome: Outcome) -> tuple[bool, KeyboardInterrupt | None]:
        """Write down how a trial ended, though a Ctrl-C cuts it off once: the trial would stay "running"."""
        try:
            return self.study.finish(taken, outcome), None
        except KeyboardInterrupt as error:
            return self.study.finish(taken, outcome), error

    def judged(self, values: Sequence[float]) -> Outcome:
        """Say how a trial that ran to its end ended: one of whose objectives is no number has failed."""
        for name, value in zip(self.study.settings.hpo.objectives, values, strict=True):
            if not math.isfinite(value):
                return Outcome("failed", cause=f"the objective {name} is {value}")
        return Outcome("complete", values[0], also=list(values[1:]))

    def setup_failure(self, error: HotloopError) -> tuple[Outcome, HotloopError | None]:
        """Say what a refusal means: no other trial could run either, so this one is open again, and the search ends.

        A setting that is searched is the trial's own affair: another value may do.
        """
        if isinstance(error, ConfigError) and any(_names(one.name, str(error)) for one in self.space.searched):
            return Outcome("failed", cause=_cause(error)), None
        return Outcome("interrupted", cause=_cause(error)), error

    def stop(self) -> None:
        """Note a wish to stop that came too late for the trial that runs: its end is written down first."""
        self.stopping = True

    def storage_failure(self, error: Exception) -> tuple[Outcome, SearchStoppedError | None]:
        """Say what a failure of the storage means: the trial is open again, and a few in a row end the search."""
        self.away += 1
        gone = self.study.storage.gone(error)
        return Outcome("interrupted", cause="the storage did not answer"), gone if self.away > _AWAY else None

    def system_failure(self, error: OSError) -> tuple[Outcome, SearchStoppedError | None]:
        """Say what a failure of the system means: on a full disk no trial can run, and this one is open again."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            return Outcome("failed", cause=_cause(error)), None
        why = f"the disk of {self.study.folder} is full: finished trials are kept; with room, the same command goes on"
        return Outcome("interrupted", cause="the disk is full"), SearchStoppedError(why)

    def value(self, taken: Taken) -> Sequence[float]:
        """Choose a trial's values and run it."""
        study = self.study
        values = self.space.suggest(taken.trial, study.settings)
        self.tell(TrialBegan(taken.number, taken.attempt, self.part.number, values))
        attempts = study.trials()
        best = study.best(attempts)
        asked = trials.Asked(
            number=taken.number,
            settings=trials.settings_of(study.settings, values, taken.folder),
            values=values,
            folder=taken.folder,
            report=lambda step, value: self.report(taken, step, value),
            runs=shared_runs(
                self.space.compiled, 1 + study.left(attempts) / study.settings.hpo.at_once + self.part.later
            ),
            best=best.values[0] if best else None,
            stop=self.stop,
        )
        made = self.objective(asked)
        return [float(made)] if isinstance(made, int | float) else [float(one) for one in made]

    def report(self, taken: Taken, step: int, value: float) -> None:
        """Write an intermediate value down, and ask the pruner; a storage that is away ends no run."""
        self.tell(TrialReported(taken.number, self.part.number, step, value))
        if self.study.settings.hpo.also:  # Optuna takes intermediate values of one metric alone
            return
        try:
            taken.trial.report(value, step)
            pruned = taken.trial.should_prune()
        except self.study.storage.errors as error:
            why = self.study.storage.gone(error)
            self.tell(Said(f"trial {taken.number} goes on without its pruner: {why}", self.part.number))
            return
        if pruned:
            hpo = self.study.settings.hpo
            raise RunPrunedError(f"{hpo.pruner}: {hpo.metric} {value:.4f} at report {step} is not worth going on with")

    @contextlib.contextmanager
    def beating(self, taken: Taken) -> Iterator[None]:
        """Say in the storage, now and then while a trial runs, that its worker lives."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(self.study.settings.hpo.heartbeat_seconds):
                with contextlib.suppress(*self.study.storage.errors):  # whoever needs the storage says that it is away
                    self.study.storage.beat(taken.trial._trial_id)  # noqa: SLF001 - storages know trials by nothing else

        thread = threading.Thread(target=beat, name=f"heartbeat of trial {taken.number}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def tidy(self, taken: Taken) -> bool:
        """Keep the checkpoints that the settings say, and give memory back that the next trial needs.

        Returns:
            Whether the trial is the best of the study.
        """
        self.give_memory_back()
        best = False
        keep, study, storage = self.study.settings.hpo.keep_checkpoints, self.study, self.study.settings.run.storage
        try:
            if keep == "none":
                trials.drop_checkpoints(taken.folder, storage)
            # Nobody else ends a trial meanwhile, so that the best one is not another's a moment later.
            with study.storage.turn():
                found = study.best()
                best = found is not None and found.number == taken.trial.number
                if keep == "best" and best:
                    trials.keep_best_only(taken.folder, study.folders_over(), storage)
                elif keep == "best":
                    trials.drop_checkpoints(taken.folder, storage)
        except (*study.storage.errors, SearchStoppedError):
            return False  # nothing is deleted by guess: whoever is the best next deletes it
        except StorageError as error:
            self.tell(Said(f"{error}; delete them there by hand", self.part.number))
        return best

    def give_memory_back(self) -> None:
        """Free what the trial held on the device."""
        if self.objective is trials.train:
            trials.give_memory_back(first=not self.frozen)
            self.frozen = True

    def check_failures(self) -> None:
        """Stop where every trial fails.

        Raises:
            SearchStoppedError: it is so; the message lists the causes.
        """
        try:
            trials_so_far = self.study.trials()
        except self.study.storage.errors:
            return  # taking the next trial waits for the storage, and says so
        ended = [one for one in trials_so_far if one.state.is_finished() and how_ended(one) != "interrupted"]
        over = [one for one in ended if one.number >= self.study.since]
        wanted = min(GIVE_UP_AFTER, self.study.settings.hpo.n_trials)
        if len(over) < wanted or any(how_ended(one) in ("complete", "pruned") for one in over):
            return
        left = len({one.user_attrs.get(NUMBER) for one in ended}) < self.study.settings.hpo.n_trials
        again = "the same command goes on with the trials that are left" if left else _ANEW
        raise SearchStoppedError(
            f"every trial fails ({len(over)} of {len(over)}), so the search stops. {causes(over)}. Mend the cause, and "
            f"{again}"
        )


def causes(attempts: list[Any]) -> str:
    """List the causes of failed attempts, the most frequent first."""
    found: dict[str, list[int]] = {}
    for one in attempts:
        cause = str(one.user_attrs.get(CAUSE, "its worker died"))
        found.setdefault(cause, []).append(one.user_attrs.get(NUMBER, one.number))
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))[:_SHOWN]
    return ". ".join(
        f"{'Trials' if len(numbers) > 1 else 'Trial'} {', '.join(map(str, sorted(numbers)[:5]))}: {cause.rstrip('.')}"
        for cause, numbers in ordered
    )


def _cause(error: BaseException) -> str:
    """Put what a trial died of into words; our own errors speak for themselves."""
    # A trial that failed is not begun again, and its checkpoints are deleted.
    text = " ".join((error.alone if isinstance(error, TrainingFailedError) else str(error)).split())
    ours = type(error).__module__ == "hotloop.errors" or isinstance(error, WorkerLostError)
    return text if ours and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _names(name: str, text: str) -> bool:
    """Return whether a text names a setting, and not another one whose name begins or ends so."""
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)", text) is not None
