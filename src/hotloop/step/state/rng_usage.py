"""Which random streams a step draws from itself, where other threads draw as well: loaders, actors, other trainings."""

from __future__ import annotations

import random
import threading
from typing import TYPE_CHECKING, Any

from hotloop._torch.dispatch import draws_elsewhere, draws_random, tensors_in
from hotloop.step.state.random_state import CPU, NUMPY, PYTHON, generator_of

if TYPE_CHECKING:
    from collections.abc import Sequence

FROM_PYTHON = frozenset({"random", "getrandbits"})
"""Functions in C that all of Python's ``random`` draws through."""


class RngUsage:
    """The streams that a step was seen to draw from; a stream of the process's moves when any thread draws.

    numpy's functions are heard by nobody, so its stream counts as drawn from.
    """

    def __init__(self) -> None:
        self._names: set[str] | None = None
        self.listens = False

    def note(self, names: set[str] | None) -> None:
        """Take note of what a look at the step has seen it draw from; None where it was not seen throughout."""
        self._names = None if names is None else {NUMPY, *names, *(self._names or ())}

    def own(self, moved: Sequence[str]) -> list[str]:
        """Give the streams among those that have moved that the step may have moved."""
        names = self._names
        if names is None or set(moved) <= names or not other_threads():
            return list(moved)
        self.listens = True  # from the next proof on: a step may draw in some calls only
        return [name for name in moved if name in names]

    def others(self) -> frozenset[str]:
        """Name the streams of the host that are left to other threads: put back, they would draw the same again.

        Any other thread counts, though it may draw nothing: a short look need not have met one that does, and a compile
        in the run that is undone takes long. A step that draws there itself for the first time in that run disagrees.
        """
        if self._names is None or not other_threads():
            return frozenset()
        return frozenset({PYTHON, CPU} - self._names)


def drawn_by(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> set[str]:
    """Name the streams of torch's own that an operation has drawn from."""
    if not draws_random(operation, args, kwargs) or draws_elsewhere(kwargs):
        return set()
    devices = {one.device for one in tensors_in(*args, *kwargs.values(), result)}
    return {CPU if device.type == "cpu" else generator_of(device) for device in devices}


def is_pythons(owner: Any) -> bool:
    """Tell whether a generator is the one that the functions of Python's ``random`` draw from."""
    return owner is getattr(random.random, "__self__", None)


def other_threads() -> bool:
    """Tell whether any other thread of Python's is alive."""
    return threading.active_count() > 1
