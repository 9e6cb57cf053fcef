"""A program of the user's own as a recipe: ``hotloop train train.py:make``, where ``make`` returns a `Workload`.

The parameters of ``make`` are its settings: ``program.lr=3e-4`` (`hotloop.train.program`).
Its file is run as an import would run it, with all that it may do on this machine: train with files that you trust.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.step.loop.arguments import device_of
from hotloop.train import compiling, configure, environment, folds, opening, program, ranks, sharding
from hotloop.train.display import Display
from hotloop.train.export import Made
from hotloop.train.fit import fit
from hotloop.train.folds import Side, Sides, sides_of
from hotloop.train.goal import Goal
from hotloop.train.program import as_trained
from hotloop.train.start import SETTINGS, Start
from hotloop.train.task import Task, components, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rich.console import Console

    from hotloop.step import Workload
    from hotloop.train.fold import Fold
    from hotloop.train.outcome import Outcome
    from hotloop.train.ranks import Devices
    from hotloop.train.settings import Settings


AGAIN = "program.py"
"""The file in a run's folder by which its program is made again with the run's settings, by any command or process."""
_AGAIN = '''"""The program of this run, with its settings: hotloop verify | bench | doctor | harness program.py:make."""

from pathlib import Path

from hotloop.recipes.program import of_run

make = of_run(Path(__file__).parent)
'''


class Program:
    """The recipe of one program.

    Args:
        name: ``FILE.py:function`` or ``module:function``.
    """

    COMPONENTS: tuple[str, ...] = ()  # known once it was made
    GOAL: Goal | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._first: Fold | None = None
        """The fold that the program was made for to see what it splits."""

    def train(self, start: Start, console: Console | None = None) -> Outcome:
        """Train from the start, or from where the run stopped.

        Raises:
            ConfigError: settings or a program that cannot be used.
            TrainingFailedError: the run could not go on.
        """
        settings, display = start.settings, Display(console)
        opening.begin(settings, display)
        goal = goal_of(start)
        found = seeded(settings)
        ranks.check(settings)
        if not found.takes_fabric or start.dry:
            return self._fit(start, goal, found, display)
        with ranks.devices(start) as devices:
            return self._fit(dataclasses.replace(start, leads=devices.ranks.first), goal, found, display, devices)

    def _fit(
        self, start: Start, goal: Goal | None, found: program.Program, display: Display, devices: Devices | None = None
    ) -> Outcome:
        # The seed comes first, for the program's weights.
        settings, together = start.settings, devices.ranks if devices else ranks.Ranks()
        environment.seed(settings.run.seed)
        values = found.filled(settings.program)
        fold = fold_of(settings)
        make = functools.partial(found.make, values, fold, devices and devices.fabric)
        workload = _own(make(), settings, devices)
        if not together.first:  # what is drawn in steps differs
            environment.seed(settings.run.seed + together.rank)
        fingerprint = fold.fingerprint() if fold else ""
        start.check_data(fingerprint)
        device = device_of(workload.holdings())
        chosen = compiling.plan(settings, components(workload))
        compiling.check(chosen, settings, device.type)
        ranks.check_presets(settings, itertools.chain(*chosen.values()))
        display.say(f"Program {self.name} on {ranks.where(device, together, settings)}")
        lines = say_settings(found, values, display)
        task = Task(
            name=self.name,
            workload=workload,
            device=device,
            goal=goal,
            make=make,
            factory=f"{start.folder.resolve() / AGAIN}:make" if lines else self.name,
            fingerprint=fingerprint,
            told={"program": lines} if lines else {},
            files={AGAIN: _AGAIN} if lines else {},
            ranks=together,
            wrappers=devices.wrappers if devices else (),
        )
        display.say(task.checked(settings.training))
        return fit(task, start, chosen, display)

    def sides(self, settings: Settings) -> Sides:
        """Return both sides of a fold, by what the program asked `Fold.split` as it was made for the first one.

        Raises:
            ConfigError: settings or a program that cannot be used.
            DataError: rows that cannot be split so.
        """
        fold = fold_of(settings)
        assert fold is not None
        if self._first is None:
            seeded(settings).make(settings.program, fold)
            self._first = fold
        if not self._first.asked:
            return Sides(Side((), ()), Side((), ()), "")
        fold.asked[:] = self._first.asked
        return sides_of(fold)

    def evaluate(self, settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
        """Return the program's metrics of a checkpoint's weights.

        Raises:
            ConfigError: the weights are of another program, or it has no metrics.
        """
        workload = self.loaded(settings, weights, judges=True)
        if workload.metrics is None:
            raise ConfigError(
                f"recipe={self.name} has no metrics: give its Workload metrics=, a function of no argument"
            )
        return judge(workload)

    def made(self, settings: Settings, weights: dict[str, Any]) -> Made:
        """Make the program's models again with a checkpoint's weights, for `hotloop export`."""
        return Made(self.loaded(settings, weights).models())

    def loaded(self, settings: Settings, weights: dict[str, Any], *, judges: bool = False) -> Workload:
        """Make the program with a run's settings and a checkpoint's weights.

        Args:
            settings: the run's.
            weights: the checkpoint's.
            judges: the models compute where, and as precisely as, the run's did.

        Raises:
            ConfigError: the weights are of another program, or the run's accelerator is not here.
        """
        with as_trained(self.name):
            found = seeded(settings)
            found.filled(settings.program)
        fabric = ranks.alone(settings) if judges and found.takes_fabric else None
        workload = found.make(settings.program, fold_of(settings), fabric)
        with as_trained(self.name):
            Task(name=self.name, workload=workload, device=device_of(workload.holdings())).load_judged(weights)
        return workload


def _own(workload: Workload, settings: Settings, devices: Devices | None) -> Workload:
    """Return the program as its devices train it: sharded where asked, with the scaler of its losses in its state."""
    if devices is None:
        return workload
    if settings.run.strategy == "fsdp2" and devices.ranks.size > 1:
        sharding.check_optimizers(workload.models(), workload.holdings().optimizers.values())
    scaler, state = devices.scaler, workload.holdings().state
    if scaler is None or any(one is scaler for one in state):
        return workload
    return dataclasses.replace(workload, state=(*state, scaler))


def of_run(folder: Path) -> Callable[[], Workload]:
    """Return the function that makes the program of a run, with the settings that are in its folder."""
    settings = configure.load(config=folder / SETTINGS)

    def make() -> Workload:
        environment.seed(settings.run.seed)
        return found.make(settings.program, fold_of(settings))

    found = seeded(settings)
    return make


def say_settings(found: program.Program, values: Mapping[str, Any], display: Display) -> list[str]:
    """Print the settings of a program, and return a line about each for the record."""
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
    """Return the goal that ``recipe.goal`` names; None without one."""
    wanted = start.settings.recipe.wanted
    return None if wanted is None else Goal(wanted[0], maximize=wanted[1] == "maximize")
