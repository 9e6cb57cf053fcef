"""One compiled step, looked at operation by operation: what of the step runs outside of compiled code."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotloop import events as ev
from hotloop._torch.autograd import in_backward
from hotloop._torch.dispatch import name_of, observing, tensors_in
from hotloop._torch.frames import stack_of
from hotloop.prove.doctor.busy import covered, kernels_of, profiled
from hotloop.prove.doctor.eager_look import source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop._torch.frames import Stack

LEAST_SHARE = 0.01
"""Of a step: smaller parts are no events."""
MOST_PARTS = 10
LOSS = "loss"
_LOSS_OPERATION = re.compile(r"aten\.(\w*_loss\w*|binary_cross_entropy\w*|kl_div|_ctc_loss|_log_softmax)$")
_LOSS_LINE = re.compile(r"\bloss\w*\s*[+]?=|\bloss_\w+\(|\bcriterion\w*\(|cross_entropy")
_PROFILED = "hotloop eager part "


@dataclasses.dataclass
class _Part:
    place: tuple[str, int] | None
    loss: bool = False
    operations: int = 0
    seconds: float = 0.0


class EagerParts:
    """What of one step of a workload runs outside of compiled code, but for its optimizers and copies to the device.

    An optimizer is never part of a compiled model, and a batch has to get to the device somehow. The backward of what
    runs eager forward is eager too; its time is shared out in proportion, since autograd does not say whose it is.

    Args:
        names: the path of each module by its ``id``, as the workload's models name it.
        device: on a GPU, ``seconds`` come from a profile: give what `profiled` makes of it to `events`.
    """

    def __init__(self, names: Mapping[int, str], device: torch.device) -> None:
        self._names, self._device = names, device
        self._parts: dict[tuple[str, tuple[str, int] | None], _Part] = {}
        self._backward = _Part(None)
        self._stepping = 0
        self.compiled = 0
        """Operations seen in compiled code: none of Inductor's own kernels, which no dispatcher sees."""

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        """Look at everything that the block runs."""
        handles = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        try:
            with observing(self._operation):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _optimizer_begins(self, *_: Any) -> None:
        self._stepping += 1

    def _optimizer_ends(self, *_: Any) -> None:
        self._stepping -= 1

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stack = stack_of(inspect.currentframe())
        view = getattr(operation, "is_view", False)  # a view moves no data
        if view or stack.compiled or stack.tracing or self._stepping or _arrives(operation, args, kwargs):
            self.compiled += stack.compiled
            return operation(*args, **kwargs)
        backward = in_backward() or ".backward(" in source_of(stack.own)
        part = self._backward if backward else self._part(operation, stack)
        part.operations += 1
        if self._device.type != "cpu":
            with torch.profiler.record_function(f"{_PROFILED}{id(part)}"):
                return operation(*args, **kwargs)
        began = time.perf_counter()
        result = operation(*args, **kwargs)
        part.seconds += time.perf_counter() - began
        return result

    def _part(self, operation: Any, stack: Stack) -> _Part:
        inner = [self._names[id(module)] for module in stack.modules if id(module) in self._names]
        # The outermost module below a model itself: its head, rather than the one layer in the head.
        path = next((name for name in inner if "." in name), "")
        losses = any(type(module).__name__.endswith("Loss") for module in stack.modules)
        part = self._parts.setdefault((path, None if path else stack.own), _Part(stack.own))
        part.loss = part.loss or losses or _LOSS_OPERATION.match(name_of(operation)) is not None
        return part

    def profiled(self, device_seconds: Mapping[str, float]) -> None:
        """Take the device's time of each part from a profile of the step, by the names of its ranges."""
        for part in (*self._parts.values(), self._backward):
            part.seconds = device_seconds.get(f"{_PROFILED}{id(part)}", 0.0)

    def events(self, step_seconds: float) -> list[ev.EagerPart]:
        """Give the parts as events, the longest first.

        Args:
            step_seconds: what the shares are of: a step's time, on a GPU that of its kernels.
        """
        joined: dict[str, list[tuple[_Part, str]]] = {}
        for (path, place), part in self._parts.items():
            joined.setdefault(self._title(path, place, part), []).append((part, path))
        forward = sum(part.seconds for part in self._parts.values())
        factor = 1 + (self._backward.seconds / forward if forward else 0.0)
        found = [self._event(name, [part for part, _ in parts], factor, step_seconds) for name, parts in joined.items()]
        found = [event for event in found if event.share >= LEAST_SHARE]
        return sorted(found, key=lambda event: -event.share)[:MOST_PARTS]

    def _title(self, path: str, place: tuple[str, int] | None, part: _Part) -> str:
        if path:
            return path.partition(".")[2]
        if part.loss or (place and _LOSS_LINE.search(source_of(place))):
            return LOSS
        return f"{Path(place[0]).name}:{place[1]}" if place else "code that is not the program's"

    def _event(self, name: str, parts: list[_Part], factor: float, step_seconds: float) -> ev.EagerPart:
        seconds = sum(part.seconds for part in parts) * factor
        longest = max(parts, key=lambda part: part.seconds)
        file, line = longest.place or (None, None)
        return ev.EagerPart(
            part=name,
            operations=sum(part.operations for part in parts),
            share=min(1.0, seconds / step_seconds) if step_seconds > 0 else 0.0,
            seconds=seconds,
            file=file,
            line=line,
            source=source_of(longest.place),
        )


def _arrives(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell whether an operation copies from the host to a device."""
    if name_of(operation) not in ("aten._to_copy", "aten.copy_"):
        return False
    given = {one.device.type for one in tensors_in(*args)}
    target = kwargs.get("device")
    return "cpu" in given and (len(given) > 1 or (target is not None and torch.device(target).type != "cpu"))


def device_seconds(run: Callable[[], Any]) -> tuple[dict[str, float], float]:
    """Profile a step on a GPU: seconds of the device by the name of each range, and of all its kernels together."""
    with profiled(torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA) as profile:
        run()
        torch.cuda.synchronize()
    ranges: collections.Counter[str] = collections.Counter()
    for event in profile.events() or ():
        if event.name.startswith(_PROFILED) and event.device_type.name == "CPU":
            ranges[event.name] += event.device_time_total / 1e6
    return dict(ranges), covered(kernels_of(profile)) / 1e6
