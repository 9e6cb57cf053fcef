"""Judges GPUs, their driver and Triton: what each generation can do, and what does not fit together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotloop.prove.doctor.findings import Finding, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.prove.doctor.facts import Gpu, Machine

_GENERATIONS: tuple[tuple[tuple[int, int], str, str], ...] = (
    ((10, 0), "Blackwell", "bfloat16, TF32, float8; all presets"),
    ((9, 0), "Hopper", "bfloat16, TF32, float8; all presets"),
    ((8, 9), "Ada", "bfloat16, TF32, float8; all presets"),
    ((8, 0), "Ampere", "bfloat16, TF32; all presets"),
    ((7, 5), "Turing", "float16 on tensor cores; bfloat16 is emulated, and slow; no TF32"),
    ((7, 0), "Volta", "float16 on tensor cores; no bfloat16, no TF32"),
)
"""From which compute capability on, its name, and what it can do (NVIDIA, CUDA C++ programming guide, appendix 5.1)."""
_FIRST_BFLOAT16 = (8, 0)
_FEW_MULTIPROCESSORS = 68
"""torch._inductor.utils.is_big_gpu: with fewer, Inductor autotunes no matrix products."""
_LEAST_FREE = 0.1
_DRIVER_OF_CUDA = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The first Linux driver of each CUDA version (NVIDIA, CUDA compatibility, minor version compatibility)."""
_SMALLER = "a smaller batch, preset default or aot_eager (CUDA graphs hold a pool of their own), or fewer components"


def gpus(machine: Machine) -> Iterator[Finding]:
    """Judge the GPUs that torch sees, or that there are none."""
    if not machine.gpus:
        yield from _none(machine)
        return
    for gpu in machine.gpus:
        yield from _memory(gpu)
        if machine.torch.hip:
            what = f"{gpu.name} ({gpu.architecture or 'AMD'}), ROCm {machine.torch.hip}: presets run through Triton"
            yield Finding("note", "gpu", f"{what}; hotloop has not been tested on AMD", "run hotloop verify first")
        else:
            yield from _generation(gpu, machine.torch.architectures)
    if len({(gpu.name, gpu.capability) for gpu in machine.gpus}) > 1:
        names = ", ".join(gpu.name for gpu in machine.gpus)
        what = f"GPUs of several kinds ({names}): each kind compiles for itself, and shares no cache"
        yield Finding("note", "gpu", what, "choose one kind with CUDA_VISIBLE_DEVICES")


def _none(machine: Machine) -> Iterator[Finding]:
    known = machine.torch
    hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if known.error:
        return
    if known.gpu_error:
        yield Finding("problem", "gpu", f"torch cannot use the GPU: {known.gpu_error}", _update(machine))
    elif machine.driver and hidden is not None and hidden.strip() in ("", "-1"):
        what = f"the GPU is hidden: CUDA_VISIBLE_DEVICES is {hidden!r}"
        yield Finding("warning", "gpu", what, "unset CUDA_VISIBLE_DEVICES")
    elif machine.driver and not (known.cuda or known.hip):
        what = f"there is an NVIDIA driver ({machine.driver}), but torch {known.version} is built without CUDA"
        yield Finding("problem", "gpu", what, "install a torch with CUDA: https://pytorch.org/get-started/locally")
    elif machine.driver:
        what = f"there is an NVIDIA driver ({machine.driver}), but torch {known.version} sees no GPU"
        yield Finding("problem", "gpu", what, "look at nvidia-smi; in a container, start it with --gpus all")
    elif known.mps:
        what = "Apple GPU (MPS): Inductor's support is new there, and hotloop captures no step on it"
        yield Finding("note", "gpu", what, "stay eager, or try preset default and compare")
    else:
        what = "no GPU: on a CPU with few cores a compile rarely pays"
        yield Finding("note", "gpu", what, "measure: hotloop doctor FILE.py:make")


def _update(machine: Machine) -> str:
    cuda = machine.torch.cuda
    first = _DRIVER_OF_CUDA.get(int(cuda.split(".")[0])) if cuda else None
    return f"update the driver to {first} or newer (CUDA {cuda})" if first else "update the driver"


