"""The most memory that a way takes: held by torch on a GPU, resident in a process of its own on a CPU."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch


class PeakMemory:
    """The peak of the memory taken by a program that is made after this object.

    Args:
        alone: this process runs nothing else, so that its memory is the program's. Only then a CPU has a peak.
    """

    def __init__(self, *, alone: bool) -> None:
        self._alone, self._known = alone, True
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self._others = {index: self._reset(index) for index in range(torch.cuda.device_count() if started else 0)}
        """Memory that torch holds for others, by GPU: reserved, and in use."""

    def restart(self, device: torch.device) -> None:
        """Forget the peak so far. Memory that others held at the start is still theirs."""
        if device.type == "cuda":
            self._reset(self._index(device))
            return
        try:  # "5" resets the peak of the resident memory: the Linux kernel's documentation of /proc/pid/clear_refs
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:  # not Linux, or a sandbox that forbids it
            self._known = False

    def bytes(self, device: torch.device) -> int | None:
        """Return the peak; on a GPU of memory reserved by torch, captured graphs included. None if it is not known.

        A program may fit into memory that others have reserved and do not use; its peak is at least the memory in use.
        """
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            reserved, used = self._others.get(self._index(device), (0, 0))
            more = torch.cuda.max_memory_reserved(device) - reserved
            return max(0, more, torch.cuda.max_memory_allocated(device) - used)
        if not (self._alone and self._known):
            return None
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
            lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
            return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
        return None

    @staticmethod
    def _index(device: torch.device) -> int:
        return torch.cuda.current_device() if device.index is None else device.index

    @staticmethod
    def _reset(index: int) -> tuple[int, int]:
        """Free unused memory and forget the peak; return the memory that is reserved and in use now."""
        torch.cuda.synchronize(index)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(index)
        return torch.cuda.memory_reserved(index), torch.cuda.memory_allocated(index)
