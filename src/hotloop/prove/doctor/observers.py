"""Observes the operations of an eager step: where Python waits for the device, and what is checkpointed."""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotloop import events as ev
from hotloop._torch.autograd import in_backward
from hotloop._torch.dispatch import name_of, observing, tensors_in
from hotloop._torch.frames import shown, stack_of
from hotloop._torch.host_reads import host_read
from hotloop._torch.thread_patch import replaced
from hotloop.diagnose.host_sync import IN_A_SCALER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    Place = tuple[str, int]

_TO_HOST = "a tensor is copied to the host: .cpu(), .to('cpu'), .numpy()"
_PAST_DISPATCHER = {"__repr__": "a tensor is printed or formatted", "tolist": "a tensor is read by .tolist()"}
"""Methods of a tensor that read its values without an operation that the dispatcher sees."""


class EagerObserver:
    """Finds, in an eager step, where Python waits for the device, and what is checkpointed around a compiled module.

    Args:
        device: where the workload's models are.
        targets: the modules that are, or will be, compiled.
    """

    def __init__(self, device: torch.device, targets: Collection[torch.nn.Module]) -> None:
        self._device = device
        self._stepping = 0
        self._targets = {id(module) for module in targets}
        self._reads: dict[tuple[Place | None, str], list[float]] = {}
        self._checkpoints: dict[Place, str] = {}

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Observe everything that the block runs, the reads that no dispatcher sees included."""

        def count(change: int, *_: Any) -> None:
            self._stepping += change

        with contextlib.ExitStack() as stack:
            for name, reason in _PAST_DISPATCHER.items():
                stack.enter_context(replaced(torch.Tensor, name, functools.partial(self._timed_read, reason)))
            stack.callback(register_optimizer_step_pre_hook(functools.partial(count, 1)).remove)
            stack.callback(register_optimizer_step_post_hook(functools.partial(count, -1)).remove)
            stack.enter_context(observing(self._operation))
            yield

    def events(self) -> Iterator[ev.Event]:
        """Yield what was observed as events, the most frequent reads first."""
        for (place, reason), waits in sorted(self._reads.items(), key=lambda item: -len(item[1])):
            seconds = None if self._device.type == "cpu" else sum(waits)
            yield ev.HostSync(**_located(place), reason=reason, times=float(len(waits)), seconds=seconds)
        for place, function in self._checkpoints.items():
            yield ev.CheckpointOutside(function=function, **_located(place))

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not in_backward():  # the backward recomputes; the call itself was in the forward
            self._find_checkpoint()
        reason = self._why_host_waits(operation, args, kwargs)
        began = time.perf_counter()
        result = operation(*args, **kwargs)
        if reason:
            self._note_read(reason, time.perf_counter() - began)
        return result

    def _find_checkpoint(self) -> None:
        """Note a call of torch.utils.checkpoint around a module that is compiled."""
        place, modules = stack_of(inspect.currentframe()).checkpointed or (None, ())
        inner = next((module for module in modules if id(module) in self._targets), None)
        if place is not None and inner is not None:
            self._checkpoints[place] = type(inner).__name__

    def _why_host_waits(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Say why Python waits for an operation; empty if it does not.

        On a CPU nothing waits, so reads by an optimizer, which keeps its step count on the host, do not count.
        """
        if self._device.type == "cpu":
            return "" if self._stepping else host_read(operation, args, kwargs)
        if not any(tensor.device.type == self._device.type for tensor in tensors_in(*args, *kwargs.values())):
            return ""  # every tensor is on the host already
        if reason := host_read(operation, args, kwargs):
            return reason
        name = name_of(operation)
        if name == "aten.copy_":
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking")  # noqa: PLR2004 - its position
            leaves = args[0].device.type == "cpu" and args[1].device.type != "cpu"
        else:
            non_blocking, target = kwargs.get("non_blocking"), kwargs.get("device")
            to_host = name == "aten._to_copy" and target is not None and torch.device(target).type == "cpu"
            leaves = to_host and args[0].device.type != "cpu"
        return _TO_HOST if leaves and not non_blocking else ""

    def _note_read(self, reason: str, seconds: float) -> None:
        stack = stack_of(inspect.currentframe())
        if stack.scaling and not self._stepping:
            reason += f" ({IN_A_SCALER})"
        elif stack.reader != stack.own and stack.reader is not None:  # the user can change the program's own line only
            inside = shown(stack.reader)
            where = inside if inside.startswith("torch") else Path(inside).name
            reason += f" (in {where}, an installed package)"
        self._reads.setdefault((stack.own, reason), []).append(seconds)

    def _timed_read(self, reason: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = real(tensor, *args, **kwargs)
            if tensor.device.type == self._device.type and not self._stepping:
                self._note_read(reason, time.perf_counter() - began)
            return result

        return read


def source_of(place: Place | None) -> str:
    """Return the text of a line; empty if it is not known."""
    return linecache.getline(*place).strip() if place else ""


def _located(place: Place | None) -> dict[str, Any]:
    """Return a place as the fields of an event."""
    file, line = place or (None, None)
    return {"file": file, "line": line, "source": source_of(place)}
