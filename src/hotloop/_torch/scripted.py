"""Runs the Python that a TorchScript function was made of.

What TorchScript makes on the host shows in no dispatch, so it looks like a tensor from outside the step. What it copies
to the device, no function of ours can copy for it. DeBERTa scripts its scale and its relative positions.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextlib.contextmanager
def unscripted() -> Iterator[None]:
    """Run the functions of `torch.jit.script` and `torch.jit.trace` as Python, in this thread."""
    with replaced(torch.jit.ScriptFunction, "__call__", _as_python):
        yield


def _as_python(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        python = getattr(function, "_torchdynamo_inline", None)
        return real(function, *args, **kwargs) if python is None else python(*args, **kwargs)

    return called
