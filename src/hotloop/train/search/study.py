"""A study: which trial is next, whose worker died, and how each ended. All that matters is in its storage.

A trial has a number from 0 to ``hpo.n_trials`` - 1, and one attempt or more: each attempt is a trial of Optuna's, with
the number among its attributes. An attempt whose worker died is made again with the same values, once. Nothing that
decides about the next trial is kept in a process, so any of them may die at any moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop import record
from hotloop.errors import ConfigError
from hotloop.files import read, whole
from hotloop.train import configure, mirror
from hotloop.train.nested import leaves
from hotloop.train.optional import require
from hotloop.train.schema import at, build
from hotloop.train.scope import DECISIVE, STILL_COMPARABLE
from hotloop.train.search import samplers, space
from hotloop.train.search.given import given
from hotloop.train.search.storage import Storage
from hotloop.train.search.trial import folds_of, settings_of, study_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import optuna

    from hotloop.train.settings import Settings

    Attempts = Sequence[optuna.trial.FrozenTrial]

ATTEMPTS = 2
"""How often a trial is begun at most, by one command, while its workers die."""
OUTCOME = "outcome.json"
NUMBER, ATTEMPT, WORKER, CAUSE, ENDED = "hotloop:number", "hotloop:attempt", "hotloop:worker", "cause", "hotloop:ended"
"""Attributes of an attempt."""
_SETTINGS, _COMMANDS = "hotloop:settings", "hotloop:commands"
"""Attributes of a study: its settings, and the processes of the commands that go on with it."""
_FREE = (
    "n_trials", "workers", "engine", "timeout_seconds", "storage", "folder", "heartbeat_seconds", "keep_checkpoints",
)  # fmt: skip
"""Settings of the group ``hpo`` that may be others each time a study goes on."""
_DIED = "its worker died"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended: ``complete``, ``pruned``, ``failed`` or ``interrupted``; ``cause`` where not complete.

    ``value`` is of ``hpo.metric``, ``also`` of the metrics of ``hpo.also``.
    """

    state: str
    value: float | None = None
    cause: str = ""
    also: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Taken:
    """An attempt that is this worker's own."""

    number: int
    attempt: int
    trial: optuna.Trial
    folder: Path


