"""Which parts of the compiler this torch has: a build may come without Inductor, a platform without dynamo."""

from __future__ import annotations

import functools
import importlib
import importlib.util

from hotloop._torch.ledger import capability

_DYNAMO = "torch._dynamo"
_INDUCTOR = "torch._inductor.compile_fx"
_NEEDED = (
    "torch._dynamo.callback:callback_handler",
    "torch._dynamo.utils:get_compilation_metrics",
    "torch._dynamo:config",
    "torch._functorch:config",
)


@functools.cache
def dynamo_missing() -> str:
    """Say why nothing can be traced with this torch, or give an empty string."""
    try:
        found = importlib.util.find_spec(_DYNAMO)
    except (ImportError, ValueError):
        found = None
    if found is None:
        return f"this torch has no {_DYNAMO}"
    needed = capability("compile", *_NEEDED)
    return "" if needed.available else needed.reason


@functools.cache
def inductor_missing() -> str:
    """Say why there is no Inductor, or give an empty string."""
    try:
        importlib.import_module(_INDUCTOR)
    except ImportError as error:
        return f"this torch has no working Inductor ({error})"
    needed = capability("inductor", "torch:_TorchCompileInductorWrapper")
    return "" if needed.available else needed.reason
