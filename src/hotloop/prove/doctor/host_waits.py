"""Times how long Python waits at each line that reads a value of the device, in a step that nothing else slows down.

`EagerObserver` finds every read, but runs Python around each operation: the device keeps up, and the wait at a read
seems shorter than it is. Here only calls of torch's functions pass through Python, and stacks are read at reads alone.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
import time
from typing import TYPE_CHECKING, Any

from torch.overrides import TorchFunctionMode

from hotloop._torch.frames import stack_of
from hotloop.events import HostSync

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hotloop.events import Event

    Place = tuple[str, int]

_READS = frozenset(
    {
        *("item", "tolist", "cpu", "to", "numpy", "nonzero", "equal", "is_nonzero", "masked_select", "unique"),
        *("__bool__", "__float__", "__int__", "__index__", "__array__", "__repr__", "__format__"),
    }
)
"""Functions and methods that may read a value on the host; the time of one that does not is looked at by nobody."""


class HostWaits(TorchFunctionMode):
    """The seconds that calls which may read a value take in the block, by the line of the program."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[Place, float] = collections.defaultdict(float)

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(function, "__name__", "") not in _READS:
            return function(*args, **(kwargs or {}))
        began = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        waited = time.perf_counter() - began
        if (place := stack_of(inspect.currentframe()).own) is not None:
            self.seconds[place] += waited
        return result


def with_waits(events: Sequence[Event], run: Callable[[], Any]) -> list[Event]:
    """Run a step, and return the events with the wait that was timed in it, where a line has one read of its own.

    Args:
        events: what was observed of a step before; those without seconds, as on a CPU, stay so.
        run: runs a step to its end.
    """
    reads = [event for event in events if isinstance(event, HostSync) and event.seconds is not None]
    if not reads:
        return list(events)
    waits = HostWaits()
    with waits:
        run()
    lines = collections.Counter((event.file, event.line) for event in reads)

    def told(event: Event) -> Event:
        if not isinstance(event, HostSync) or event.seconds is None or event.file is None or event.line is None:
            return event
        place = (event.file, event.line)
        alone = lines[place] == 1 and place in waits.seconds
        return dataclasses.replace(event, seconds=waits.seconds[place]) if alone else event

    return [told(event) for event in events]
