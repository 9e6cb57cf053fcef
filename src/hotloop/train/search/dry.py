"""A search's ``--dry-run``: its settings, its folder, and the run of a trial before its first step."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError
from hotloop.report import runs
from hotloop.train import dry
from hotloop.train.search import before, document, trial
from hotloop.train.start import Start

if TYPE_CHECKING:
    from rich.console import Console

    from hotloop.train.outcome import Outcome
    from hotloop.train.settings import Settings


def check(settings: Settings, console: Console | None) -> Outcome:
    """Check a search, and one trial of it with the settings that are not searched.

    Raises:
        ConfigError: settings, a program or a folder that cannot be used.
        DataError: data that cannot be used.
    """
    before.check(settings)
    folder = Path(settings.hpo.folder)
    document.check_folder(settings, folder)
    if runs.kind_of(folder) in (runs.RUN, runs.FOLDS):
        raise ConfigError(f"hpo.folder={folder} holds a run, whose report would be overwritten: name another folder")
    dry.check_folder(folder)
    changed = trial.settings_of(settings, {}, folder)
    for first in trial.folds_of(changed)[:1]:
        changed = trial.changed(changed, first)
    recipe = importlib.import_module("hotloop.recipes").load(settings.recipe.name)
    found: Outcome = recipe.train(Start(changed, folder, dry=True), console)
    return found
