"""What is in force around a call and changes how torch runs it: function modes, saved-tensor hooks, precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import private_or

if TYPE_CHECKING:
    from collections.abc import Hashable


def function_modes() -> tuple[Hashable, ...]:
    """Identify the TorchFunctionModes in force, by their types, and by the device of ``with torch.device(...)``."""
    length = private_or("torch._C:_len_torch_function_stack", None)
    mode_at = private_or("torch._C:_get_function_stack_at", None)
    if length is None or mode_at is None:
        return ()
    modes = [mode_at(index) for index in range(length())]
    return tuple((type(mode), str(getattr(mode, "device", ""))) for mode in modes)


def saved_tensors_hooks() -> tuple[Hashable, ...]:
    """Identify the hooks that saved tensors pass, by their code: a context makes new functions each time."""
    top = private_or("torch._C._autograd:_top_saved_tensors_default_hooks", None)
    hooks = top(False) if top is not None else None
    codes: list[Any] = [getattr(hook, "__code__", type(hook)) for hook in hooks or ()]
    return tuple(codes)


def matmul_precision() -> str:
    """Return the precision of float32 matrix products.

    torch refuses to answer the older question once the newer setting was used; then both newer settings are named.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backends: Any = torch.backends  # the types that torch ships do not know these settings
        return f"{backends.cuda.matmul.fp32_precision} {backends.mkldnn.matmul.fp32_precision}"
