"""Observes the operations of one step.

An eager step shows where Python waits for the device and what is checkpointed. A compiled step shows what runs outside
of compiled code.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import linecache
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotloop import events as ev
from hotloop._torch.autograd import in_backward
from hotloop._torch.dispatch import name_of, observing, tensors_in, written_by
from hotloop._torch.frames import shown, stack_of
from hotloop._torch.host_reads import host_read
from hotloop._torch.places import address_of
from hotloop._torch.thread_patch import replaced
from hotloop.diagnose.host_sync import IN_A_SCALER

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from hotloop._torch.frames import Stack

    Place = tuple[str, int]

_TO_HOST = "a tensor is copied to the host: .cpu(), .to('cpu'), .numpy()"
_PAST_DISPATCHER = {"__repr__": "a tensor is printed or formatted", "tolist": "a tensor is read by .tolist()"}
"""Methods of a tensor that read its values without an operation that the dispatcher sees."""
_LEAST_SHARE, _MOST_PARTS = 0.01, 10
"""Parts below this share of a step are no events; at most so many are."""
_LOSS_OPERATION = re.compile(r"aten\.(\w*_loss\w*|binary_cross_entropy\w*|kl_div|_ctc_loss|_log_softmax)$")
_LOSS_LINE = re.compile(r"\bloss\w*\s*[+]?=|\bloss_\w+\(|\bcriterion\w*\(|cross_entropy")
_RANGE = "hotloop eager part "
"""The ranges in a profile that belong to a part begin so."""


class StepObserver:
    """Observes the operations of a step, and knows while an optimizer steps.

    Args:
        device: where the workload's models are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stepping = 0

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Observe everything that the block runs."""

        def count(change: int, *_: Any) -> None:
            self._stepping += change

        begun = register_optimizer_step_pre_hook(functools.partial(count, 1))
        ended = register_optimizer_step_post_hook(functools.partial(count, -1))
        try:
            with observing(self._operation):
                yield
        finally:
            begun.remove()
            ended.remove()

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class EagerObserver(StepObserver):
    """Finds, in an eager step, where Python waits for the device, and what is checkpointed around a compiled module.

    Args:
        device: where the workload's models are.
        targets: the modules that are, or will be, compiled.
    """

    def __init__(self, device: torch.device, targets: Collection[torch.nn.Module]) -> None:
        super().__init__(device)
        self._targets = {id(module) for module in targets}
        self._buffers = {
            address_of(buffer): name
            for module in targets
            for name, buffer in module.named_buffers()
            if buffer.layout == torch.strided
        }
        self._counted: set[str] = set()
        """Buffers that the forward has written."""
        self._recomputed: dict[str, None] = {}
        self._reads: dict[tuple[Place | None, str], list[float]] = {}
        self._checkpoints: dict[Place, str] = {}

    @contextlib.contextmanager
    def observe(self) -> Iterator[None]:
        """Observe everything that the block runs, the reads that no dispatcher sees included."""
        with contextlib.ExitStack() as stack:
            for name, reason in _PAST_DISPATCHER.items():
                stack.enter_context(replaced(torch.Tensor, name, functools.partial(self._timed_read, reason)))
            stack.enter_context(super().observe())
            yield

    def events(self) -> Iterator[ev.Event]:
        """Yield what was observed as events, the most frequent reads first."""
        for (place, reason), waits in sorted(self._reads.items(), key=lambda item: -len(item[1])):
            seconds = None if self._device.type == "cpu" else sum(waits)
            yield ev.HostSync(**_located(place), reason=reason, times=float(len(waits)), seconds=seconds)
        for place, function in self._checkpoints.items():
            yield ev.CheckpointOutside(function=function, **_located(place))
        for name in self._recomputed:
            yield ev.BufferRecomputed(buffer=name)

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written = written_by(operation, args, kwargs)
        if in_backward():  # recomputes; the call of the checkpoint itself was in the forward
            self._find_recomputed(written)
        else:
            self._find_checkpoint()
            self._counted.update(self._buffers_in(written))
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

    def _find_recomputed(self, written: Iterable[torch.Tensor]) -> None:
        """Note buffers that a backward writes: a checkpoint inside a module that is compiled runs its forward again."""
        for name in self._counted.intersection(self._buffers_in(written)):
            stack = stack_of(inspect.currentframe())
            # Around the module, the checkpoint calls its compiled code again, which writes again as eager does.
            if stack.in_checkpoint and not any(id(module) in self._targets for module in stack.modules):
                self._recomputed[name] = None

    def _buffers_in(self, written: Iterable[torch.Tensor]) -> Iterator[str]:
        """Yield the names of the buffers among tensors; one without memory of its own is none."""
        places = (address_of(one) for one in written if one.layout == torch.strided)
        yield from (self._buffers[place] for place in places if place and place in self._buffers)

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


class EagerParts(StepObserver):
    """Finds the parts of a compiled step that run outside of compiled code, except optimizers and copies to the device.

    An optimizer is never part of a compiled model, and a batch has to get to the device somehow. Only the forward of a
    part is timed, since autograd does not say whose backward runs.

    Args:
        names: the path of each module by its ``id``, as the workload's models name it.
        device: where the models are.
    """

    def __init__(self, names: Mapping[int, str], device: torch.device) -> None:
        super().__init__(device)
        self._names = names
        self._places: dict[str, Place | None] = {}
        self._counts: collections.Counter[str] = collections.Counter()
        self._seconds: dict[str, float] = collections.defaultdict(float)

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stack = stack_of(inspect.currentframe())
        backward = in_backward() or ".backward(" in source_of(stack.own)
        view = getattr(operation, "is_view", False)  # a view moves no data
        passed = view or backward or stack.compiled or stack.tracing or self._stepping
        if passed or _arrives(operation, args, kwargs):
            return operation(*args, **kwargs)
        part = self._part(operation, stack)
        self._places.setdefault(part, stack.own)
        self._counts[part] += 1
        began = time.perf_counter()
        with torch.profiler.record_function(_RANGE + part):
            result = operation(*args, **kwargs)
        self._seconds[part] += time.perf_counter() - began
        return result

    def _part(self, operation: Any, stack: Stack) -> str:
        """Name the part that an operation belongs to: a module's path, the loss, or a line of the program."""
        inner = [self._names[id(module)] for module in stack.modules if id(module) in self._names]
        # The outermost module below a model itself: the model's head, rather than a layer in the head.
        if path := next((name for name in inner if "." in name), ""):
            return path.partition(".")[2]
        losses = any(type(module).__name__.endswith("Loss") for module in stack.modules)
        if losses or _LOSS_OPERATION.match(name_of(operation)) or _LOSS_LINE.search(source_of(stack.own)):
            return "loss"
        return f"{Path(stack.own[0]).name}:{stack.own[1]}" if stack.own else "code that is not the program's"

    def events(self, run: Callable[[], Any], step_seconds: float) -> list[ev.EagerPart]:
        """Observe a step; return its parts as events, the longest first.

        Args:
            run: runs the step to its end.
            step_seconds: of a typical step. On a GPU the shares are of the time of its kernels instead.
        """
        if self._device.type == "cuda":
            step_seconds = self._profile(run)
        else:
            with self.observe():
                run()
        found = [
            ev.EagerPart(
                part=part,
                operations=self._counts[part],
                share=min(1.0, seconds / step_seconds) if step_seconds > 0 else 0.0,
                seconds=seconds,
                **_located(self._places[part]),
            )
            for part, seconds in sorted(self._seconds.items(), key=lambda item: -item[1])[:_MOST_PARTS]
        ]
        return [part for part in found if part.share >= _LEAST_SHARE]

    def _profile(self, run: Callable[[], Any]) -> float:
        """Observe a step on a GPU, take the parts' seconds from a profile, and return those of all kernels."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with self.observe(), torch.profiler.profile(activities=activities, acc_events=True) as profile:
            run()
        kernels = 0.0
        self._seconds.clear()
        for event in profile.events() or ():
            if event.device_type.name != "CPU":
                kernels += 0.0 if event.is_user_annotation else event.self_device_time_total / 1e6
            elif event.name.startswith(_RANGE):
                self._seconds[event.name.removeprefix(_RANGE)] += event.device_time_total / 1e6
        return kernels


def _arrives(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation copies from the host to a device."""
    if name_of(operation) not in ("aten._to_copy", "aten.copy_"):
        return False
    devices = {tensor.device.type for tensor in tensors_in(*args)}
    target = kwargs.get("device")
    return "cpu" in devices and (len(devices) > 1 or (target is not None and torch.device(target).type != "cpu"))


def source_of(place: Place | None) -> str:
    """Return the text of a line; empty if it is not known."""
    return linecache.getline(*place).strip() if place else ""


def _located(place: Place | None) -> dict[str, Any]:
    """Return a place as the fields of an event."""
    file, line = place or (None, None)
    return {"file": file, "line": line, "source": source_of(place)}
