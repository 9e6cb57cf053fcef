"""The most memory that a way takes: on a GPU what torch holds, on a CPU what a process of its own is resident with."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What the Linux kernel's documentation of ``/proc/pid/clear_refs`` has reset the peak of the resident memory."""


class Peak:
    """The peak of memory from now on.

    Args:
        device: where the program runs.
        alone: this process runs nothing else, so that its own memory is the program's; only then a CPU has a peak.
    """

    def __init__(self, device: torch.device, *, alone: bool) -> None:
        self._device, self._alone = device, alone
        self._others = 0
        self._known = True
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._others = torch.cuda.memory_reserved(device)

    def again(self) -> None:
        """Forget the peak so far; what others held at the start is still theirs."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
        except OSError:  # not Linux, or a sandbox that forbids it
            self._known = False

    def bytes(self) -> int | None:
        """Give the peak: of memory reserved by torch on a GPU, captured graphs included; None where it is not known."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return max(0, torch.cuda.max_memory_reserved(self._device) - self._others)
        return _resident_peak() if self._alone and self._known else None


def free_bytes(device: torch.device) -> int | None:
    """Give the memory that programs may still take; None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _kilobytes(Path("/proc/meminfo"), "MemAvailable:")
    return None


def _resident_peak() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return _kilobytes(_STATUS, "VmHWM:")
    return None


def _kilobytes(path: Path, key: str) -> int:
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])