class Study:
    """One study in its storage.

    Args:
        settings: the search's; a study that is there already has to have the same.
        folder: its folder.
        say: prints a line.
        since: how many attempts there were when the command began: what died or failed before is no reason to leave a
            trial alone, or to stop, since the whole search may have been killed. None takes those that are there now.

    Raises:
        ConfigError: the study was begun with other settings.
        SearchStoppedError: the storage cannot be reached.
    """

    def __init__(self, settings: Settings, folder: Path, say: Callable[[str], None], since: int | None = None) -> None:
        samplers.quiet()
        self.settings, self.folder, self.say = settings, folder, say
        self.storage = Storage(settings.hpo.storage, folder, settings.hpo.heartbeat_seconds)
        self._optuna: Any = require("optuna", "hotloop hpo", "search")
        self._states: Any = self._optuna.trial.TrialState
        self._known: dict[str, Any] = {}
        """What samplers find out about all trials so far, handed on from one to the next."""
        self._half_taken: int | None = None  # an attempt, until the storage has answered that this worker has it
        with self.storage.let_go_on_failure():
            self.study = self.storage.study(study_name(settings), list(settings.hpo.objectives.values()))
            anew = self._check_settings(begins=since is None)
            self.since = len(self.trials()) if since is None else since
            if since is None and not self.since and not anew and (folder / "trials").is_dir():
                say(f"{self.storage.shown} holds no trial, though {folder / 'trials'} does: all of them are run again")
            self.study.pruner = samplers.pruner(settings, reports(settings))

    def trials(self) -> list[optuna.trial.FrozenTrial]:
        """Return every attempt so far."""
        return self.study.get_trials(deepcopy=False)

    def take(self) -> Taken | None:
        """Take the next trial, one whose worker died first; None where none is left that nobody runs.

        Raises:
            SearchStoppedError: the storage does not answer.
        """
        taken: Taken | None = self.storage.patiently(self._take, self.say)
        return taken

    def finish(self, taken: Taken, outcome: Outcome) -> bool:
        """Write down how an attempt ended: beside its run first, and then in the storage.

        Returns:
            Whether it counts: not where others have taken its worker for dead, and the trial for their own, meanwhile.

        Raises:
            SearchStoppedError: the storage does not answer; the same command reads the outcome from the trial's folder.
        """
        write_outcome(taken.folder, outcome)
        counts: bool = self.storage.patiently(lambda: self._finish(taken.trial.number, outcome), self.say)
        if not counts:
            why = "its worker was silent for too long, and others have it"
            self.say(f"trial {taken.number}: {why}; this result is left out")
        return counts

    def best(self, attempts: Attempts | None = None) -> optuna.trial.FrozenTrial | None:
        """Return the best complete attempt of those given, which are all of them if they are not."""
        done = [
            one
            for one in (self.trials() if attempts is None else attempts)
            if one.state == self._states.COMPLETE and one.values
        ]
        choose = max if self.settings.hpo.towards == "maximize" else min
        return choose(done, key=lambda one: one.values[0]) if done else None

    def front(self) -> list[int]:
        """Return the numbers of the trials that no other trial beats in every metric."""
        return sorted({one.user_attrs[NUMBER] for one in self.study.best_trials})

    def folders_over(self) -> list[Path]:
        """Return the folders of all attempts that are over in the storage."""
        return [self._folder_of(one) for one in self.trials() if one.state.is_finished()]

    def left(self, attempts: Attempts | None = None) -> int:
        """Count the trials that are neither over nor running, by the attempts given or by all there are."""
        by_number = _by_number(self.trials() if attempts is None else attempts)
        return sum(self._open(by_number.get(number, ())) for number in range(self.settings.hpo.n_trials))

    def over(self) -> int:
        """Count the trials that are over, once those whose worker died are given up."""
        with self.storage.turn():
            trials = self._give_up_dead()
        done = [
            attempts
            for number, attempts in _by_number(trials).items()
            if number < self.settings.hpo.n_trials and not self._open(attempts)
        ]
        return sum(all(one.state.is_finished() for one in attempts) for attempts in done)

    def _take(self) -> Taken | None:
        with self.storage.turn():
            trials = self._give_up_dead()
            # One that waits was put there by somebody who died before he took it, or by hand in optuna-dashboard.
            waiting = [one for one in trials if one.state == self._states.WAITING]
            number, before = self._next(trials)
            if waiting and NUMBER in waiting[0].user_attrs:
                number = waiting[0].user_attrs[NUMBER]
            elif number is None:
                return None
            elif not waiting:
                about = {NUMBER: number, ATTEMPT: _attempt(before) + 1}
                self.study.enqueue_trial(self._values(number, before), user_attrs=about)
            self.study.sampler = samplers.sampler(self.settings, number, self._known)
            trial = self.study.ask()
            self._half_taken = trial.number
            if NUMBER not in trial.user_attrs:
                trial.set_user_attr(NUMBER, number)
            self.storage.beat(trial._trial_id)  # noqa: SLF001 - storages know trials by nothing else
            attempt = trial.user_attrs.get(ATTEMPT, 1)
            folder = trial_folder(self.folder, number, attempt)
            # One that is there is of a study whose storage is gone, or another: should this worker die, it is not ours.
            (folder / OUTCOME).unlink(missing_ok=True)
            trial.set_user_attr(WORKER, record.this_process())
            self._half_taken = None
        return Taken(number, attempt, trial, folder)

    def _next(self, trials: Attempts) -> tuple[int | None, Attempts]:
        """Choose the first trial that is neither over nor running, with its attempts so far."""
        by_number = _by_number(trials)
        for number in range(self.settings.hpo.n_trials):
            before = by_number.get(number, [])
            if self._open(before):
                return number, before
        return None, ()

    def _values(self, number: int, before: Attempts) -> dict[str, Any]:
        """Return the values that are known of a trial: those of earlier attempts, or those that it was given.

        Half of an attempt's values are not kept: a sampler that has some draws others for the rest than it would have.
        """
        known = space.parse(self.settings)
        whole = (one.params for one in reversed(before) if known.is_whole(one.params, self.settings))
        return next(whole, None) or given(known, self.settings, number)

    def _open(self, attempts: Sequence[optuna.trial.FrozenTrial]) -> bool:
        """Say whether a trial with these attempts is to be begun (again)."""
        if any(one.state != self._states.FAIL for one in attempts):
            return False
        if any(how_ended(one) == "failed" for one in attempts):
            return False
        return sum(how_ended(one) == "died" for one in attempts if one.number >= self.since) < ATTEMPTS

    def _give_up_dead(self) -> Attempts:
        """End every attempt whose worker died: at once on this machine, and by its silence on others.

        Returns:
            Every attempt, as it is then.
        """
        trials = self.trials()
        running = [one for one in trials if one.state == self._states.RUNNING]
        for one in running:
            worker = one.user_attrs.get(WORKER)
            if worker is None or one.number == self._half_taken:  # it is our turn: nobody could say that he has it
                self._finish_now(one, Outcome("interrupted", cause="it was not begun"))
            elif record.was_killed({"status": "running", **worker}):
                self._finish_now(one, self._outcome(self._folder_of(one)) or Outcome("died", cause=_DIED))
        if not running:
            return trials
        self._optuna.storages.fail_stale_trials(self.study)
        return self.trials()

    def _outcome(self, folder: Path) -> Outcome | None:
        """Return the outcome that a dead worker left in its trial's folder; a node of a cluster has stored it."""
        away = self.settings.run.storage if self.settings.hpo.engine == "ray" else None
        stored = mirror.of(away, folder, self.folder)
        only_there = "a trial whose outcome is only there is run again"
        mirror.bring(stored, lambda line: self.say(f"{line}; {only_there}"), ended=False)
        return read_outcome(folder)

    def _folder_of(self, one: optuna.trial.FrozenTrial) -> Path:
        return trial_folder(self.folder, one.user_attrs.get(NUMBER, one.number), one.user_attrs.get(ATTEMPT, 1))

    def _finish(self, number: int, outcome: Outcome) -> bool:
        with self.storage.turn():
            one = self.trials()[number]
            if one.state == self._states.RUNNING:
                self._finish_now(one, outcome)
                return True
            # The answer to an earlier try may have been lost on its way.
            return one.user_attrs.get(ENDED) == outcome.state

    def _finish_now(self, one: optuna.trial.FrozenTrial, outcome: Outcome) -> None:
        attributes = {ENDED: outcome.state, **({CAUSE: outcome.cause[: record.ERROR_LENGTH]} if outcome.cause else {})}
        for key, value in attributes.items():
            self.storage.optuna.set_trial_user_attr(one._trial_id, key, value)  # noqa: SLF001 - as above
        states = {"complete": self._states.COMPLETE, "pruned": self._states.PRUNED}
        values = None if outcome.value is None else [outcome.value, *outcome.also]
        self.study.tell(one.number, values, state=states.get(outcome.state, self._states.FAIL))

    def _check_settings(self, *, begins: bool) -> bool:
        """Check that the study was begun with these settings, and return whether it has been begun anew with them."""
        ours = comparable(self.settings)
        with self.storage.turn():  # as a whole: nobody may take a trial of a study that is about to be deleted
            theirs = self.study.user_attrs.get(_SETTINGS)
            other = [] if theirs is None else differences(_as_now(theirs, ours, self.settings), ours)
            others = self._other_commands()
            anew = bool(other) and begins and not others and self._is_empty()
            if anew:
                self.study = self.storage.renewed(self.study, list(self.settings.hpo.objectives.values()))
            if anew or theirs is None:
                self.study.set_user_attr(_SETTINGS, ours)
            if begins and (anew or not other):
                self.study.set_user_attr(_COMMANDS, [*others, record.this_process()])
        if anew:
            self.say(f"No trial of the study was over, so it begins with these settings: {'; '.join(other)}")
        elif other:
            raise ConfigError(
                f"the study {study_name(self.settings)} in {self.storage.shown} was begun with other settings: "
                f"{'; '.join(other)}. Go on with those, or name another study, in a folder of its own: "
                f"hpo.name=... hpo.folder=...{self._or_begin_anew()}"
            )
        return anew

    def submitted(self) -> str | None:
        """Return the run on a cluster that the last command of the study belongs to; None if that ran on no cluster."""
        found: str | None = (self.study.user_attrs.get(_COMMANDS) or [{}])[-1].get("submitted")
        return found

    def _other_commands(self) -> list[dict[str, Any]]:
        """Return the processes of other commands that go on with the study: one may have no trial yet."""
        known = self.study.user_attrs.get(_COMMANDS, [])
        return [
            one for one in known if one != record.this_process() and not record.was_killed({"status": "running", **one})
        ]

    def _is_empty(self) -> bool:
        """Say whether a study of this folder's own has no trial that is over or runs: nothing that would be lost.

        So it is where a metric was misspelt, and the first trial found that out.
        """
        return self.settings.hpo.storage is None and all(how_ended(one) == "interrupted" for one in self.trials())

    def _or_begin_anew(self) -> str:
        """Say what else can be done where a study has nothing that anybody would miss."""
        if (
            self._other_commands()
            or self.settings.hpo.storage is not None
            or any(one.state == self._states.COMPLETE for one in self.trials())
        ):
            return ""
        return f"; or delete {self.folder}, in which no trial is complete"


