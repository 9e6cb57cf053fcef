"""Observes one step: its operations, and on a GPU its kernels.

An eager step shows where Python waits for the device and what is checkpointed; a compiled step shows what runs outside
of compiled code. A profile shows how busy a step keeps the GPU.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
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
PROFILED_STEPS = 3
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

        def count(change: int) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                self._stepping += change

            return hook

        handles = [register_optimizer_step_pre_hook(count(1)), register_optimizer_step_post_hook(count(-1))]
        try:
            with observing(self._operation):
                yield
        finally:
            for handle in handles:
                handle.remove()

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

    def events(self) -> list[ev.Event]:
        """List what was observed as events, the most frequent reads first."""
        events: list[ev.Event] = []
        for (place, reason), waits in sorted(self._reads.items(), key=lambda item: -len(item[1])):
            file, line = place or (None, None)
            events.append(
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
            file, line = place
            events.append(ev.CheckpointOutside(function=function, file=file, line=line, source=source_of(place)))
        events += [ev.BufferRecomputed(buffer=name) for name in self._recomputed]
        return events

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not in_backward():  # the backward recomputes; the call itself was in the forward
            self._find_checkpoint()
            self._counted.update(self._buffers_in(written_by(operation, args, kwargs)))
        else:
            self._find_recomputed(written_by(operation, args, kwargs))
        reason = self._why_host_waits(operation, args, kwargs)
        began = time.perf_counter()
        result = operation(*args, **kwargs)
        if reason:
            self._note_read(reason, time.perf_counter() - began)
        return result

    def _find_checkpoint(self) -> None:
        """Note a call of torch.utils.checkpoint around a module that is compiled."""
        checkpointed = stack_of(inspect.currentframe()).checkpointed
        if checkpointed is None or checkpointed[0] in self._checkpoints:
            return
        place, modules = checkpointed
        inner = next((module for module in modules if id(module) in self._targets), None)
        if inner is not None:
            self._checkpoints[place] = type(inner).__name__

    def _find_recomputed(self, written: Iterable[torch.Tensor]) -> None:
        """Note buffers that a backward writes: a checkpoint inside a module that is compiled runs its forward again."""
        for name in self._buffers_in(written):
            stack = stack_of(inspect.currentframe()) if name in self._counted else None
            # Around the module, the checkpoint calls its compiled code again, which writes again as eager does.
            if stack and stack.in_checkpoint and not any(id(module) in self._targets for module in stack.modules):
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


@dataclasses.dataclass
class _Part:
    place: Place | None
    loss: bool = False
    operations: int = 0
    seconds: float = 0.0


class EagerParts(StepObserver):
    """Finds the parts of a compiled step that run outside of compiled code, except optimizers and copies to the device.

    An optimizer is never part of a compiled model, and a batch has to get to the device somehow. The backward of an
    eager forward is eager too; its time is shared out in proportion, since autograd does not say whose it is.

    Args:
        names: the path of each module by its ``id``, as the workload's models name it.
        device: where the models are; on a GPU the seconds come from a profile (`profile`).
    """

    def __init__(self, names: Mapping[int, str], device: torch.device) -> None:
        super().__init__(device)
        self._names = names
        self._parts: dict[tuple[str, Place | None], _Part] = {}
        self._backward = _Part(None)

    def _operation(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stack = stack_of(inspect.currentframe())
        view = getattr(operation, "is_view", False)  # a view moves no data
        if view or stack.compiled or stack.tracing or self._stepping or self._arrives(operation, args, kwargs):
            return operation(*args, **kwargs)
        backward = in_backward() or ".backward(" in source_of(stack.own)
        part = self._backward if backward else self._part(operation, stack)
        part.operations += 1
        if self._device.type != "cpu":
            with torch.profiler.record_function(f"{_RANGE}{id(part)}"):
                return operation(*args, **kwargs)
        began = time.perf_counter()
        result = operation(*args, **kwargs)
        part.seconds += time.perf_counter() - began
        return result

    @staticmethod
    def _arrives(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether an operation copies from the host to a device."""
        if name_of(operation) not in ("aten._to_copy", "aten.copy_"):
            return False
        devices = {tensor.device.type for tensor in tensors_in(*args)}
        target = kwargs.get("device")
        return "cpu" in devices and (len(devices) > 1 or (target is not None and torch.device(target).type != "cpu"))

    def _part(self, operation: Any, stack: Stack) -> _Part:
        inner = [self._names[id(module)] for module in stack.modules if id(module) in self._names]
        # The outermost module below a model itself: the model's head, rather than a layer in the head.
        path = next((name for name in inner if "." in name), "")
        losses = any(type(module).__name__.endswith("Loss") for module in stack.modules)
        part = self._parts.setdefault((path, None if path else stack.own), _Part(stack.own))
        part.loss = part.loss or losses or _LOSS_OPERATION.match(name_of(operation)) is not None
        return part

    def profile(self, run: Callable[[], Any]) -> float:
        """Observe a step on a GPU under a profile; return the seconds in which the GPU was busy."""
        activities = torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA
        with self.observe(), profiled(*activities) as profile:
            run()
            torch.cuda.synchronize()
        ranges: collections.Counter[str] = collections.Counter()
        for event in profile.events() or ():
            if event.name.startswith(_RANGE) and event.device_type.name == "CPU":
                ranges[event.name] += event.device_time_total / 1e6
        self.set_seconds(ranges)
        return busy_seconds(kernel_intervals(profile))

    def set_seconds(self, ranges: Mapping[str, float]) -> None:
        """Set the device seconds of each part from the ranges of a profile, by their names."""
        for part in (*self._parts.values(), self._backward):
            part.seconds = ranges.get(f"{_RANGE}{id(part)}", 0.0)

    def events(self, step_seconds: float) -> list[ev.EagerPart]:
        """List the parts as events, the longest first.

        Args:
            step_seconds: the whole that the shares are of: a step's time, or on a GPU the time of its kernels.
        """
        joined: dict[str, list[_Part]] = {}
        for (path, place), part in self._parts.items():
            joined.setdefault(self._title(path, place, part), []).append(part)
        forward = sum(part.seconds for part in self._parts.values())
        factor = 1 + (self._backward.seconds / forward if forward else 0.0)
        events = []
        for name, parts in joined.items():
            seconds = sum(part.seconds for part in parts) * factor
            longest = max(parts, key=lambda part: part.seconds)
            file, line = longest.place or (None, None)
            event = ev.EagerPart(
                part=name,
                operations=sum(part.operations for part in parts),
                share=min(1.0, seconds / step_seconds) if step_seconds > 0 else 0.0,
                seconds=seconds,
                file=file,
                line=line,
                source=source_of(longest.place),
            )
            if event.share >= _LEAST_SHARE:
                events.append(event)
        return sorted(events, key=lambda event: -event.share)[:_MOST_PARTS]

    @staticmethod
    def _title(path: str, place: Place | None, part: _Part) -> str:
        if path:
            return path.partition(".")[2]
        if part.loss or (place and _LOSS_LINE.search(source_of(place))):
            return "loss"
        return f"{Path(place[0]).name}:{place[1]}" if place else "code that is not the program's"


