"""Complete training recipes, each readable top to bottom; `load` finds one by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from hotloop.errors import ConfigError
from hotloop.train.coerce import nearest

if TYPE_CHECKING:
    from rich.console import Console

    from hotloop.train.fit import Outcome
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start
    from hotloop.train.task import Goal

NAMES = ("criteria", "digits", "language")


class Recipe(Protocol):
    """What a recipe's module offers."""

    COMPONENTS: tuple[str, ...]
    GOAL: Goal | None
    READS: tuple[str, ...]

    def train(self, start: Start, console: Console | None = None) -> Outcome:
        """Train from the start, or from where the run stopped."""

    def evaluate(self, settings: Settings, weights: dict[str, object]) -> dict[str, float]:
        """Judge a checkpoint's weights on the validation side of the data."""


def load(name: str) -> Recipe:
    """Give the recipe of a name, or of a program of the user's own, ``FILE.py:function``.

    Raises:
        ConfigError: there is none of this name; the message gives the nearest.
    """
    if ":" in name:
        from hotloop.recipes.program import Program  # noqa: PLC0415 - as the others, when it is asked for

        return Program(name)
    if name not in NAMES:
        raise ConfigError(
            f"recipe {name!r} does not exist: {nearest(name, NAMES)}, or a program of your own, recipe=FILE.py:function"
        )
    return cast("Recipe", importlib.import_module(f"hotloop.recipes.{name}"))
