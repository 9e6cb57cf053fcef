"""Whether this machine can run a preset, known before the first step."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from typing import TYPE_CHECKING

import torch

from hotloop._torch.backends import dynamo_missing, inductor_missing
from hotloop._torch.ledger import capability
from hotloop.compiling.fallback.emulation import emulation_of

if TYPE_CHECKING:
    from hotloop.presets import Preset


def first_available(rungs: tuple[Preset, ...], device: str, *, chosen: bool = False) -> tuple[int, str]:
    """Return the first rung that can run on a device type, and what the requested rung misses ("" when nothing).

    ``aot_eager`` is skipped, unless the user asked for it: where the machine lacks a part, all graphs would run on it,
    and its eager kernels cost more than plain eager ones. ``chosen`` says that the user named the rungs.
    """
    lacking = missing(rungs[0], device)
    if not lacking:
        return 0, ""
    for index, rung in enumerate(rungs[1:], start=1):
        if (rung.backend == "aot_eager" and not chosen) or missing(rung, device):
            continue
        return index, lacking
    return len(rungs) - 1, lacking


def missing(preset: Preset, device: str) -> str:
    """Return what this machine lacks for a preset on a device type (``cpu``, ``cuda``, ...), or an empty string."""
    if preset.backend == "eager" or emulation_of(preset) is not None:
        return ""
    if reason := dynamo_missing():
        return reason
    if preset.backend == "aot_eager":
        found = capability("aot_eager", "torch._dynamo.backends.registry:lookup_backend")
        return "" if found.available else found.reason
    return _gpu_missing(preset, device) or inductor_missing() or _toolchain_missing()


def _gpu_missing(preset: Preset, device: str) -> str:
    if "gpu" in preset.needs and not torch.cuda.is_available():
        return "no GPU that torch can use"
    if "gpu" in preset.needs and device == "cpu":
        return "the model is on the CPU; move it to the GPU before it is compiled"
    if ("triton" in preset.needs or device == "cuda") and importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return ""


def _toolchain_missing() -> str:
    """Return what Inductor's C++ compiler lacks: it compiles kernels on the CPU, and launches them on a GPU.

    Inductor runs the program that ``CXX`` names, else the platform's; ``CC`` does not matter to it.
    """
    chosen = os.environ.get("CXX")
    if chosen:
        program = chosen.split()[0]
        return "" if shutil.which(program) else f"no C++ compiler: CXX is {chosen!r}, which is not on the PATH"
    name = {"win32": "cl", "darwin": "clang++"}.get(sys.platform, "g++")
    return "" if shutil.which(name) else f"no C++ compiler (looked for {name}): install one, or set CXX"
