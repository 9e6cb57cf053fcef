"""Trainers that hand their training step to the loop of their callback."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from hotloop.errors import ConfigError
from hotloop.integrations.named import check_names
from hotloop.integrations.transformers.callback import SETTINGS, HotLoop

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


class HotStep:
    """Mixed into a Trainer, hands its training steps (forward, loss, backward) to the loop of its `HotLoop` callback.

    Clipping, the optimizer's step and schedulers stay the Trainer's, so that they are in no captured step. One that was
    given no `HotLoop` among its callbacks gets one with its defaults. Several processes: as with a plain Trainer.
    """

    hot: HotLoop
    accelerator: Any
    state: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_arguments(type(self).__name__, super().__init__, kwargs)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        found = [one for one in trainer.callback_handler.callbacks if isinstance(one, HotLoop)]
        if not found:
            found = [HotLoop()]
            trainer.add_callback(found[0])
            found[0].on_init_end(trainer.args, trainer.state, trainer.control)
        self.hot = found[0]
        self.hot.owned_by(self)

    def add_callback(self, callback: Any) -> None:
        """See ``Trainer.add_callback``; a `HotLoop` takes the place of the one that there is."""
        trainer: Any = super()
        before = vars(self).get("hot")
        one = callback() if isinstance(callback, type) else callback
        trainer.add_callback(one)
        if before is None or not isinstance(one, HotLoop):
            return
        before.end()
        before.leave()
        trainer.remove_callback(before)
        this: Any = self
        one.on_init_end(this.args, this.state, this.control)
        self.hot = one
        one.owned_by(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer.train``; the model is as it was given after it, however it ends."""
        trainer: Any = super()
        this: Any = self
        self.hot.begins(self, told=any(one is self.hot for one in this.callback_handler.callbacks))
        try:
            result = trainer.train(*args, **kwargs)
        except BaseException as error:
            self.hot.end(error)
            raise
        self.hot.end()
        return result

    def training_step(self, model: torch.nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Any:
        """See ``Trainer.training_step``."""
        trainer: Any = super()
        step = self.hot.step
        if step is None:
            return trainer.training_step(model, inputs, num_items_in_batch)
        # What the Trainer divides the loss by is an attribute, which a recording would freeze: as an argument, it
        # selects one.
        pieces = vars(self).get("current_gradient_accumulation_steps")
        return step(trainer._prepare_inputs(inputs), num_items_in_batch, pieces)  # noqa: SLF001 - the one way to move

    def own_training_step(self) -> Callable[..., Any]:
        """Give the Trainer's own step as a function of all that differs from step to step."""
        below: Any = super()
        trainer: Any = self  # so are its attributes named, where one keeps a step from being compiled or captured

        def training_step(inputs: Mapping[str, Any], num_items_in_batch: Any, pieces: int | None) -> Any:  # noqa: ARG001
            _named(trainer.compute_loss, trainer.compute_loss_func, trainer.compute_loss_context_manager)
            # A copy: the Trainer takes labels out of its inputs, and a step may run twice.
            return below.training_step(trainer.model_wrapped, dict(inputs), num_items_in_batch)

        return training_step


class HotTrainer(HotStep, Trainer):
    """A ``Trainer`` whose steps are a `hotloop.Loop`'s. Its arguments are Trainer's; settings are its `HotLoop`'s."""


def _check_arguments(name: str, init: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse what the Trainer below takes no argument for; settings of ours are its callback's."""
    parameters = inspect.signature(init).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    unknown = {key: value for key, value in given.items() if key not in parameters}
    if ours := {key: value for key, value in unknown.items() if key in SETTINGS}:
        said = ", ".join(f"{key}={value!r}" for key, value in ours.items())
        raise ConfigError(
            f"{name}({said}): its arguments are Trainer's; settings of hotloop's are its callback's: "
            f"{name}(..., callbacks=[HotLoop({said})])"
        )
    check_names(name, unknown, parameters)


def _named(*_: Any) -> None:
    """Name what the Trainer's own code calls, which nobody follows: so it is known what a user's overrides read."""
