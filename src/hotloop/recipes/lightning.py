"""A LightningModule as a recipe: ``hotloop train module.py:Module data=module.py:Data``, fitted by Lightning's Trainer.

The parameters of both ``__init__`` are its settings (`hotloop.train.modules`). Their files are run as an import would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.measure import machine
from hotloop.recipes.program import fold_of, goal_of
from hotloop.train import checkpoint, compiling, dry, environment, opening, program
from hotloop.train.display import Display
from hotloop.train.export import Made as Exported
from hotloop.train.folds import Side, Sides, sides_of

if TYPE_CHECKING:
    from rich.console import Console

    from hotloop.train.fold import Fold
    from hotloop.train.modules import Made
    from hotloop.train.outcome import Outcome
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start
    from hotloop.train.task import Goal


class Lightning:
    """The recipe of one module and its data.

    Args:
        name: ``module.py:Module,data.py:Data``.
    """

    COMPONENTS: tuple[str, ...] = ("model",)
    GOAL: Goal | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        self._first: Fold | None = None
        """The fold that the data was set up for to see what it splits."""

    def train(self, start: Start, console: Console | None = None) -> Outcome:
        """Fit the module from the start, or from where the run stopped.

        Raises:
            ConfigError: settings, a module or data that cannot be used.
            TrainingFailedError: the run could not go on.
        """
        settings, display = start.settings, Display(console)

        # What can be refused is refused here, before anything of the program runs.
        opening.begin(settings, display)
        goal, device = goal_of(settings), environment.choose_device(settings.run.device)
        chosen = compiling.plan(settings, self.COMPONENTS)
        compiling.check(chosen, settings.compile, device.type)

        # Module and data. The seed comes first, for the weights.
        environment.seed(settings.run.seed)
        found, fold = program.load(self.name), fold_of(settings)
        values = found.filled(settings.program)
        made: Made = found.call(values, fold)
        lines = [one.line(value) for one, value in found.values(values)]
        display.say(f"Program {self.name} on {machine.device_name(device)} ({device}), fitted by Lightning's Trainer")
        if lines:
            display.say(f"Settings: {' '.join(line.partition(' (')[0] for line in lines)}")
        if start.dry:
            return self._dry(start, made, device, display)

        from hotloop.train.lightning_fit import Given, fit  # noqa: PLC0415 - loads Lightning

        told = {"program": lines} if lines else {}
        given = Given(
            name=self.name, module=made.module, data=made.data, device=device, goal=goal, fold=fold, told=told
        )
        return fit(given, start, chosen, display)

    def _dry(self, start: Start, made: Made, device: Any, display: Display) -> Outcome:
        """Set the data up, read one batch, and compute the metrics once where one of them is the goal."""
        goal = goal_of(start.settings)
        if goal is not None and goal.metric not in (known := self._judged(start.settings, made)):
            raise ConfigError(
                f"recipe.goal names {goal.metric!r}; recipe={self.name} logs {', '.join(known) or 'nothing'}"
            )
        made.data.prepare_data()
        made.data.setup("fit")
        loader = made.data.train_dataloader()
        batch = next(iter(loader), None)
        if batch is None:
            raise ConfigError(f"recipe={self.name}: the train_dataloader of its data has no batches")
        needed, said = dry.memory(made.module.parameters(), device)
        display.say(said)
        training = start.settings.training
        many = (
            len(loader) // training.gradient_accumulation * training.num_epochs if hasattr(loader, "__len__") else 2**62
        )
        steps = min(many, training.max_steps or 2**62)
        chosen = compiling.plan(start.settings, self.COMPONENTS)
        return dry.told(start, chosen, display, {"batch": dry.shapes(batch), "steps": steps, "memory_bytes": needed})

    def sides(self, settings: Settings) -> Sides:
        """Say what is on both sides of a fold, by what the program asked `Fold.split` as its data was set up.

        Raises:
            ConfigError: settings or a program that cannot be used.
            DataError: rows that cannot be split so.
        """
        fold = fold_of(settings)
        assert fold is not None
        if self._first is None:
            environment.seed(settings.run.seed)
            made: Made = program.load(self.name).call(settings.program, fold)
            made.data.prepare_data()
            made.data.setup("fit")
            self._first = fold
        if not self._first.asked:
            return Sides(Side((), ()), Side((), ()), "")
        fold.asked[:] = self._first.asked
        return sides_of(fold)

    def evaluate(self, settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
        """Return the metrics that the module logs in a validation with a checkpoint's weights.

        Raises:
            ConfigError: the weights are of another module, or it has no validation.
        """
        return self._judged(settings, self._loaded(settings, weights))

    def made(self, settings: Settings, weights: dict[str, Any]) -> Exported:
        """Make the module again with a checkpoint's weights, for `hotloop export`.

        Raises:
            ConfigError: the weights are of another module.
        """
        module = self._loaded(settings, weights).module

        def example(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if module.example_input_array is None:
                raise ConfigError(
                    f"recipe={self.name}: set example_input_array in the module, for its {name} to be exported"
                )
            given = module.example_input_array
            return (tuple(given) if isinstance(given, list | tuple) else (given,)), {}

        return Exported({"model": module}, example)

    def _judged(self, settings: Settings, made: Made) -> dict[str, float]:
        from hotloop.train.lightning_trainer import make_trainer, numbers, quiet  # noqa: PLC0415 - loads Lightning

        with quiet():
            fitter = make_trainer(settings, environment.choose_device(settings.run.device), enable_checkpointing=False)
            found = fitter.validate(made.module, datamodule=made.data, verbose=False)
        metrics = numbers({name: value for one in found for name, value in one.items()})
        if not metrics:
            raise ConfigError(
                f"recipe={self.name} has no metrics: log some by self.log in the module's validation_step"
            )
        return metrics

    def _loaded(self, settings: Settings, weights: dict[str, Any]) -> Made:
        environment.seed(settings.run.seed)  # as training does: data that it draws are the same again
        made: Made = program.load(self.name).call(settings.program, fold_of(settings))
        checkpoint.fit_weights(made.module, weights["model"], self.name, "recipe")
        return made
