"""Where a run runs: versions, device and memory, as plain data for its record."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import torch

import hotloop
from hotloop.errors import ConfigError

_PACKAGES = ("lightning", "transformers", "tokenizers", "torchmetrics", "hydra-core", "scikit-learn", "triton", "numpy")


def describe(device: torch.device) -> dict[str, Any]:
    """Give what a reader needs to know to compare this run with another."""
    return {
        "hotloop": hotloop.__version__,
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


def choose_device(wanted: str) -> torch.device:
    """Give the device of ``run.device``; ``auto`` is the first GPU where there is one.

    Raises:
        ConfigError: it is no device, or not on this machine.
    """
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    expected = "expected auto, cpu, cuda, cuda:<number> or mps"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"run.device={wanted!r}: {expected}") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"run.device={wanted!r}: {expected}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"run.device={wanted}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices here"
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"run.device={wanted}: torch sees no Apple GPU here")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


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


def peak_memory(device: torch.device) -> int | None:
    """Give the most memory in use so far, in bytes: allocated on a GPU, resident on a CPU; None where not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
