"""The machine that a run runs on: versions and device, as plain data for the run record."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from hotloop import host
from hotloop.version import __version__


def record_folder(folder: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder of this process's own run record, where all processes of a run name the same folder.

    Two processes that write into one folder would mix their steps, and each would take the other's record for an
    earlier start. So the first process has the folder itself, and each other process a folder in it, by its rank.
    """
    if folder is None:
        return None
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    return Path(folder) / f"rank-{rank}" if rank else Path(folder)


def describe(device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to know to compare this run with another."""
    return {
        "hotloop": __version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "device_name": device_name(device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "packages": dict(_packages()),
    }


@functools.cache
def _packages() -> dict[str, str]:
    """Return the versions of packages that a run may rest on; a search describes the machine for each trial."""
    names = (
        "lightning", "transformers", "tokenizers", "diffusers", "peft", "torchmetrics", "pydantic", "scikit-learn",
        "triton", "numpy",
    )  # fmt: skip
    packages = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return packages


def device_name(device: torch.device) -> str:
    """Return the device's name as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if sys.platform == "linux" and device.type == "cpu":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - no file of the user's
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


class DeviceMemory(NamedTuple):
    """Bytes of a GPU's memory: all of it, those that this process may still take, and what torch has taken.

    Args:
        total: of the device, or the part of it that the process may take.
        free: what the process may still take, with what torch has cached.
        allocated: what tensors take.
        reserved: what torch has taken from the device.
        peak: the most that tensors took, since the process or the program has reset that figure.
        peak_reserved: the most that torch had taken, likewise.
    """

    total: int
    free: int
    allocated: int
    reserved: int
    peak: int
    peak_reserved: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Return the memory of a GPU; None for any other device."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved, allocated = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    mine = int(total * torch.cuda.get_per_process_memory_fraction(index))  # a program may have limited itself
    return DeviceMemory(
        total=mine,
        free=min(free, max(0, mine - reserved)) + reserved - allocated,
        allocated=allocated,
        reserved=reserved,
        peak=torch.cuda.max_memory_allocated(device),
        peak_reserved=torch.cuda.max_memory_reserved(device),
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that this process may still take, with what torch has cached; None where they are unknown."""
    memory = device_memory(device)
    return host.memory().available if memory is None else memory.free
