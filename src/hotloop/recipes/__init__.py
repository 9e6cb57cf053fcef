"""Complete training recipes, each readable top to bottom; `load` finds one by name."""

from __future__ import annotations

import importlib
from typing import cast

from hotloop.errors import ConfigError
from hotloop.train.recipe import Recipe
from hotloop.train.schema import nearest

__all__ = ["NAMES", "Recipe", "load"]

NAMES = ("criteria", "diffusion", "focus")


def load(name: str) -> Recipe:
    """Return the recipe of a name, or of a program of the user's own: ``FILE.py:function``.

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
