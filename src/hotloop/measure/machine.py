"""Where a run runs: versions and device, as plain data for its record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from hotloop import host
from hotloop.version import __version__

_PACKAGES = (
    "lightning", "transformers", "tokenizers", "diffusers", "peft", "torchmetrics", "hydra-core", "scikit-learn",
    "triton", "numpy",
)  # fmt: skip


def record_folder(folder: str | os.PathLike[str] | None) -> Path | None:
    """Give the folder of this process's own run record, where all processes of a run name the same one.

    Two that write into one folder would mix their steps, and each would take the other's record for an earlier start.
    So the first has the folder itself, and each other one a folder in it, by its rank.
    """
    if folder is None:
        return None
    rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    return Path(folder) / f"rank-{rank}" if rank else Path(folder)


def describe(device: torch.device) -> dict[str, Any]:
    """Give what a reader needs to know to compare this run with another."""
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
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
    }


def device_name(device: torch.device) -> str:
    """Give the device's name as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if sys.platform == "linux" and device.type == "cpu":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - no file of the user's
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def free_bytes(device: torch.device) -> int | None:
    """Give the memory that this process may still take, what torch has cached included; None where nobody tells."""
    if device.type != "cuda":
        return host.memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
