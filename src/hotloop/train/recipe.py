"""The shape of a recipe: what a module of `hotloop.recipes`, or a program of the user's own, offers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

    from hotloop.train.folds import Sides
    from hotloop.train.goal import Goal
    from hotloop.train.outcome import Outcome
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start


class Recipe(Protocol):
    """What a recipe's module offers.

    How a recipe is split: its rows go through `hotloop.train.folds.split_rows`, with ``settings.kfold`` handed on as
    it is, in `train`, `evaluate` and `sides` alike. That function knows the single split, the folds and the inner
    folds, so that a recipe knows none of them; a recipe whose rows have no groups gives each row a group of its own,
    such as its number. `sides` is what a cross-validation shows and checks before it trains anything.
    """

    COMPONENTS: tuple[str, ...]
    GOAL: Goal | None

    def train(self, start: Start, console: Console | None = None) -> Outcome:
        """Train from the start, or from where the run stopped."""

    def sides(self, settings: Settings) -> Sides:
        """Say what `train` learns from and is judged by with these settings; reads the data, and loads no model.

        Raises:
            DataError: data that cannot be used, or split as the settings say.
        """

    def evaluate(self, settings: Settings, weights: dict[str, dict[str, Any]]) -> dict[str, float]:
        """Judge a checkpoint's weights, by model, on the validation side of the data."""
