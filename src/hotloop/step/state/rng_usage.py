"""The random streams that a step draws from itself."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from hotloop._torch.dispatch import draws_elsewhere, draws_random, tensors_in
from hotloop._torch.random_state import CPU, NUMPY, PYTHON, generator_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class RngUsage:
    """The random streams that a step was seen to draw from itself.

    The streams belong to the process: any thread may move them (loaders, actors, other trainings). numpy's functions
    cannot be observed, so its stream always counts as used.
    """

    def __init__(self) -> None:
        self._names: set[str] | None = None

    def note(self, names: set[str] | None) -> None:
        """Add the streams that an observed step drew from; None if the step was not observed throughout."""
        self._names = None if names is None else {NUMPY, *names, *(self._names or ())}

    def own(self, moved: Sequence[str]) -> list[str]:
        """Return those of the moved streams that the step itself may have moved."""
        names = self._names
        if names is None or set(moved) <= names or not other_threads():
            return list(moved)
        return [name for name in moved if name in names]

    def others(self) -> frozenset[str]:
        """Return the host's streams that an undone step leaves alone: set back, other threads would draw twice.

        Any other thread counts, even if it may draw nothing: an observed step need not have met a draw of it, and
        compiling in the undone run takes long. If the step itself draws there for the first time in that run, the
        proof disagrees.
        """
        if self._names is None or not other_threads():
            return frozenset()
        return frozenset({PYTHON, CPU} - self._names)


def drawn_by(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> set[str]:
    """Return the names of torch's own streams that an operation has drawn from."""
    if not draws_random(operation, args, kwargs) or draws_elsewhere(kwargs):
        return set()
    devices = {tensor.device for tensor in tensors_in(*args, *kwargs.values(), result)}
    return {CPU if device.type == "cpu" else generator_of(device) for device in devices}


def other_threads() -> bool:
    """Return whether any other thread of Python's is alive."""
    return threading.active_count() > 1
