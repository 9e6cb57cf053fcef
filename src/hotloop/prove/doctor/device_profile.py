"""Profiles steps on a GPU: how long its kernels run, against the time of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STEPS = 3


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
        for _ in range(STEPS):
            run()
        torch.cuda.synchronize(device)
    return busy_event(kernel_intervals(profile), STEPS, step_seconds)


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