def trial_folder(folder: Path, number: int, attempt: int) -> Path:
    """Return the folder of an attempt; a second one has a folder of its own, since the first may live after all."""
    return folder / "trials" / (f"{number:04d}" if attempt == 1 else f"{number:04d}-{attempt}")


def how_ended(one: optuna.trial.FrozenTrial) -> str:
    """Say how an attempt that is over ended; one that others gave up by its silence has no word of its own."""
    return str(one.user_attrs.get(ENDED, "died"))


def reports(settings: Settings) -> int:
    """Return how often a trial that runs to its end reports: for each fold, or for each epoch."""
    trial = settings_of(settings, {}, Path())
    return len(folds_of(trial)) or trial.training.num_epochs


def comparable(settings: Settings) -> dict[str, Any]:
    """Return the settings that make a study what it is, as flat JSON data."""
    flat = dict(leaves(configure.to_dict(settings)))
    flat["hpo.direction"] = settings.hpo.towards
    free = (*(f"hpo.{one}" for one in _FREE), *STILL_COMPARABLE)
    kept = {
        key: value
        for key, value in flat.items()
        if key in DECISIVE or not any(f"{key}.".startswith(f"{one}.") for one in free)
    }
    plain: dict[str, Any] = json.loads(json.dumps(kept))
    return plain