def _generation(gpu: Gpu, architectures: tuple[str, ...]) -> Iterator[Finding]:
    version = ".".join(map(str, gpu.capability))
    found = next((each for each in _GENERATIONS if gpu.capability >= each[0]), None)
    if found is None:
        what = f"{gpu.name} (compute capability {version}) is too old for Triton, which needs 7.0: Inductor cannot run"
        yield Finding("problem", "gpu", what, "use preset aot_eager or none, or tier eager+graph: no Triton is needed")
    else:
        yield Finding("ok", "gpu", f"{gpu.name}, {found[1]} (compute capability {version}): {found[2]}")
    if architectures and not _covered(gpu.capability, architectures):
        what = f"this torch holds no kernels for {gpu.name} (sm_{version.replace('.', '')}): {', '.join(architectures)}"
        yield Finding("problem", "gpu", what, "install the torch build of a CUDA version that supports this GPU")
    if found is not None and gpu.capability < _FIRST_BFLOAT16:
        what = f"{gpu.name} has no bfloat16 units"
        yield Finding("warning", "gpu", what, "train in float16 with a GradScaler, or in float32")
    if found is not None and 0 < gpu.multiprocessors < _FEW_MULTIPROCESSORS:
        what = (
            f"{gpu.name} has {gpu.multiprocessors} multiprocessors, and Inductor autotunes matrix products from "
            f"{_FEW_MULTIPROCESSORS} on: the autotuning presets give little more than default"
        )
        yield Finding("note", "gpu", what, "use default or reduce-overhead")


def _covered(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Tell whether a build has kernels (sm_, same major, no newer minor) or code to build some from (compute_)."""
    for name in architectures:
        parsed = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if parsed is None:
            return True  # a name that we do not know is no reason to warn
        built = int(parsed[2]), int(parsed[3])
        if built <= capability and (parsed[1] == "compute" or built[0] == capability[0]):
            return True
    return False


def _memory(gpu: Gpu) -> Iterator[Finding]:
    if gpu.memory_bytes and gpu.free_bytes < _LEAST_FREE * gpu.memory_bytes:
        what = f"{gpu.name}: {size(gpu.free_bytes)} of {size(gpu.memory_bytes)} are free"
        yield Finding("warning", "memory", what, f"end what else runs there (nvidia-smi); else {_SMALLER}")
    elif gpu.memory_bytes:
        what = f"{gpu.name}: {size(gpu.free_bytes)} of {size(gpu.memory_bytes)} are free"
        yield Finding("ok", "memory", what)


def driver(machine: Machine) -> Iterator[Finding]:
    """Judge the driver against the CUDA that torch was built with: the major version decides."""
    cuda, known = machine.torch.cuda, machine.driver_cuda
    if not cuda or known is None:
        return
    parts = cuda.split(".")
    built = int(parts[0]), int(parts[1]) if len(parts) > 1 else 0
    shown = f"driver {machine.driver or '?'} (CUDA {known[0]}.{known[1]})"
    if known[0] < built[0]:
        what = f"{shown} is too old for torch's CUDA {cuda}"
        yield Finding("problem", "driver", what, f"{_update(machine)}, or install torch for CUDA {known[0]}")
    elif known < built:
        what = f"{shown} is older than torch's CUDA {cuda}: it works, without what is new in that version"
        yield Finding("note", "driver", what, f"update the driver to one of CUDA {cuda}")
    else:
        yield Finding("ok", "driver", f"{shown} fits torch's CUDA {cuda}")


def triton(machine: Machine) -> Iterator[Finding]:
    """Judge whether Triton is there, which a GPU's kernels need."""
    if machine.triton:
        yield Finding("ok", "triton", f"Triton {machine.triton}")
    elif machine.gpus:
        name = "triton-windows" if machine.system == "Windows" else "triton"
        what = "Triton is not installed: on a GPU only aot_eager and none can run"
        yield Finding("problem", "triton", what, f"pip install {name}, the version that this torch asks for")
