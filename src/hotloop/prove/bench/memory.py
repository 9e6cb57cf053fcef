"""The most memory that a way takes: on a GPU what torch holds, on a CPU what a process of its own is resident with."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What the Linux kernel's documentation of ``/proc/pid/clear_refs`` has reset the peak of the resident memory."""


class Peak:
    """The peak of the memory that a program takes which is made after this.

    Args:
        alone: this process runs nothing else, so that its own memory is the program's; only then a CPU has a peak.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone, self._known = alone, True
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._others = {index: _forget(index) for index in range(torch.cuda.device_count() if started else 0)}
        """Memory that torch holds for others, by GPU: reserved, and of that in use."""

    def again(self, device: torch.device) -> None:
        """Forget the peak so far; what others held at the start is still theirs."""
        if device.type == "cuda":
            _forget(_index(device))
            return
        try:
            _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        except OSError:  # not Linux, or a sandbox that forbids it
            self._known = False

    def bytes(self, device: torch.device) -> int | None:
        """Give the peak: of memory reserved by torch on a GPU, captured graphs included; None where it is not known.

        What fits into memory that others have reserved and do not use is not nothing: it is at least what is in use.
        """
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            reserved, used = self._others.get(_index(device), (0, 0))
            more = torch.cuda.max_memory_reserved(device) - reserved
            return max(0, more, torch.cuda.max_memory_allocated(device) - used)
        return _resident_peak() if self._alone and self._known else None


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _forget(index: int) -> tuple[int, int]:
    """Give back what is not in use, forget the peak, and give the memory that is reserved and that is in use now."""
    torch.cuda.synchronize(index)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(index)
    return torch.cuda.memory_reserved(index), torch.cuda.memory_allocated(index)


def _resident_peak() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return None
