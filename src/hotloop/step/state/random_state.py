"""Random streams: their positions, to return to and to compare, and which streams a step draws from itself."""

from __future__ import annotations

import random
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dispatch import draws_elsewhere, draws_random, tensors_in

if TYPE_CHECKING:
    from collections.abc import Sequence


PYTHON, NUMPY, CPU = "Python's random", "numpy.random", "torch's CPU generator"
FROM_PYTHON = frozenset({"random", "getrandbits"})
"""The C functions that all of Python's ``random`` draws through."""


def generator_of(device: torch.device) -> str:
    """Return the name of a GPU's stream."""
    return f"the generator of {device}"


class RandomState:
    """The positions of the random streams that a step may draw from: Python's, numpy's, torch's on CPU and GPU.

    Args:
        devices: the devices on which numbers may be drawn.
        python: include the streams of Python and numpy. A replay never draws from them, and reading them is slowest.
    """

    def __init__(self, devices: Sequence[torch.device], *, python: bool = True) -> None:
        self._python = random.getstate() if python else None
        numpy = sys.modules.get("numpy") if python else None
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._cpu = torch.get_rng_state()
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices if device.type == "cuda"]

    def restore(self, *, leaving: frozenset[str] = frozenset()) -> None:
        """Set the streams back to these positions, except the streams named in ``leaving``."""
        if self._python is not None and PYTHON not in leaving:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if CPU not in leaving:
            torch.set_rng_state(self._cpu)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)

    def moved_since(self, earlier: RandomState) -> list[str]:
        """Return the names of the streams whose position differs from an earlier one."""
        moved = []
        if self._python != earlier._python:
            moved.append(PYTHON)
        ours, theirs = self._numpy, earlier._numpy
        if ours is not None and theirs is not None:
            same = ours[0] == theirs[0] and (ours[1] == theirs[1]).all() and tuple(ours[2:]) == tuple(theirs[2:])
            moved += [] if same else [NUMPY]
        if not torch.equal(self._cpu, earlier._cpu):
            moved.append(CPU)
        pairs = zip(self._cuda, earlier._cuda, strict=True)
        return moved + [generator_of(a[0]) for a, b in pairs if not torch.equal(a[1], b[1])]


class RngUsage:
    """The random streams that a step was seen to draw from itself.

    The streams belong to the process: any thread may move them (loaders, actors, other trainings). numpy's functions
    cannot be observed, so its stream always counts as used.
    """

    def __init__(self) -> None:
        self._names: set[str] | None = None
        self.listens = False

    def note(self, names: set[str] | None) -> None:
        """Add the streams that an observed step drew from; None if the step was not observed throughout."""
        self._names = None if names is None else {NUMPY, *names, *(self._names or ())}

    def own(self, moved: Sequence[str]) -> list[str]:
        """Return those of the moved streams that the step itself may have moved."""
        names = self._names
        if names is None or set(moved) <= names or not other_threads():
            return list(moved)
        self.listens = True  # from the next proof on: a step may draw in some calls only
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


def is_pythons(owner: Any) -> bool:
    """Return whether a generator is the one that the functions of Python's ``random`` draw from."""
    return owner is getattr(random.random, "__self__", None)


def other_threads() -> bool:
    """Return whether any other thread of Python's is alive."""
    return threading.active_count() > 1