def _as_now(theirs: Mapping[str, Any], ours: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return what an earlier version kept as this one would: the recipe's settings alone, newer ones by default.

    A mapping that is empty by default, such as a program's settings, is none of ``ours`` where it holds some.
    """
    usual = comparable(build(type(settings), {}))
    known = {key: value for key, value in theirs.items() if key in usual or at(type(settings), key)}
    if known.get("recipe.goal") is None and "recipe.goal" in ours:  # trials had none
        known["recipe.goal"] = ours["recipe.goal"]
    newer = {key: value for key, value in usual.items() if key in ours and not key.startswith("hpo.")}
    return {**newer, **known}


def differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    """List what differs, theirs first; what one side lacks is null there."""
    return [
        f"{key} {json.dumps(theirs.get(key))}, now {json.dumps(ours.get(key))}"
        for key in sorted({*theirs, *ours})
        if theirs.get(key) != ours.get(key)
    ]


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Keep an outcome where it is found again if its worker dies, or the storage is away; a full disk keeps none."""
    with contextlib.suppress(OSError), whole(folder / OUTCOME, durable=False) as file:
        file.write(json.dumps(dataclasses.asdict(outcome)).encode())


def read_outcome(folder: Path) -> Outcome | None:
    """Read what `write_outcome` wrote; None where there is nothing, or nothing whole."""
    try:
        return Outcome(**json.loads(read(folder / OUTCOME)))
    except (OSError, ValueError, TypeError):
        return None


def _by_number(trials: Iterable[optuna.trial.FrozenTrial]) -> dict[int, list[optuna.trial.FrozenTrial]]:
    found: dict[int, list[optuna.trial.FrozenTrial]] = {}
    for one in trials:
        if NUMBER in one.user_attrs:
            found.setdefault(one.user_attrs[NUMBER], []).append(one)
    return found


def _attempt(before: Sequence[optuna.trial.FrozenTrial]) -> int:
    return max((one.user_attrs.get(ATTEMPT, 1) for one in before), default=0)
