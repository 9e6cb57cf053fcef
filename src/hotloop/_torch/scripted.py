"""TorchScript functions in audits and recordings. DeBERTa scripts its scale and its relative positions.

What such a function makes on the host shows in no dispatch, so it looks like a tensor from outside the step. What it
copies to the device, no function of ours can copy for it: a recording runs the Python that it was made of.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def is_scripted(function: Any) -> bool:
    """Return whether `torch.jit.script` made a function; one of `torch.jit.trace` may hold somebody's tensors."""
    return hasattr(function, "_torchdynamo_inline") and "__name__" in vars(function)


@contextlib.contextmanager
def unscripted() -> Iterator[None]:
    """Run the functions of `torch.jit.script` as Python, in this thread. A proof has to compare the two."""
    with replaced(torch.jit.ScriptFunction, "__call__", _as_python):
        yield


def _as_python(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        run = function._torchdynamo_inline if is_scripted(function) else functools.partial(real, function)  # noqa: SLF001 - in the ledger
        return run(*args, **kwargs)

    return called
