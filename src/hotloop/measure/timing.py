"""Times steps without making the host wait, and summarises times robustly: machines share, throttle and jump.

A step's device time comes from CUDA events that are read once they have passed; on the CPU the two times are one.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class _CudaEvent:
    """An event on the current stream of one device, which need not be the current device."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: torch.device) -> None:
        self._device, self._event = device, torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._event.record(torch.cuda.current_stream(self._device))

    def query(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end_event: _CudaEvent) -> float:
        return float(self._event.elapsed_time(end_event._event))


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of a step: seconds that the device worked on it, and seconds that the host did.

    A step whose ``host_seconds`` are near its ``seconds`` waits for Python and kernel launches, not for the device.
    """

    seconds: float
    host_seconds: float


class Mark:
    """A step being timed, from ``StepClock.start`` to ``StepClock.stop``."""

    __slots__ = ("begin", "host")

    def __init__(self, host: float, begin: Any) -> None:
        self.host, self.begin = host, begin


class StepClock:
    """A clock for steps on a device, which does not wait for the device.

    On CUDA two events are recorded on the device's current stream around each step, so start, step and stop must see
    the same current stream. They are read in order once the second event has passed. At most ``pending`` steps are
    under way. Beyond that the oldest times are dropped and counted in ``dropped``, since waiting for them would stall
    the run that is timed.

    Args:
        device: where the steps run; on any other device than CUDA the host's time is taken.
        pending: how many steps may be timed and not yet read.
        event: makes an event with timing; ``torch.cuda.Event`` unless a test passes another.
    """

    def __init__(
        self, device: torch.device | str, *, pending: int = 256, event: Callable[[], Any] | None = None
    ) -> None:
        if pending < 1:
            raise ConfigError(f"pending={pending}: a clock needs room for at least 1 step")
        self.device = torch.device(device)
        self.dropped = 0
        self._pending: collections.deque[tuple[Any, Any, float]] = collections.deque()
        self._known: collections.deque[Timing] = collections.deque(maxlen=pending)
        self._limit = pending
        self._spare: list[Any] = []
        make: Callable[[], Any] = event or (lambda: _CudaEvent(self.device))
        self._make = make if self.device.type == "cuda" else None

    def start(self, *, alone: bool = False) -> Mark:
        """Begin to time a step.

        Args:
            alone: wait first until the device has finished earlier work. Otherwise a step whose launches take longer
                than its work hides the launches behind an earlier long step, and looks faster than it is. Steps of two
                kinds can be compared only when each is timed alone.
        """
        if self._make is None:
            return Mark(time.perf_counter(), None)
        begin = self._spare.pop() if self._spare else self._make()
        begin.record()
        if alone:
            begin.synchronize()
        return Mark(time.perf_counter(), begin)

    def stop(self, mark: Mark) -> None:
        """End the step that ``mark`` began; a later ``take`` returns its time."""
        host = time.perf_counter() - mark.host
        if mark.begin is None or self._make is None:
            if len(self._known) == self._limit:
                self.dropped += 1
            self._known.append(Timing(host, host))
            return
        end = self._spare.pop() if self._spare else self._make()
        end.record()
        self._pending.append((mark.begin, end, host))
        if len(self._pending) > self._limit:
            self._collect()
        if len(self._pending) > self._limit:
            self._pending.popleft()  # these events are not reused: the device has yet to pass them
            self.dropped += 1

    def cancel(self, mark: Mark) -> None:
        """Forget a step that was begun and then failed, so that it has no time."""
        if mark.begin is not None:
            self._spare.append(mark.begin)

    def take(self) -> list[Timing]:
        """Return the times that have become known since the last call, in the steps' order; may be empty."""
        self._collect()
        known = list(self._known)
        self._known.clear()
        return known

    def _collect(self) -> None:
        # A stream passes its events in order, so the first event that it has not reached ends the search.
        while self._pending and self._pending[0][1].query():
            begin, end, host = self._pending.popleft()
            if len(self._known) == self._limit:
                self.dropped += 1
            self._known.append(Timing(begin.elapsed_time(end) * 1e-3, host))
            self._spare += begin, end


def typical(samples: Sequence[float], skip: int = 1) -> float:
    """Return the median without the first ``skip`` samples, which pay for warming up; the last where no more are left.

    Raises:
        ConfigError: there are no samples.
    """
    if not samples:
        raise ConfigError("no samples to take the typical one of")
    return statistics.median(samples[skip:] or samples[-1:])


def interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval of the median that assumes no distribution, only independent samples.

    With n sorted samples, [x(k), x(n+1-k)] holds the median with probability 1 - 2 * P(Binomial(n, 1/2) < k) (David and
    Nagaraja, 2003, "Order Statistics", section 7.1); k is the largest for which this is at least ``confidence``. With
    too few samples (under 6 for 95%) no such k exists, and the interval is (-inf, inf).

    Raises:
        ConfigError: ``confidence`` is not between 0 and 1, or there are no samples.
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence={confidence}: expected a number between 0 and 1")
    if not samples:
        raise ConfigError("no samples to take an interval of")
    ordered, n = sorted(samples), len(samples)
    # In integers, since 2**n is more than a float holds: the sum over i < k of (n over i), against half of the rest.
    allowed = int((1 - confidence) * 2**64) << n >> 65
    k, term, total = 0, 1, 1
    while total <= allowed:
        term = term * (n - k) // (k + 1)
        k, total = k + 1, total + term
    return (ordered[k - 1], ordered[n - k]) if k else (-math.inf, math.inf)


def ratio_interval(a: Sequence[float], b: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a confidence interval of the median of a/b over blocks taken in turns, each a with the b beside it.

    A slow moment of the machine slows down both, and cancels in each pair; between two medians it would not cancel.

    Raises:
        ConfigError: the two differ in length or are empty, a time is not positive, or ``confidence`` is out of range.
    """
    if len(a) != len(b):
        raise ConfigError(f"pairs need as many times of a as of b, not {len(a)} and {len(b)}")
    if any(not each > 0 for each in (*a, *b)):
        raise ConfigError("times must be positive to have a ratio")
    return interval([x / y for x, y in zip(a, b, strict=True)], confidence)
