"""Trainers that hand their training step to the loop of their callback."""

from __future__ import annotations

import contextlib
import inspect
from typing import TYPE_CHECKING, Any

from accelerate.utils import DistributedType  # type: ignore[import-untyped]
from transformers import Trainer

from hotloop.errors import ConfigError
from hotloop.integrations.setting_names import check_names
from hotloop.integrations.several import own_stream
from hotloop.integrations.transformers.callback import SETTINGS, HotLoop
from hotloop.step.watch.plain import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


class HotStep:
    """A mixin for a Trainer: its training steps (forward, loss, backward) run in the loop of its `HotLoop` callback.

    Clipping, the optimizer's step and schedulers stay the Trainer's, so no captured step contains them. A Trainer
    without a `HotLoop` among its callbacks gets one with its defaults. Several processes agree on their steps under
    DDP and FSDP2, with ``"auto"`` or a tier that has a graph; else their steps stay the Trainer's.
    """

    hot: HotLoop
    accelerator: Any
    args: Any
    model_wrapped: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _check_arguments(type(self).__name__, super().__init__, kwargs)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        hot = next((callback for callback in trainer.callback_handler.callbacks if isinstance(callback, HotLoop)), None)
        if hot is None:
            hot = HotLoop()
            trainer.add_callback(hot)
            hot.on_init_end(trainer.args, trainer.state, trainer.control)
        self.hot = hot
        hot.owned_by(self)

    @property
    def state(self) -> Any:
        """See ``Trainer.state``; while the loop runs the step, a view of it."""
        held = vars(self)
        if "state" not in held:
            raise AttributeError("state")
        return _StateView(held["state"], held["_counters_read"]) if "_counters_read" in held else held["state"]

    @state.setter
    def state(self, state: Any) -> None:
        vars(self)["state"] = state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copy's or a pickle's state; its callback has no Trainer yet."""
        vars(self).update(state)
        self.hot.owned_by(self)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """See ``Trainer.train``; the model is as it was given after it, however it ends."""
        below: Any = super()
        self.hot.owned_by(self)
        # What FSDP2 shards holds on to no stream, and is captured from the default one.
        together = self.hot.agrees() and self.accelerator.distributed_type != DistributedType.FSDP
        try:
            with own_stream(self.accelerator.device) if together else contextlib.nullcontext():
                result = below.train(*args, **kwargs)
        except BaseException as error:
            self.hot.end(error)
            raise
        self.hot.end()
        return result

    def training_step(self, model: torch.nn.Module, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Any:
        """See ``Trainer.training_step``."""
        below: Any = super()
        step = self.hot.step
        if step is None:
            return below.training_step(model, inputs, num_items_in_batch)
        # The Trainer divides the loss by this attribute, and a recording would freeze its value. As an argument, it
        # selects a recording.
        pieces = vars(self).get("current_gradient_accumulation_steps")
        return step(below._prepare_inputs(inputs), num_items_in_batch, pieces)  # noqa: SLF001 - moves them to the device

    def own_training_step(self) -> Callable[..., Any]:
        """Return the Trainer's own step as a function of everything that differs from step to step."""
        below: Any = super()
        counters_read: dict[str, Refused] = {}  # a closure variable of the step: the loop watches it
        trainer: Any = self  # messages about what keeps a step from being compiled name it so: "trainer.attribute"

        def training_step(inputs: Mapping[str, Any], num_items_in_batch: Any, pieces: int | None) -> Any:  # noqa: ARG001
            vars(trainer)["_counters_read"] = counters_read
            try:
                # A copy: the Trainer takes labels out of its inputs, and a step may run twice.
                return below.training_step(trainer.model_wrapped, dict(inputs), num_items_in_batch)
            finally:
                del vars(trainer)["_counters_read"]

        return training_step


class HotTrainer(HotStep, Trainer):
    """A ``Trainer`` whose steps a `hotloop.Loop` runs. Its arguments are Trainer's; settings are its `HotLoop`'s."""


def _check_arguments(name: str, init: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the Trainer below does not take; settings of ours belong to its callback."""
    parameters = inspect.signature(init).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = {key: value for key, value in arguments.items() if key not in parameters}
    if ours := {key: value for key, value in unknown.items() if key in SETTINGS}:
        shown = ", ".join(f"{key}={value!r}" for key, value in ours.items())
        raise ConfigError(
            f"{name}({shown}): its arguments are Trainer's; settings of hotloop's are its callback's: "
            f"{name}(..., callbacks=[HotLoop({shown})])"
        )
    check_names(name, unknown, parameters)


class _StateView:
    """A Trainer's state as its step sees it: the counters that it reads are noted, as they change without end."""

    def __init__(self, state: Any, read: dict[str, Refused]) -> None:
        vars(self).update(_state=state, _read=read)

    def __getattr__(self, name: str) -> Any:
        if name in ("epoch", "global_step"):
            what = f"trainer.state.{name}, which changes from step to step"
            self._read.setdefault(name, Refused(what, repeatable=True))
        return getattr(self._state, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._state, name, value)
