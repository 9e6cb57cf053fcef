"""The positions of random streams, to go back to and to compare."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


PYTHON, NUMPY, CPU = "Python's random", "numpy.random", "torch's CPU generator"


def generator_of(device: torch.device) -> str:
    """Name the stream of a GPU."""
    return f"the generator of {device}"


class RandomState:
    """The positions of the random streams that a step may draw from: Python's, numpy's, torch's on CPU and GPU.

    Args:
        devices: where numbers may be drawn.
        python: also those of Python and numpy, which a replay never draws from; they take the longest to read.
    """

    def __init__(self, devices: Sequence[torch.device], *, python: bool = True) -> None:
        self._python = random.getstate() if python else None
        numpy = sys.modules.get("numpy") if python else None
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._cpu = torch.get_rng_state()
        self._cuda = [(device, torch.cuda.get_rng_state(device)) for device in devices if device.type == "cuda"]

    def restore(self, *, leaving: frozenset[str] = frozenset()) -> None:
        """Go back to these positions, but for the streams of these names."""
        if self._python is not None and PYTHON not in leaving:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        if CPU not in leaving:
            torch.set_rng_state(self._cpu)
        for device, state in self._cuda:
            torch.cuda.set_rng_state(state, device)

    def moved_since(self, earlier: RandomState) -> list[str]:
        """Name the streams whose position differs from an earlier one."""
        moved = []
        if self._python != earlier._python:
            moved.append(PYTHON)
        if self._numpy is not None and earlier._numpy is not None and not _same_numpy(self._numpy, earlier._numpy):
            moved.append(NUMPY)
        if not torch.equal(self._cpu, earlier._cpu):
            moved.append(CPU)
        pairs = zip(self._cuda, earlier._cuda, strict=True)
        return moved + [generator_of(a[0]) for a, b in pairs if not torch.equal(a[1], b[1])]


def _same_numpy(ours: Any, theirs: Any) -> bool:
    return ours[0] == theirs[0] and bool((ours[1] == theirs[1]).all()) and tuple(ours[2:]) == tuple(theirs[2:])
