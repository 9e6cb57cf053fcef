"""What a program of the user's own and a LightningModule have in common as recipes: their settings, goal and folds."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from hotloop.train import environment, folds, program
from hotloop.train.folds import Side, Sides, sides_of
from hotloop.train.goal import Goal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.train.display import Display
    from hotloop.train.fold import Fold
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start


class OwnProgram(abc.ABC):
    """A recipe that a file of the user's has.

    Args:
        name: of the program, by its file.
    """

    GOAL: Goal | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._first: Fold | None = None
        """The fold that the program was made for to see what it splits."""

    @abc.abstractmethod
    def ask(self, settings: Settings, fold: Fold) -> None:
        """Make the program for a fold as its training does, up to where it has split its rows."""

    def sides(self, settings: Settings) -> Sides:
        """Say what is on both sides of a fold, by what the program asked `Fold.split` as it was made for the first one.

        Raises:
            ConfigError: settings or a program that cannot be used.
            DataError: rows that cannot be split so.
        """
        fold = fold_of(settings)
        assert fold is not None
        if self._first is None:
            self.ask(settings, fold)
            self._first = fold
        if not self._first.asked:
            return Sides(Side((), ()), Side((), ()), "")
        fold.asked[:] = self._first.asked
        return sides_of(fold)


def say_settings(found: program.Program, values: Mapping[str, Any], display: Display) -> list[str]:
    """Say the settings of a program, and return a line about each for the record."""
    lines = [one.line(value) for one, value in found.values(values)]
    if lines:
        display.say(f"Settings: {' '.join(line.partition(' (')[0] for line in lines)}")
    return lines


def seeded(settings: Settings) -> program.Program:
    """Run a program's file as its training does, and seed for what makes it: data that it draws are the same again."""
    environment.seed(settings.run.seed)
    found = program.load(settings.recipe.name)
    environment.seed(settings.run.seed)
    return found


def fold_of(settings: Settings) -> Fold | None:
    """Return the fold that a run holds out, None where it is no part of a cross-validation."""
    return None if settings.kfold.n_splits is None else folds.fold_of(settings.kfold, settings.run.seed)


def goal_of(start: Start) -> Goal | None:
    """Return what ``recipe.goal`` says; None where it says nothing."""
    wanted, hpo = start.settings.recipe.wanted, start.settings.hpo
    if wanted is None:
        return None
    of_search = start.within.metric is not None and wanted[0] == hpo.metric
    return Goal(wanted[0], maximize=wanted[1] == "maximize", of_search=of_search)
