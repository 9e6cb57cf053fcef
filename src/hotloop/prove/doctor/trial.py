"""The child's program that tries a compile of three lines on a device, backward included, and compares with eager."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from hotloop.compiling.fallback.causes import failure_of
from hotloop.compiling.observe import watch
from hotloop.events import Compiled

_HINTS = (
    ("Python.h", "install Python's headers (apt install python3-dev): Triton compiles its launcher with them"),
    ("cannot find -lcuda", "libcuda.so is not on the linker's path: install the driver's libraries, or run ldconfig"),
    ("no kernel image", "install the torch build of a CUDA version that supports this GPU"),
    ("unsupported toolchain", "update the driver: Triton's code is newer than it understands"),
    ("noexec", "set TORCHINDUCTOR_CACHE_DIR to a folder that is not mounted noexec"),
)


def three_lines(x: torch.Tensor) -> torch.Tensor:
    """Do a little that Inductor makes a kernel of."""
    waves = torch.sin(x) * 2
    shifted = waves + x.cos()
    return (shifted * shifted).sum()


def main(device: str) -> None:
    """Try it, and print one JSON object: ``seconds``, or ``reason`` and ``hint``."""
    began = time.monotonic()
    try:
        told = _try(device)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
        failure, text = failure_of(error, None), str(error)
        hint = next((remedy for needle, remedy in _HINTS if needle in text), failure.hint)
        told = {"reason": failure.reason, "hint": hint}
    print(json.dumps({"seconds": time.monotonic() - began, **told}))  # noqa: T201 - the answer


def _try(device: str) -> dict[str, Any]:
    x = torch.linspace(-1, 1, 4096, device=device, requires_grad=True)
    (expected,) = torch.autograd.grad(three_lines(x), x)
    with watch() as events:
        (found,) = torch.autograd.grad(torch.compile(three_lines)(x), x)
    if not any(isinstance(event, Compiled) for event in events):
        return {"reason": "torch.compile ran eager, and said nothing", "hint": "look at TORCH*_DISABLE"}
    if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
        worst = float((found - expected).abs().max())
        return {"reason": f"its gradient differs from eager's by {worst:.2g}", "hint": "do not train with it: update"}
    return {}


if __name__ == "__main__":
    main(sys.argv[1])
