"""What is entered around a call and changes what torch does in it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


def function_modes() -> tuple[Hashable, ...]:
    """Tell the TorchFunctionModes in force apart: by their types, and by the device of ``with torch.device(...)``."""
    length, at = _probed("torch._C:_len_torch_function_stack"), _probed("torch._C:_get_function_stack_at")
    if length is None or at is None:
        return ()
    modes = [at(index) for index in range(length())]
    return tuple((type(mode), str(getattr(mode, "device", ""))) for mode in modes)


def saved_tensors_hooks() -> tuple[Hashable, ...]:
    """Tell the hooks apart that saved tensors pass, by their code: a context makes functions of its own each time."""
    top = _probed("torch._C._autograd:_top_saved_tensors_default_hooks")
    hooks = top(False) if top is not None else None
    codes: list[Any] = [getattr(hook, "__code__", type(hook)) for hook in hooks or ()]
    return tuple(codes)


@functools.cache
def _probed(path: str) -> Callable[..., Any] | None:
    try:
        found: Callable[..., Any] = private(path)
    except CapabilityMissingError:
        return None
    return found
