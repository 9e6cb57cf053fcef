"""A search within a run, in this process: what each outer fold of a nested cross-validation does first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.train.search import document, space, told, trial
from hotloop.train.search.preparing import prepared
from hotloop.train.search.study import Study
from hotloop.train.search.work import Part, Worker

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hotloop.train.search.work import Objective
    from hotloop.train.settings import Settings


def check(settings: Settings) -> Settings:
    """Return the settings of an inner search with what is its own affair put right.

    Raises:
        ConfigError: a space or ``hpo.trial`` that cannot be used in a fold, or settings that an inner search has not.
    """
    hpo = settings.hpo
    without = {
        "workers": (hpo.workers, 1),
        "engine": (hpo.engine, "local"),
        "timeout_seconds": (hpo.timeout_seconds, None),
        "storage": (hpo.storage, None),
    }
    for name, (value, only) in without.items():
        if value != only:
            shown = str(value) if name != "storage" else "..."  # there may be a password in it
            raise ConfigError(
                f"hpo.{name}={shown} has no effect on a search within a fold, which runs kfold.inner_trials trials in "
                f"this process and keeps them in the fold's folder: set {space.override(f'hpo.{name}', only)}"
            )
    space.parse(settings)
    space.check_trial(settings)
    return inner(settings)


def nested(  # noqa: PLR0913, PLR0917 - what is searched, where, by what, and who hears of it
    settings: Settings,
    folder: Path,
    trials: int,
    objective: Objective = trial.train,
    say: Callable[[str], None] = lambda _: None,
    later: int = 0,
) -> tuple[str, ...]:
    """Search, or go on with a search, and give the best values as overrides.

    Args:
        settings: of the inner runs: what restricts them to the outer training side is among them, and ``hpo`` says what
            is searched, and how.
        folder: where the study is kept, in SQLite; an outer fold's own.
        trials: how many.
        objective: runs a trial.
        say: prints a line.
        later: trials of the searches that come after this one in the process, which use what is compiled in it.

    Raises:
        ConfigError: settings that cannot be used.
        KeyboardInterrupt: somebody interrupted; the same call goes on.
        SearchStoppedError: no trial came to its end.
    """
    settings = space.with_hpo(settings, folder=str(folder), n_trials=trials, keep_checkpoints="none")
    settings = check(prepared(trial.changed(settings, {"run.storage": None})))  # the fold's folder is what is kept
    document.check_folder(settings, folder)
    study = Study(settings, folder, say)

    def tell(what: told.Told) -> None:
        if text := told.line(what):
            say(text)

    try:
        try:
            Worker(study, tell, objective, Part(later=later)).run()
        finally:  # a search that stops has trials too, and their causes are read in its document
            written = document.write(study)
        values = document.best_values(written)
    finally:
        study.storage.close()
    return tuple(space.override(name, value) for name, value in values.items())


def inner(settings: Settings) -> Settings:
    """Return the settings of an inner search: its fold's, with an ``hpo.trial`` that leaves the fold's rows alone.

    What is said there of `space.KEPT` may only repeat the settings' own values. It is left out then, since it would
    undo the fold that the search is in.

    Raises:
        ConfigError: the space or ``hpo.trial`` names the data, the folds or the run itself.
    """
    searched = [name for name, value in settings.hpo.space.items() if value is not None and _is_kept(name)]
    changes = [f"hpo.space.{name}=null" for name in searched]
    for name, value in space.flat(settings.hpo.trial):
        own = space.value_of(name, {}, settings)
        says_nothing = value == own or (name == "kfold.fold" and value is None)
        if _is_kept(name) and not says_nothing:
            changes.append(space.override(f"hpo.trial.{name}", own))
    if changes:
        raise ConfigError(
            f"{changes[0].split('=')[0]}: a search within a fold has no say in {', '.join(space.KEPT)}: the folds "
            f"would then hold other rows. Leave it out, or set {' '.join(changes)}"
        )
    trial = {name: value for name, value in settings.hpo.trial.items() if not _is_kept(name)}
    return space.with_hpo(settings, trial=trial)


def _is_kept(name: str) -> bool:
    return name.split(".", 1)[0] in space.KEPT
