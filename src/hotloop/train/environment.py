"""Where a run runs: its seed, its device, and the memory that it took."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError
from hotloop.train.optional import require

if TYPE_CHECKING:
    from hotloop.train.settings import RunSettings


def seed(number: int) -> None:
    """Seed the random numbers of Python, NumPy and torch.

    As ``seed_everything`` of Lightning does, whose import takes longer than torch's: a run without Fabric does without.
    """
    random.seed(number)
    require("numpy", "hotloop train").random.seed(number)
    torch.manual_seed(number)


def device_of(run: RunSettings) -> torch.device:
    """Return the device of a run, by ``run.device`` or else by ``run.accelerator``; of several devices, the first.

    ``auto`` is the first GPU where there is one.

    Raises:
        ConfigError: it is no device, or not on this machine.
    """
    setting, wanted = ("run.accelerator", run.accelerator) if run.device == "auto" else ("run.device", run.device)
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if wanted == "auto":
        wanted = "cuda" if there["cuda"] else "mps" if there["mps"] else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"{setting}={wanted!r}: expected auto, cpu, cuda, cuda:<number> or mps") from error
    if (device.index or 0) >= there.get(device.type, 0):
        raise ConfigError(f"{setting}={wanted}: torch {torch.__version__} has no such device here")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def fabric(device: torch.device, precision: str) -> Any:
    """Return Fabric for one device and a precision."""
    module = require("lightning.fabric", "hotloop train")
    where = {"accelerator": device.type, "devices": [device.index or 0] if device.type == "cuda" else 1}
    if precision != "16-mixed":
        return module.Fabric(**where, precision=precision)
    # By a plugin of our own: by its name alone, Fabric computes in bfloat16 on a CPU instead.
    scaler = torch.amp.GradScaler(device.type)
    plugin = require("lightning.fabric.plugins", "hotloop train").MixedPrecision("16-mixed", device.type, scaler)
    return module.Fabric(**where, plugins=[plugin])


def peak_memory(device: torch.device) -> int | None:
    """Return the most memory in use so far, in bytes: allocated on a GPU, resident on a CPU; None where not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return None
    import resource  # noqa: PLC0415 - not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