def source_of(place: Place | None) -> str:
    """Return the text of a line; empty if it is not known."""
    return linecache.getline(*place).strip() if place else ""


def host_bound(run: Callable[[], Any], device: torch.device, step_seconds: float) -> ev.HostBound | None:
    """Profile a few steps, and return the event that says how busy they keep a GPU; None on a CPU.

    Args:
        run: runs one step.
        device: where the step runs.
        step_seconds: of a step without a profile, since a profile slows Python down.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with profiled(torch.profiler.ProfilerActivity.CUDA) as profile:
        for _ in range(PROFILED_STEPS):
            run()
        torch.cuda.synchronize(device)
    return busy_event(kernel_intervals(profile), PROFILED_STEPS, step_seconds)


def profiled(*activities: Any) -> torch.profiler.profile:
    """Return a profile of the block's work. Without accumulation torch warns that each cycle forgets its events."""
    return torch.profiler.profile(activities=activities, acc_events=True)


def kernel_intervals(profile: Any) -> list[tuple[float, float]]:
    """List the begin and end of each kernel and copy on the device, in microseconds."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def busy_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which at least one kernel ran: kernels of several streams overlap.

    Args:
        intervals: begin and end of each kernel, in microseconds.
    """
    length, end = 0.0, float("-inf")
    for begin, until in sorted(intervals):
        length += max(0.0, until - max(begin, end))
        end = max(end, until)
    return length / 1e6


def busy_event(intervals: list[tuple[float, float]], steps: int, step_seconds: float) -> ev.HostBound | None:
    """Return the event for the kernels of some steps; None if no kernel ran.

    Args:
        intervals: begin and end of each kernel, in microseconds.
        steps: in which these kernels ran.
        step_seconds: of a step without a profile.
    """
    if not intervals or step_seconds <= 0:
        return None
    share = min(1.0, busy_seconds(intervals) / steps / step_seconds)
    return ev.HostBound(busy=share, step_seconds=step_seconds, kernels=round(len(intervals) / steps))
