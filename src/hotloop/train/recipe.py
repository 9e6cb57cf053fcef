"""The shape of a recipe: what a module of `hotloop.recipes`, or a program of the user's own, offers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any, Protocol

from hotloop.train import compiling, dry, environment, opening, ranks
from hotloop.train.display import Display
from hotloop.train.fit import fit

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from hotloop.train.folds import Sides
    from hotloop.train.goal import Goal
    from hotloop.train.outcome import Outcome
    from hotloop.train.ranks import Devices
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start
    from hotloop.train.task import Plan, Task

    Make = Callable[[Start, Display, Devices], Task | None]


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


def on_devices(*components: str) -> Callable[[Make], Callable[..., Outcome]]:
    """Turn a function that makes a recipe's task into the recipe's ``train`` function, which trains the task.

    ``train`` checks the settings, starts a process for each device, and calls the function in each of them. In a dry
    run the function returns None if making the task would train or write.

    Args:
        components: names of the parts that can be compiled.
    """

    def of(make: Make) -> Callable[..., Outcome]:
        @functools.wraps(make)
        def train(start: Start, console: Console | None = None) -> Outcome:
            settings, display = start.settings, Display(console)

            # Settings that cannot be used are refused here, before the recipe loads or writes anything.
            opening.begin(settings, display)
            if settings.run.devices > 1 or settings.run.accelerator != "auto":
                ranks.check(settings)
            device = environment.device_of(settings.run)
            chosen = compiling.plan(settings, components)
            compiling.check(chosen, settings, device.type)
            ranks.check_presets(settings, itertools.chain(*chosen.values()))

            if settings.run.devices > 1 and not start.dry:
                with ranks.devices(start) as several:
                    return _fit(make, dataclasses.replace(start, leads=several.ranks.first), chosen, display, several)
            alone = ranks.Devices(environment.fabric(device, settings.precision), ranks.Ranks())
            return _fit(make, start, chosen, display, alone)

        return train

    return of


def _fit(make: Make, start: Start, chosen: Plan, display: Display, devices: Devices) -> Outcome:
    display.say(
        f"Recipe {start.settings.recipe.name} on {ranks.where(devices.fabric.device, devices.ranks, start.settings)}"
    )
    task = make(start, display, devices)
    return dry.data_only(start, chosen, display) if task is None else fit(task, start, chosen, display)
