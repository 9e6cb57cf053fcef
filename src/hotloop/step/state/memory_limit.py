"""The device memory that proofs may take beside a program's own steps, and what steps and proofs have taken so far.

A proof holds a copy of the state, and a recording has memory of its own. What does not fit on the device beside a step
is copied to the host. Where an eager step does not fit beside a recording, the tier is declined. So no proof ends a run
that fits in eager.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hotloop.measure.machine import device_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.measure.machine import DeviceMemory

_MARGIN = 10
"""One part in so many of the device stays free beside a step and the copies of a proof: memory comes in pieces."""
_FIRST_STEPS = 8
"""Steps after which what they took is noted, unless something is proven before."""


class _Recordings(Protocol):
    """What recordings have taken (`hotloop.step.engine.Engine`)."""

    @property
    def pool_bytes(self) -> int: ...
    @property
    def idle_bytes(self) -> int: ...
    @property
    def shares(self) -> bool: ...


class NoRoomError(RuntimeError):
    """What a proof needs does not fit into memory; the message has the figures."""


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """The device memory that torch had taken, in bytes; None where it is not known yet, or on a CPU.

    Args:
        eager: at most, up to the first proof.
        proving: at most, up to the end of the last proof.
        in_force: once the caches of the proofs were given back.
    """

    eager: int | None = None
    proving: int | None = None
    in_force: int | None = None

    def figures(self) -> dict[str, int | None]:
        """Return the figures by the names that they have in the run record."""
        return {
            "eager_peak_memory_bytes": self.eager,
            "proving_peak_memory_bytes": self.proving,
            "in_force_memory_bytes": self.in_force,
        }

    def __str__(self) -> str:
        named = {"eager": self.eager, "while proving": self.proving, "in force": self.in_force}
        said = ", ".join(f"{_size(nbytes)} {name}" for name, nbytes in named.items() if nbytes is not None)
        return f"memory that torch took: {said}"


class Room:
    """The memory that copies and recordings of one loop may take beside an eager step.

    Args:
        engine: makes the recordings; None where there are none.

    Attributes:
        use: what was taken so far.
        notes_steps: first steps, before any copy, are still to be noted.
        proved: something was proven or timed since the caches of proofs and trials were given back.
    """

    def __init__(self, engine: _Recordings | None = None) -> None:
        self._engine = engine
        self._steps: dict[torch.device, int] = {}
        """By device: bytes that an eager step takes at most, beside those that are taken between two steps."""
        self._begun: set[torch.device] = set()
        self._noted, self.notes_steps = 0, True
        self.use, self.proved = MemoryUse(), False

    def note_step(self, device: torch.device) -> None:
        """Note what a first step has taken, while nothing was copied yet.

        torch's peak is read and never reset: it is the program's own figure, which may reset it at each step. It may be
        of something larger than a step, an evaluation say. Then more is copied to the host than needs to be.
        """
        self._noted += 1
        self.notes_steps = self._noted < _FIRST_STEPS
        self._note(device)

    def _note(self, device: torch.device) -> None:
        memory = device_memory(device)
        if memory is not None:
            self._steps[device] = max(self._steps.get(device, 0), memory.peak - memory.allocated)
            self.use = dataclasses.replace(self.use, eager=max(self.use.eager or 0, memory.peak_reserved))

    def for_copies(self, device: torch.device) -> int | None:
        """Return how many bytes of copies fit on a device beside a step; None where that is not known."""
        if device not in self._begun:  # before the first copy
            self._begun.add(device)
            self.notes_steps = False
            self._note(device)
        memory = device_memory(device)
        return None if memory is None else max(0, -self._lacking(memory, device))

    def lacking(self, device: torch.device) -> int:
        """Return how many bytes of copies must leave a device before an eager step runs; 0 where it fits for sure."""
        memory = device_memory(device)
        return 0 if memory is None else max(0, self._lacking(memory, device))

    def _lacking(self, memory: DeviceMemory, device: torch.device) -> int:
        """Return the bytes by which a step and the margin exceed what is free; negative where some are left."""
        return self._step(device) + memory.total // _MARGIN - self._free_beside_recordings(memory)

    def check_recording(self, device: torch.device) -> None:
        """Refuse a recording beside which no eager step fits: what a step takes is known once it is recorded.

        Raises:
            NoRoomError: it does not fit.
        """
        memory = device_memory(device)
        if memory is None or self._engine is None or not self._engine.pool_bytes:
            return
        step = min(self._step(device), self._engine.pool_bytes)
        if self._engine.shares:  # what the program allocates between two steps needs room in any case
            step = max(step, memory.total // _MARGIN)
        if (over := step - self._free_beside_recordings(memory)) > 0:
            raise NoRoomError(f"an eager step beside its recording needs {_size(over)} more than is free on {device}")

    def give_back(self, device: torch.device) -> None:
        """Return what proofs have left in torch's cache to the device, and note what is taken then."""
        self.proved = False
        before = device_memory(device)
        if before is None:
            return
        torch.cuda.empty_cache()
        after = device_memory(device)
        assert after is not None
        self.use = dataclasses.replace(self.use, proving=before.peak_reserved, in_force=after.reserved)

    def _step(self, device: torch.device) -> int:
        """Return the bytes that an eager step takes outside of the memory of recordings."""
        step, shares = self._steps.get(device, 0), self._engine is not None and self._engine.shares
        return max(0, step - self._idle()) if shares else step

    def _idle(self) -> int:
        return self._engine.idle_bytes if self._engine is not None else 0

    def _free_beside_recordings(self, memory: DeviceMemory) -> int:
        """Return the bytes that a step can use: free memory, less the idle memory that recordings keep for replays."""
        return memory.free - self._idle()


def on_host(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copy the tensors of a device to the host; a tensor that has two names is copied once."""
    copied: dict[int, torch.Tensor] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.device != device:
            return value
        if id(value) not in copied:
            copied[id(value)] = value.detach().cpu()
        return copied[id(value)]

    return {name: moved(value) for name, value in values.items()}


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"  # noqa: PLR2004 - a tenth of a GB
