"""A program of the user's own as a recipe: ``hotloop train recipe=train.py:make``, where ``make`` gives a `Workload`.

Its file is run as an import would run it, with all that it may do on this machine: train with files that you trust.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.measure import machine
from hotloop.step.loop.arguments import device_of
from hotloop.step.workload import load_factory
from hotloop.train import closing, compiling, environment, opening, unread
from hotloop.train.display import Display
from hotloop.train.own_loop import fit
from hotloop.train.own_task import OwnTask, components, judge
from hotloop.train.start import Start, write_settings
from hotloop.train.task import Goal

if TYPE_CHECKING:
    from rich.console import Console

    from hotloop.step import Workload
    from hotloop.train.folds import Sides
    from hotloop.train.outcome import Outcome
    from hotloop.train.settings import Settings

READS, NOT_READ = unread.READS["workload"], unread.NOT_READ["workload"]
"""What it reads of the settings that only some recipes do, and what the program itself decides."""


class Program:
    """The recipe of one program.

    Args:
        name: ``FILE.py:function`` or ``module:function``.
    """

    COMPONENTS: tuple[str, ...] = ("model",)
    GOAL: Goal | None = None
    READS: tuple[str, ...] = READS

    def __init__(self, name: str) -> None:
        self.name = name

    def train(self, start: Start, console: Console | None = None) -> Outcome:
        """Train from the start, or from where the run stopped.

        Raises:
            ConfigError: settings or a program that cannot be used.
            TrainingFailedError: the run could not go on.
        """
        settings, display = start.settings, Display(console)

        # What can be refused is refused here, before anything of the program runs.
        opening.begin(settings, display, READS, NOT_READ)
        goal = goal_of(settings)

        # The program. The seed comes first, for its weights. What can be compiled of it, it says itself.
        environment.seed(settings.run.seed)
        make = load_factory(self.name)
        workload = make()
        device = device_of(workload.holdings())
        chosen = compiling.plan(settings, components(workload))
        compiling.check(chosen, settings.compile, device.type)
        display.say(f"Program {self.name} on {machine.device_name(device)} ({device})")
        task = OwnTask(name=self.name, workload=workload, device=device, goal=goal, make=make, factory=self.name)
        display.say(task.checked(settings.training))

        # The run. Its report is written however it ends.
        write_settings(start)
        display.say(f"Run: {start.folder}" + (", resumed" if start.resume else ""))
        with closing.reported(start.folder, display):
            outcome = fit(task, start, chosen, display)
            closing.tell(outcome, display)
        return outcome

    def sides(self, settings: Settings) -> Sides:  # noqa: ARG002 - as every recipe has it
        """Refuse: what a program learns from and is judged by is its own.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"recipe={self.name} cannot be cross-validated: its program reads and splits its data itself. Train it by "
            "`hotloop train`, or write a recipe as those in hotloop.recipes"
        )

    def evaluate(self, settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
        """Give the program's metrics of a checkpoint's weights.

        Raises:
            ConfigError: the weights are of another program, or it has no metrics.
        """
        unread.refuse(settings, READS, NOT_READ)
        workload: Workload = load_factory(self.name)()
        if workload.metrics is None:
            raise ConfigError(
                f"recipe={self.name} has no metrics: give its Workload metrics=, a function of no argument"
            )
        task = OwnTask(name=self.name, workload=workload, device=device_of(workload.holdings()))
        task.load_models(weights)
        return judge(workload)


def goal_of(settings: Settings) -> Goal | None:
    """Read ``recipe.goal``.

    Raises:
        ConfigError: it is not of the form ``max:accuracy``.
    """
    given = settings.recipe.goal
    if given is None:
        return None
    direction, _, metric = given.partition(":")
    if direction not in ("max", "min") or not metric.strip():
        raise ConfigError(f"recipe.goal={given!r}: expected max:<metric> or min:<metric>, such as max:accuracy")
    return Goal(metric.strip(), maximize=direction == "max")
