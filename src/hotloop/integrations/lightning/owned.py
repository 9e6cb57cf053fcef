"""The training step of a LightningModule, owned by a loop.

Under automatic optimization the Trainer asks ``module.optimizer_step`` to run forward, backward and optimizer. Ours has
a `hotloop.Loop` run them, as a plain function of the batch, in any tier; then it lets the Trainer's closure go through
its hooks, counters and metrics once, with the result that is there already. What the step logs is noted while it runs
and handed to Lightning afterwards, so that logging neither breaks a graph nor happens twice in a proof.
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
from hotloop.integrations.lightning.shadow import Shadows, own_method
from hotloop.step import Loop
from hotloop.step.guard.fingerprint import Unwatchable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import lightning.pytorch as pl

    from hotloop.integrations.lightning.status import Seen

_log = logging.getLogger("hotloop")


_NO_STEP = object()
"""In place of a loss, where a training_step returned what the Trainer refuses: its closure says so, with its error."""
_LOGGERS = ("logger", "loggers")
_WRITES = Unwatchable("a logger writes when it is called, and a replay calls nothing: log through self.log")


class _Read:
    """Stands for the Trainer inside a step: notes what of its state the step reads, numbers and objects."""

    def __init__(self, trainer: pl.Trainer, mirror: dict[str, Any]) -> None:
        object.__setattr__(self, "_trainer", trainer)
        object.__setattr__(self, "_mirror", mirror)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if name in _LOGGERS and value:
            self._mirror[name] = _WRITES
        elif not callable(value):
            self._mirror[name] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._trainer, name, value)


class OwnedStep:
    """One fit's training step in the hands of a loop.

    Args:
        trainer: which has set up model and optimizer.
        module: whose step it is.
        settings: of the `hotloop.Loop`.
    """

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, settings: dict[str, Any]) -> None:
        self._trainer, self.module = trainer, module
        self._optimizer: torch.optim.Optimizer = trainer.optimizers[0]
        self._scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._mirror: dict[str, Any] = {}
        """What a step has read of the Trainer: a loop watches it, and records anew where something changed."""
        self._logged: list[tuple[str, list[Any], dict[str, Any]]] = []
        self._inside = self._begun = False
        self.left_at: int | None = None
        """The step from which on they are the Trainer's own, since the callback was taken out in the fit."""
        self._seen: Seen | None = None
        self._batch: Any = None
        self._result: Any = None
        own = own_method(module, "training_step")
        takes = is_param_in_hook_signature(own, "batch_idx", min_args=2)  # as the Trainer tells it
        self._takes_index, self.reads_index = takes, takes and reads_argument(type(module).training_step, 2)
        state = () if self._scaler is None else (self._scaler,)
        self.loop = Loop(module, self._optimizer, state=state, **settings)
        self.loop.not_watched = (trainer, self, trainer.strategy)
        step, self._take_number = self._make_step()
        self._run = self.loop.step(step)
        self._shadows = Shadows(module)
        self._shadows.put("optimizer_step", self._optimizer_step)
        self._shadows.put("training_step", self._training_step_given)
        for name in ("optimizer_zero_grad", "backward"):
            self._shadows.put(name, self._done_already(name))

    def begin(self, batch: Any, number: int) -> None:
        """Take the batch of the coming step, on the device, and its number in the epoch."""
        self._batch, self._begun = batch, True
        if self.reads_index:
            self._take_number(number)
        for name, value in self._mirror.items():
            if value is not _WRITES:
                self._mirror[name] = getattr(self._trainer, name)

    def seen(self) -> Seen:
        """Give the status of the loop and of the compiled model, and the record: as they were, once it is closed."""
        return self._seen or (self.loop.status(), self.loop.context.compiled.status(), self.loop.record)

    def compiled_with(self) -> dict[str, Any]:
        """Give the arguments for `hotloop.compile` of what is in force; empty where nothing is compiled."""
        tier = self.loop.tier
        return (
            self.loop.context.compiled.settings(tier)
            if tier.compiles and self.loop.context.compiled.base == tier.base
            else {}
        )

    def close(self) -> None:
        """Leave the module as it was, and give back what the loop holds."""
        self._seen = self.seen()
        self._shadows.take_off()
        self._batch = self._result = None
        self.loop.close()

    # -- what the loop runs ----------------------------------------------------------------------------------------

    def _make_step(self) -> tuple[Callable[[Any], Any], Callable[[int], None]]:
        """Give the step as a function of its batch, and what tells it the number of the next one.

        A number that training_step reads is watched, as what it reads of the Trainer is: as an argument each would be a
        kind of call of its own, which compiled code does not see before it has come back.
        """
        owner, module, optimizer, scaler = self._trainer, self.module, self._optimizer, self._scaler
        clips = own_method(module, "configure_gradient_clipping")
        backward = own_method(module, "backward")
        unscales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        trainer = self._mirror  # held by the step itself, so looked at as the step's own state, and named so there
        takes_index, batch_idx = self._takes_index, 0

        def take_number(number: int) -> None:
            nonlocal batch_idx
            batch_idx = number

        def training_step(batch: Any) -> Any:
            # The module's own backward and clipping may log, and read of the Trainer, too.
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

        return training_step, take_number

    @contextlib.contextmanager
    def _watched(self, mirror: dict[str, Any]) -> Iterator[None]:
        """Have the module's own methods run, their logging noted and what they read of the Trainer as well."""
        held = vars(self.module)
        self._inside = True
        self._logged.clear()
        shadows = Shadows(self.module)
        for name in ("log", "log_dict"):
            shadows.put(name, Note(name, self._logged))
        held["_trainer"] = _Read(self._trainer, mirror)
        try:
            yield
        finally:
            held["_trainer"] = self._trainer
            shadows.take_off()
            self._inside = False

    def _take_logged(self) -> list[tuple[str, list[Any], dict[str, Any]]]:
        """Give what was logged; nothing is left behind, so that a step changes no Python state."""
        taken = list(self._logged)
        self._logged.clear()
        return taken

    # -- what the Trainer calls ------------------------------------------------------------------------------------

    def _optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Callable[[], Any]) -> None:
        if self._trainer.accumulate_grad_batches != 1:  # changed in the fit: gradients of earlier batches wait
            own_method(self.module, "optimizer_step")(epoch, batch_idx, optimizer, closure)
            return
        if not self._begun:  # nobody has named its batch: an earlier one must not be trained on again
            _log.warning(
                "HotLoop heard of no batch %d, as it is not among trainer.callbacks any more: the step is the "
                "Trainer's own from here on",
                batch_idx,
            )
            self.left_at = self.loop.steps
            self.close()
            own_method(self.module, "optimizer_step")(epoch, batch_idx, optimizer, closure)
            return
        self._begun = False
        self._result = self._run(self._batch)
        try:
            closure()
        finally:
            self._result = None

    def _done_already(self, name: str) -> Callable[..., None]:
        """Give what the Trainer's closure calls: nothing where the loop's step has done it, else the module's own."""
        own = own_method(self.module, name)

        def call(*args: Any, **kwargs: Any) -> None:
            if self._result is None:
                own(*args, **kwargs)

        return call

    def _training_step_given(self, *args: Any) -> Any:
        """The module's own training_step inside the loop's step, what that gave when the Trainer's closure asks."""
        if self._inside or self._result is None:  # a batch for which no optimizer step is asked: weight averaging's
            return method_of(self.module, "training_step")(*args)
        output, logged = self._result
        for method, values, settings in logged:
            own_method(self.module, method)(*values, **settings)
        return output


def _loss_of(output: Any) -> Any:
    """Give the loss in what a training_step returned; None where it asks for no update."""
    if isinstance(output, Mapping):
        loss = output.get("loss")
        return _NO_STEP if loss is None else loss
    return output if output is None or isinstance(output, torch.Tensor) else _NO_STEP


def reads_argument(function: Any, place: int) -> bool:
    """Tell whether a function reads its argument at a place; where that cannot be told (``*args``), yes."""
    code = getattr(function, "__code__", None)
    if code is None or hasattr(function, "__wrapped__"):  # a decorator may do anything with what it hands on
        return True
    if code.co_argcount <= place:
        return bool(code.co_flags & inspect.CO_VARARGS)
    name = code.co_varnames[place]
    inner = name in code.co_cellvars or "locals" in code.co_names
    return inner or any(one.argval == name or name in _names(one) for one in dis.get_instructions(code))


def _names(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Give the names of an instruction that loads two at once."""
    return instruction.argval if isinstance(instruction.argval, tuple) else ()
