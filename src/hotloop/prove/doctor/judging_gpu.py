"""Judges GPUs, their driver and Triton: what each generation can do, and which versions do not fit together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hotloop.prove.doctor.findings import Finding
from hotloop.report.text import size

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
"""The first compute capability, the name and the abilities of each generation.

Source: NVIDIA, CUDA C++ programming guide, appendix 5.1.
"""
_FEW_MULTIPROCESSORS = 68
"""With fewer, Inductor autotunes no matrix products. Source: torch._inductor.utils.is_big_gpu."""
_DRIVER_OF_CUDA = {11: "450.80", 12: "525.60", 13: "580.65"}
"""The first Linux driver of each CUDA version. Source: NVIDIA, CUDA compatibility, minor version compatibility."""


class GpuJudge:
    """Judges what concerns the GPUs of a machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def gpus(self) -> Iterator[Finding]:
        """Judge the GPUs that torch sees, or why torch sees none."""
        machine = self._machine
        if not machine.gpus:
            yield from self._without_gpu()
            return
        for gpu in machine.gpus:
            yield from self._memory(gpu)
            if machine.torch.hip:
                what = f"{gpu.name} ({gpu.architecture or 'AMD'}), ROCm {machine.torch.hip}: presets run through Triton"
                yield Finding("note", "gpu", f"{what}; hotloop has not been tested on AMD", "run hotloop verify first")
            else:
                yield from self._generation(gpu)
        if len({(gpu.name, gpu.capability) for gpu in machine.gpus}) > 1:
            names = ", ".join(gpu.name for gpu in machine.gpus)
            what = f"GPUs of several kinds ({names}): each kind compiles for itself, and shares no cache"
            yield Finding("note", "gpu", what, "choose one kind with CUDA_VISIBLE_DEVICES")

    def _without_gpu(self) -> Iterator[Finding]:
        machine, known = self._machine, self._machine.torch
        hidden = machine.environment.get("CUDA_VISIBLE_DEVICES")
        if known.error:
            return
        if known.gpu_error:
            yield Finding("problem", "gpu", f"torch cannot use the GPU: {known.gpu_error}", self._driver_update())
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

    def _driver_update(self) -> str:
        cuda = self._machine.torch.cuda
        first = _DRIVER_OF_CUDA.get(int(cuda.split(".")[0])) if cuda else None
        return f"update the driver to {first} or newer (CUDA {cuda})" if first else "update the driver"

    def _generation(self, gpu: Gpu) -> Iterator[Finding]:
        version = ".".join(map(str, gpu.capability))
        architectures = self._machine.torch.architectures
        generation = next((known for known in _GENERATIONS if gpu.capability >= known[0]), None)
        if generation is None:
            what = f"{gpu.name} (compute capability {version}) is too old for Triton, which needs 7.0, and for Inductor"
            remedy = "use preset aot_eager or none, or tier eager+graph: no Triton is needed"
            yield Finding("problem", "gpu", what, remedy)
        else:
            what = f"{gpu.name}, {generation[1]} (compute capability {version}): {generation[2]}"
            yield Finding("ok", "gpu", what)
        if architectures and not _has_kernels(gpu.capability, architectures):
            names = ", ".join(architectures)
            what = f"this torch holds no kernels for {gpu.name} (sm_{version.replace('.', '')}): {names}"
            yield Finding("problem", "gpu", what, "install the torch build of a CUDA version that supports this GPU")
        if generation is not None and gpu.capability < (8, 0):  # bfloat16 units came with Ampere
            what = f"{gpu.name} has no bfloat16 units"
            yield Finding("warning", "gpu", what, "train in float16 with a GradScaler, or in float32")
        if generation is not None and 0 < gpu.multiprocessors < _FEW_MULTIPROCESSORS:
            what = (
                f"{gpu.name} has {gpu.multiprocessors} multiprocessors, and Inductor autotunes matrix products from "
                f"{_FEW_MULTIPROCESSORS} on: the autotuning presets give little more than default"
            )
            yield Finding("note", "gpu", what, "use default or reduce-overhead")

    @staticmethod
    def _memory(gpu: Gpu) -> Iterator[Finding]:
        what = f"{gpu.name}: {size(gpu.free_bytes)} of {size(gpu.memory_bytes)} are free"
        if gpu.memory_bytes and gpu.free_bytes < 0.1 * gpu.memory_bytes:
            remedy = (
                "end what else runs there (nvidia-smi); else a smaller batch, preset default or aot_eager (CUDA graphs "
                "hold a pool of their own), or fewer components"
            )
            yield Finding("warning", "memory", what, remedy)
        elif gpu.memory_bytes:
            yield Finding("ok", "memory", what)

    def driver(self) -> Iterator[Finding]:
        """Judge the driver against the CUDA that torch was built with: the major version decides."""
        cuda, known = self._machine.torch.cuda, self._machine.driver_cuda
        if not cuda or known is None:
            return
        parts = cuda.split(".")
        built = int(parts[0]), int(parts[1]) if len(parts) > 1 else 0
        shown = f"driver {self._machine.driver or '?'} (CUDA {known[0]}.{known[1]})"
        if known[0] < built[0]:
            what = f"{shown} is too old for torch's CUDA {cuda}"
            remedy = f"{self._driver_update()}, or install torch for CUDA {known[0]}"
            yield Finding("problem", "driver", what, remedy)
        elif known < built:
            what = f"{shown} is older than torch's CUDA {cuda}: it works, without what is new in that version"
            yield Finding("note", "driver", what, f"update the driver to one of CUDA {cuda}")
        else:
            yield Finding("ok", "driver", f"{shown} fits torch's CUDA {cuda}")

    def triton(self) -> Iterator[Finding]:
        """Judge whether Triton is installed, which a GPU's kernels need."""
        machine = self._machine
        if machine.triton:
            yield Finding("ok", "triton", f"Triton {machine.triton}")
        elif machine.gpus:
            name = "triton-windows" if machine.system == "Windows" else "triton"
            what = "Triton is not installed: on a GPU only aot_eager and none can run"
            yield Finding("problem", "triton", what, f"pip install {name}, the version that this torch asks for")


def _has_kernels(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Return whether a build has kernels (sm_, same major, no newer minor) or code to build them from (compute_)."""
    for name in architectures:
        parsed = re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", name)
        if parsed is None:
            return True  # an unknown name is no reason to warn
        built = int(parsed[2]), int(parsed[3])
        if built <= capability and (parsed[1] == "compute" or built[0] == capability[0]):
            return True
    return False
