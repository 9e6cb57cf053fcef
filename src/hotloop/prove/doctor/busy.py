"""How busy a GPU is in a step: the time in which at least one kernel runs, against the time of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

STEPS = 3


def host_bound(run: Callable[[], Any], device: torch.device, step_seconds: float) -> ev.HostBound | None:
    """Profile a few steps, and give how busy they keep the device; None where it is no GPU.

    The kernels' intervals come from the profile, the length of a step from unprofiled ones: a profile slows Python.

    Args:
        run: one step.
        device: where it runs.
        step_seconds: what a step takes without a profile.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    with profiled(torch.profiler.ProfilerActivity.CUDA) as profile:
        for _ in range(STEPS):
            run()
        torch.cuda.synchronize(device)
    return judged(kernels_of(profile), STEPS, step_seconds)


def profiled(*activities: Any) -> torch.profiler.profile:
    """Give a profile of all that runs in it; without accumulation torch warns that cycles forget theirs."""
    return torch.profiler.profile(activities=activities, acc_events=True)


def kernels_of(profile: Any) -> list[tuple[float, float]]:
    """Give the intervals of kernels and copies on the device, in microseconds, out of a profile."""
    return [
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]


def judged(intervals: Iterable[tuple[float, float]], steps: int, step_seconds: float) -> ev.HostBound | None:
    """Make the event out of kernels' intervals in microseconds; None where no kernel ran.

    Kernels of several streams overlap, so what counts is the union of their intervals.
    """
    known = list(intervals)
    if not known or step_seconds <= 0:
        return None
    share = min(1.0, covered(known) / 1e6 / steps / step_seconds)
    return ev.HostBound(busy=share, step_seconds=step_seconds, kernels=round(len(known) / steps))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Give the length of the union of intervals."""
    length, end = 0.0, float("-inf")
    for begin, until in sorted(intervals):
        length += max(0.0, until - max(begin, end))
        end = max(end, until)
    return length
