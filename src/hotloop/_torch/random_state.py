"""The positions of random streams, to return to and to compare: Python's, numpy's and torch's."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

PYTHON, NUMPY, CPU = "Python's random", "numpy.random", "torch's CPU generator"


def generator_of(device: torch.device) -> str:
    """Return the name of a GPU's stream."""
    return f"the generator of {device}"


def put_back(device: torch.device, state: torch.Tensor) -> None:
    """Set a GPU's stream to a position, and leave cuDNN's dropout alone.

    ``torch.cuda.set_rng_state`` also tells the generator that it was seeded. The next RNN with dropout then draws a new
    state for its masks, at another address, which an eager run without hotloop does not do. A second generator that
    shares the stream has a mark of its own for that.
    """
    _default_of(device).graphsafe_get_state().set_state(state)


def _default_of(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


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
        # Of the generators themselves: calls of torch.get_rng_state are heard as the step's own while it is recorded.
        self._cpu = torch.default_generator.get_state()
        self._cuda = [(device, _default_of(device).get_state()) for device in devices if device.type == "cuda"]

    def restore(self, *, leaving: frozenset[str] = frozenset()) -> None:
        """Set the streams back to these positions, except the streams named in ``leaving``."""
        if self._python is not None and PYTHON not in leaving:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if CPU not in leaving:
            torch.default_generator.set_state(self._cpu)
        for device, state in self._cuda:
            put_back(device, state)

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
