"""The program that the doctor runs in a child process; its last line is one JSON object.

``torch`` prints the facts of torch and its GPUs (`hotloop.prove.doctor.gathering.Machine`). A device type tries a
compile of three lines there, backward included, and compares with eager (`TriedCompile`).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from hotloop._torch.ledger import LEDGER, capability
from hotloop.compiling.fallback import missing
from hotloop.compiling.fallback.causes import failure_of
from hotloop.compiling.observe import watch
from hotloop.events import Compiled
from hotloop.presets import PRESETS

_HINTS = (
    ("Python.h", "install Python's headers (apt install python3-dev): Triton compiles its launcher with them"),
    ("cannot find -lcuda", "libcuda.so is not on the linker's path: install the driver's libraries, or run ldconfig"),
    ("no kernel image", "install the torch build of a CUDA version that supports this GPU"),
    ("unsupported toolchain", "update the driver: it is older than Triton's code needs"),
    ("noexec", "set TORCHINDUCTOR_CACHE_DIR to a folder that is not mounted noexec"),
)
"""Words in the error of a compile, each with its remedy."""
_NO_GPU = ("not compiled with CUDA", "no NVIDIA driver", "No CUDA GPUs", "no CUDA-capable device", "No HIP GPUs")
"""Words in torch's error where there is no GPU to use."""


def facts() -> dict[str, Any]:
    """Return the facts of torch and its GPUs."""
    gpu_error, gpus = "", []
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        text = str(error).strip().partition("\n")[0]
        # Where there is simply no GPU, nothing is wrong.
        gpu_error = "" if any(phrase in text for phrase in _NO_GPU) else text
    names = {name.path: name.why for name in LEDGER if ":" in name.path}  # others can be looked up on objects alone
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpu_error": gpu_error,
        "mps": torch.backends.mps.is_available(),
        "threads": torch.get_num_threads(),
        "missing": {
            device: {name: reason for name, preset in PRESETS.items() if (reason := missing(preset, device))}
            for device in (["cuda", "cpu"] if gpus else ["cpu"])
        },
        "names": len(names),
        "lost": {path: why for path, why in names.items() if not capability(path, path).available},
        "gpus": gpus,
    }


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    capability = [properties.major, properties.minor]
    return {"name": properties.name, "capability": capability, "memory_bytes": total, "free_bytes": free}


def three_lines(x: torch.Tensor) -> torch.Tensor:
    """Compute a little that Inductor makes a kernel of."""
    waves = torch.sin(x) * 2
    shifted = waves + x.cos()
    return (shifted * shifted).sum()


def try_compile(device: str) -> dict[str, Any]:
    """Compile three lines on a device; return ``seconds``, with ``reason`` and ``hint`` if it failed."""
    began = time.monotonic()
    try:
        outcome = _compile(device)
    except Exception as error:  # noqa: BLE001 - whatever the compile raises is the answer
        failure, text = failure_of(error, None), str(error)
        hint = next((remedy for words, remedy in _HINTS if words in text), failure.hint)
        outcome = {"reason": failure.reason, "hint": hint}
    return {"seconds": time.monotonic() - began, **outcome}


def _compile(device: str) -> dict[str, str]:
    x = torch.linspace(-1, 1, 4096, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(three_lines(x), x)
    with watch() as events:
        (gradient,) = torch.autograd.grad(torch.compile(three_lines)(x), x)
    if not any(isinstance(event, Compiled) for event in events):
        return {"reason": "torch.compile ran eager, and said nothing", "hint": "look at TORCH*_DISABLE"}
    if not torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5):
        worst = float((gradient - expected).abs().max())
        return {"reason": f"its gradient differs from eager's by {worst:.2g}", "hint": "do not train with it: update"}
    return {}


if __name__ == "__main__":
    print(json.dumps(facts() if sys.argv[1] == "torch" else try_compile(sys.argv[1])))  # noqa: T201 - the answer
