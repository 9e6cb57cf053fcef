"""A search within a run, in this process: what each outer fold of a nested cross-validation does first."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hotloop.train.search import document, space
from hotloop.train.search.study import Study
from hotloop.train.search.trial import train
from hotloop.train.search.work import Worker

if TYPE_CHECKING:
    from pathlib import Path

    from hotloop.train.search.told import Told
    from hotloop.train.search.work import Objective
    from hotloop.train.settings import Settings


def _nothing(told: Told) -> None:
    """Hear, and do nothing."""


def nested(settings: Settings, folder: Path, trials: int, objective: Objective = train) -> tuple[str, ...]:
    """Search, or go on with a search, and give the best values as overrides.

    Args:
        settings: of the inner runs: what restricts them to the outer training side is among them, and ``hpo`` says what
            is searched, and how.
        folder: where the study is kept, in SQLite; an outer fold's own.
        trials: how many.
        objective: runs a trial.

    Raises:
        ConfigError: a space that cannot be used.
        KeyboardInterrupt: somebody interrupted; the same call goes on.
        SearchStoppedError: no trial came to its end.
    """
    hpo = dataclasses.replace(
        settings.hpo, folder=str(folder), n_trials=trials, workers=1, storage=None, keep_checkpoints="none"
    )
    settings = dataclasses.replace(settings, hpo=hpo)
    space.check_trial(settings)
    settings = space.inner(settings)
    study = Study(settings, folder, lambda _: None)
    try:
        Worker(study, _nothing, objective).run()
        values = document.best_values(document.write(study))
    finally:
        study.storage.close()
    return tuple(space.override(name, value) for name, value in values.items())
