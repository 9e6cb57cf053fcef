"""The training step of a LightningModule, owned by a loop.

Under automatic optimization the Trainer asks ``module.optimizer_step`` to run forward, backward and optimizer. Our
replacement has a `hotloop.Loop` run them, as a plain function of the batch, in any tier. Then the Trainer's closure
goes through its hooks, counters and metrics once, with the result that is there already. Calls of ``self.log`` are
noted while the step runs and handed to Lightning afterwards, so that logging neither breaks a graph nor happens twice
in a proof.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from hotloop.compiling.control import Note, method_of
from hotloop.integrations.lightning.shadows import Shadows, own_method
from hotloop.integrations.several import first_speaks
from hotloop.step import Loop
from hotloop.step.watch.plain import Refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import lightning.pytorch as pl

    from hotloop.compiling.control import Status
    from hotloop.step import LoopStatus

_NO_STEP = object()
"""Stands for the loss where the Trainer refuses what a training_step returned: its closure raises its own error."""
_WRITES = Refused("trainer.logger, which writes when it is called, and a replay calls nothing: log through self.log")
_INDEX = Refused("batch_idx, which changes from step to step", repeatable=True)
_COUNT = Refused("trainer.global_step, which changes from step to step", repeatable=True)
"""A number that changes without end: where it matters in some steps only, no watch would see it in time."""


class _TrainerView:
    """The Trainer as a step sees it: records in a mirror the attributes that the step reads, numbers and objects."""

    def __init__(self, trainer: pl.Trainer, mirror: dict[str, Any]) -> None:
        object.__setattr__(self, "_trainer", trainer)
        object.__setattr__(self, "_mirror", mirror)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if name in ("logger", "loggers") and value:
            self._mirror[name] = _WRITES
        elif name == "global_step":
            self._mirror[name] = _COUNT
        elif not callable(value):
            self._mirror[name] = _as_watched(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)


class OwnedStep:
    """The training step of a fit in the hands of a loop.

    Args:
        trainer: the Trainer, which has set up model and optimizer.
        module: the module whose step it is.
        settings: of the `hotloop.Loop`.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, settings: dict[str, Any]) -> None:
        self._trainer, self.module = trainer, module
        self._optimizer: torch.optim.Optimizer = trainer.optimizers[0]
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._mirror: dict[str, Any] = {}
        """What a step has read of the Trainer: the loop watches it, and records anew where a value changed."""
        self._logged: list[tuple[str, list[Any], dict[str, Any]]] = []
        self._inside = False
        """Whether the loop runs the step at this moment."""
        self._has_batch = False
        """Whether `begin` has named the batch of the coming step."""
        self._final: tuple[LoopStatus, Status] | None = None
        self._batch: Any = None
        self._result: Any = None
        own = own_method(module, "training_step")
        takes = is_param_in_hook_signature(own, "batch_idx", min_args=2)  # the Trainer asks the same
        self._takes_index, self.reads_index = takes, takes and _reads_argument(type(module).training_step, 2)
        if self.reads_index:
            self._mirror["batch_idx"] = _INDEX
        state = () if self._scaler is None else (self._scaler,)
        self._wrapped = trainer.strategy.model or module
        """What the strategy put around the module (DDP), or the module itself."""
        with first_speaks():
            self.loop = Loop(self._wrapped, self._optimizer, state=state, **settings)
        self.loop.not_watched = (trainer, self, trainer.strategy)
        step, self._set_batch_index = self._make_step()
        self._run = self.loop.step(step)
        self._shadows = Shadows(module)
        self._shadows.put("optimizer_step", self._optimizer_step)
        self._shadows.put("training_step", self._training_step)
        for name in ("optimizer_zero_grad", "backward"):
            self._shadows.put(name, self._unless_done(name))

    def begin(self, batch: Any, number: int) -> None:
        """Set the batch of the coming step, on the device, and its number in the epoch."""
        self._batch, self._has_batch = batch, True
        if self.reads_index:
            self._set_batch_index(number)
        for name, value in self._mirror.items():
            if not isinstance(value, Refused):
                self._mirror[name] = _as_watched(name, getattr(self._trainer, name))

    def statuses(self) -> tuple[LoopStatus, Status]:
        """Return the status of the loop and of the compiled model; of a closed step, the last ones."""
        return self._final or (self.loop.status(), self.loop.context.compiled.status())

    def close(self) -> None:
        """Leave the module as it was, and release what the loop holds."""
        self._final = self.statuses()
        self._shadows.take_off()
        self._batch = self._result = None
        self.loop.close()

    # -- what the loop runs ----------------------------------------------------------------------------------------

    def _make_step(self) -> tuple[Callable[[Any], Any], Callable[[int], None]]:
        """Return the step as a function of its batch, and a function that sets the number of the next batch.

        The loop watches the number as a closure variable, as it watches what the step reads of the Trainer. As an
        argument, each number would be a kind of call of its own, and no call would ever be compiled.
        """
        owner, module, optimizer, scaler = self._trainer, self.module, self._optimizer, self._scaler
        clips = own_method(module, "configure_gradient_clipping")
        backward = own_method(module, "backward")
        unscales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        trainer = self._mirror  # a closure variable of the step: the loop watches it, and names it so in messages
        takes_index, batch_idx = self._takes_index, 0

        def set_batch_index(number: int) -> None:
            nonlocal batch_idx
            batch_idx = number

        def training_step(batch: Any) -> Any:
            # The module's own backward and clipping may log, and read the Trainer, too.
            with self._watched(trainer):
                output = owner.strategy.training_step(*((batch, batch_idx) if takes_index else (batch,)))
                loss = _loss_of(output)
                if loss is _NO_STEP:
                    return output, self._take_logged()
                optimizer.zero_grad()
                if loss is not None:
                    backward(loss if scaler is None else scaler.scale(loss))
                    if scaler is not None and unscales:
                        scaler.unscale_(optimizer)
                clips(
                    optimizer,
                    gradient_clip_val=owner.gradient_clip_val,
                    gradient_clip_algorithm=owner.gradient_clip_algorithm,
                )
                if scaler is None:  # without a loss too, as in Lightning: no parameter has a gradient then
                    optimizer.step()
                elif loss is not None:
                    scaler.step(optimizer)
                    scaler.update()
            return output, self._take_logged()

        return training_step, set_batch_index

    @contextlib.contextmanager
    def _watched(self, mirror: dict[str, Any]) -> Iterator[None]:
        """Run the module's own methods in the block, and note their logging and what they read of the Trainer."""
        held = vars(self.module)
        self._inside = True
        self._logged.clear()
        shadows = Shadows(self.module)
        for name in ("log", "log_dict"):
            shadows.put(name, Note(name, self._logged))
        held["_trainer"] = _TrainerView(self._trainer, mirror)
        try:
            yield
        finally:
            held["_trainer"] = self._trainer
            shadows.take_off()
            self._inside = False

    def _take_logged(self) -> list[tuple[str, list[Any], dict[str, Any]]]:
        """Return what was logged, and forget it, so that a step changes no Python state."""
        taken = list(self._logged)
        self._logged.clear()
        return taken

    # -- what the Trainer calls ------------------------------------------------------------------------------------

    def _optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        if self._trainer.accumulate_grad_batches != 1:  # changed in the fit: gradients of earlier batches wait
            own_method(self.module, "optimizer_step")(epoch, batch_idx, optimizer, closure)
            return
        if not self._has_batch:  # an earlier batch must not be trained on again
            logging.getLogger("hotloop").warning(
                "HotLoop heard of no batch %d, as it is not among trainer.callbacks any more: the step is the "
                "Trainer's own from here on",
                batch_idx,
            )
            self.close()
            own_method(self.module, "optimizer_step")(epoch, batch_idx, optimizer, closure)
            return
        self._has_batch = False
        self._result = self._run(self._batch)
        # The closure asks for the result that is there: through the wrapper, DDP would begin another reduction.
        strategy = self._trainer.strategy
        strategy.model = self.module
        try:
            closure()
        finally:
            strategy.model = self._wrapped
            self._result = None

    def _unless_done(self, name: str) -> Callable[..., None]:
        """Return a method that does nothing where the loop's step has done the work, else calls the module's own."""
        own = own_method(self.module, name)

        def call(*args: Any, **kwargs: Any) -> None:
            if self._result is None:
                own(*args, **kwargs)

        return call

    def _training_step(self, *args: Any) -> Any:
        """Run the module's own step inside the loop's; return the loop's result when the Trainer's closure asks."""
        if self._inside or self._result is None:  # weight averaging asks no optimizer step for some batches
            return method_of(self.module, "training_step")(*args)
        output, logged = self._result
        for method, values, settings in logged:
            own_method(self.module, method)(*values, **settings)
        return output


def _as_watched(name: str, value: Any) -> Any:
    """Return what the loop watches for an attribute of the Trainer: schedulers themselves, not their settings."""
    return [config.scheduler for config in value] if name == "lr_scheduler_configs" else value


def _loss_of(output: Any) -> Any:
    """Return the loss in the output of a training_step; None where it asks for no update."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
        return _NO_STEP if loss is None else loss
    return output if output is None or isinstance(output, torch.Tensor) else _NO_STEP


def _reads_argument(function: Any, place: int) -> bool:
    """Return whether a function reads its argument at a place; True where that is unknown (``*args``, a decorator)."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):  # a decorator may do anything with what it hands on
        return True
    if code.co_argcount <= place:
        return bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[place]
    if name in code.co_cellvars or "locals" in code.co_names:
        return True
    for instruction in dis.get_instructions(code):
        loaded = instruction.argval
        # Since Python 3.13 an instruction may load two names at once, as a tuple.
        if loaded == name or (isinstance(loaded, tuple) and name in loaded):
            return True
    return False
