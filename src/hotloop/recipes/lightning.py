"""A LightningModule as a recipe: ``hotloop train module.py:Module data=module.py:Data``, fitted by Lightning's Trainer.

The parameters of both ``__init__`` are its settings (`hotloop.train.modules`). Their files are run as an import would.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

from hotloop.errors import ConfigError
from hotloop.recipes.own_program import OwnProgram, fold_of, goal_of, say_settings, seeded
from hotloop.train import checkpoint, compiling, dry, environment, opening, ranks
from hotloop.train.display import Display
from hotloop.train.export import Made as Exported
from hotloop.train.program import as_trained

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from hotloop.train.fold import Fold
    from hotloop.train.modules import Made
    from hotloop.train.outcome import Outcome
    from hotloop.train.ranks import Ranks
    from hotloop.train.settings import Settings
    from hotloop.train.start import Start
    from hotloop.train.task import Plan


class Lightning(OwnProgram):
    """The recipe of one module and its data.

    Args:
        name: ``module.py:Module,data.py:Data``.
    """

    COMPONENTS: tuple[str, ...] = ("model",)

    def train(self, start: Start, console: Console | None = None) -> Outcome:
        """Fit the module from the start, or from where the run stopped.

        Raises:
            ConfigError: settings, a module or data that cannot be used.
            TrainingFailedError: the run could not go on.
        """
        settings, display = start.settings, Display(console)

        # What can be refused is refused here, before anything of the program runs.
        opening.begin(settings, display)
        goal_of(start)
        ranks.check(settings)
        device = environment.device_of(settings.run)
        chosen = compiling.plan(settings, self.COMPONENTS)
        compiling.check(chosen, settings, device.type)
        ranks.check_presets(settings, itertools.chain(*chosen.values()))

        if settings.run.devices == 1 or start.dry:
            return self._fit(start, chosen, device, ranks.Ranks(), display)
        with ranks.devices(start) as devices:
            start = dataclasses.replace(start, leads=devices.ranks.first)
            return self._fit(start, chosen, devices.fabric.device, devices.ranks, display)

    def _fit(self, start: Start, chosen: Plan, device: torch.device, together: Ranks, display: Display) -> Outcome:
        # Module and data. The seed comes first, for the weights: all processes have the same.
        settings, found = start.settings, seeded(start.settings)
        values, fold = found.filled(settings.program), fold_of(settings)
        made: Made = found.call(values, fold)
        where = ranks.where(device, together, settings)
        display.say(f"Program {self.name} on {where}, fitted by Lightning's Trainer")
        lines = say_settings(found, values, display)
        if settings.run.strategy == "fsdp2":
            _check_shards(made.module)
        if start.dry:
            return self._dry(start, made, device, display)

        from hotloop.train.lightning_fit import Given, fit  # noqa: PLC0415 - loads Lightning

        given = Given(
            name=self.name,
            module=made.module,
            data=made.data,
            device=device,
            goal=goal_of(start),
            fold=fold,
            told={"program": lines} if lines else {},
            ranks=together,
        )
        return fit(given, start, chosen, display)

    def _dry(self, start: Start, made: Made, device: Any, display: Display) -> Outcome:
        """Set the data up, read one batch, and validate one where the module does that."""
        from lightning.pytorch.utilities.model_helpers import is_overridden  # noqa: PLC0415 - loads Lightning

        goal = goal_of(start)
        validates = is_overridden("validation_step", made.module) and is_overridden("val_dataloader", made.data)
        found = self._judged(start.settings, made, limit_val_batches=1) if validates else {}
        if goal is not None:
            goal.check(found, self.name)
        made.data.prepare_data()
        made.data.setup("fit")
        loader = made.data.train_dataloader()
        batch = next(iter(loader), None)
        if batch is None:
            raise ConfigError(f"recipe={self.name}: the train_dataloader of its data has no batches")
        needed, said = dry.memory(made.module.parameters(), device)
        display.say(said)
        training = start.settings.training
        steps = training.max_steps or 2**62
        if hasattr(loader, "__len__"):  # each device has a share of the batches
            batches = math.ceil(len(loader) / start.settings.run.devices)
            steps = min(steps, batches // training.gradient_accumulation * training.num_epochs)
        chosen = compiling.plan(start.settings, self.COMPONENTS)
        return dry.told(start, chosen, display, {"batch": dry.shapes(batch), "steps": steps, "memory_bytes": needed})

    def ask(self, settings: Settings, fold: Fold) -> None:
        """Make module and data for a fold, and set the data up."""
        made: Made = seeded(settings).call(settings.program, fold)
        made.data.prepare_data()
        made.data.setup("fit")

    def evaluate(self, settings: Settings, weights: dict[str, Any]) -> dict[str, float]:
        """Return the metrics that the module logs in a validation with a checkpoint's weights.

        Raises:
            ConfigError: the weights are of another module, or it has no validation.
        """
        metrics = self._judged(settings, self._loaded(settings, weights))
        if not metrics:
            raise ConfigError(
                f"recipe={self.name} has no metrics: log some by self.log in the module's validation_step"
            )
        return metrics

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

    def _judged(self, settings: Settings, made: Made, **more: Any) -> dict[str, float]:
        from hotloop.train.lightning_trainer import make_trainer, numbers, quiet  # noqa: PLC0415 - loads Lightning

        with quiet():
            fitter = make_trainer(settings, environment.device_of(settings.run), enable_checkpointing=False, **more)
            found = fitter.validate(made.module, datamodule=made.data, verbose=False)
        return numbers({name: value for one in found for name, value in one.items()})

    def _loaded(self, settings: Settings, weights: dict[str, Any]) -> Made:
        with as_trained(self.name):
            found = seeded(settings)
            found.filled(settings.program)
        made: Made = found.call(settings.program, fold_of(settings))
        with as_trained(self.name):
            checkpoint.fit_weights(made.module, weights["model"], self.name, "recipe")
        return made


def _check_shards(module: Any) -> None:
    """Check that a module shards itself: nobody else knows which of its modules.

    Raises:
        ConfigError: it does not.
    """
    from lightning.pytorch import LightningModule  # noqa: PLC0415 - as where it is fitted

    if type(module).configure_model is LightningModule.configure_model:
        name = type(module).__name__
        raise ConfigError(
            f"run.strategy=fsdp2: {name} has no configure_model, in which a LightningModule shards itself: call "
            "fully_shard(self.net, mesh=self.device_mesh['data_parallel']) in it where self.device_mesh is not None; "
            "or use run.strategy=ddp"
        )
