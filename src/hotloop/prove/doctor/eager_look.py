"""One eager step, looked at operation by operation: where Python waits for the device, and what is checkpointed."""

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
from hotloop._torch.dispatch import host_read, name_of, observing, tensors_in
from hotloop._torch.frames import stack_of
from hotloop._torch.thread_patch import replaced
from hotloop.diagnose.host_sync import IN_A_SCALER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

_TO_HOST = "a tensor is copied to the host: .cpu(), .to('cpu'), .numpy()"
_SILENT = {"__repr__": "a tensor is printed or formatted", "tolist": "a tensor is read by .tolist()"}
"""Methods of a tensor that read it past the dispatcher."""


class EagerLook:
    """What one eager step shows.

    Args:
        device: where the workload's models are.
        targets: the modules that are, or will be, compiled.
    """

    def __init__(self, device: torch.device, targets: Collection[torch.nn.Module]) -> None:
        self._device = device
        self._targets = {id(module) for module in targets}
        self._reads: dict[tuple[tuple[str, int] | None, str], list[float]] = {}
        self._checkpoints: dict[tuple[str, int], str] = {}
        self._stepping = 0

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at everything that the block runs."""
        handles = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        try:
            with contextlib.ExitStack() as stack:
                for name, reason in _SILENT.items():
                    stack.enter_context(replaced(torch.Tensor, name, functools.partial(self._hearing, reason)))
                stack.enter_context(observing(self._operation))
                yield
        finally:
            for handle in handles:
                handle.remove()

    def events(self) -> list[ev.Event]:
        """Give what was seen as events, the most frequent reads first."""
        found: list[ev.Event] = []
        for (place, reason), waits in sorted(self._reads.items(), key=lambda item: -len(item[1])):
            file, line = place or (None, None)
            found.append(
                ev.HostSync(
                    file=file,
                    line=line,
                    source=source_of(place),
                    reason=reason,
                    times=float(len(waits)),
                    seconds=None if self._device.type == "cpu" else sum(waits),
                )
            )
        for place, function in self._checkpoints.items():
            found.append(ev.CheckpointOutside(function=function, file=place[0], line=place[1], source=source_of(place)))
        return found

    def _optimizer_begins(self, *_: Any) -> None:
        self._stepping += 1

    def _optimizer_ends(self, *_: Any) -> None:
        self._stepping -= 1

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._look_for_checkpoint()
        reason = self._reads_host(operation, args, kwargs)
        began = time.perf_counter()
        result = operation(*args, **kwargs)
        if reason:
            self._note(reason, time.perf_counter() - began)
        return result

    def _reads_host(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Say why Python waits for an operation; on a CPU not for what an optimizer keeps on the host anyway."""
        if self._device.type == "cpu":
            return "" if self._stepping else host_read(operation, args)
        if not any(one.device.type == self._device.type for one in tensors_in(*args, *kwargs.values())):
            return ""  # of a tensor that is on the host already
        return host_read(operation, args) or (_TO_HOST if _leaves(operation, args, kwargs) else "")

    def _note(self, reason: str, seconds: float) -> None:
        stack = stack_of(inspect.currentframe())
        if stack.scaling and not self._stepping:
            reason += f" ({IN_A_SCALER})"
        elif stack.place != stack.own and stack.place is not None:  # the program's line is the one that can be changed
            reason += f" (in {Path(stack.place[0]).name}:{stack.place[1]}, an installed package)"
        self._reads.setdefault((stack.own, reason), []).append(seconds)

    def _hearing(self, reason: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = real(tensor, *args, **kwargs)
            if tensor.device.type == self._device.type and not self._stepping:
                self._note(reason, time.perf_counter() - began)
            return result

        return read

    def _look_for_checkpoint(self) -> None:
        """Note a call of torch.utils.checkpoint that goes around a module which is compiled."""
        if in_backward():  # its recomputation: the call itself was in the forward
            return
        found = stack_of(inspect.currentframe()).checkpointed
        if found is None or found[0] in self._checkpoints:
            return
        inner = next((module for module in found[1] if id(module) in self._targets), None)
        if inner is not None:
            self._checkpoints[found[0]] = type(inner).__name__


def source_of(place: tuple[str, int] | None) -> str:
    """Give the text of the user's line."""
    return linecache.getline(*place).strip() if place else ""


def _leaves(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation copies from the device to the host and waits for it."""
    name = name_of(operation)
    if kwargs.get("non_blocking"):
        return False
    if name == "aten.copy_":
        waits = len(args) < 3 or not args[2]  # noqa: PLR2004 - its third argument is non_blocking
        return bool(waits and args[0].device.type == "cpu" and args[1].device.type != "cpu")
    target = kwargs.get("device")
    to_host = name == "aten._to_copy" and target is not None and torch.device(target).type == "cpu"
    return bool(to_host and args[0].device.type != "cpu")
