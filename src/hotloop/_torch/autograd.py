"""Stands around the compiled backward of one graph, so that a failure while it runs can be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def guard_backward(outputs: Any, explain: Callable[[Exception], Exception]) -> bool:
    """Wrap the backward of the autograd function that made ``outputs``; True once it is found.

    AOTAutograd makes one class a graph, so this touches no other graph. ``explain`` maps an exception that escapes from
    the compiled backward to the one to raise.
    """
    for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        function = getattr(node, "_forward_cls", None)
        if function is None or function.__name__ != "CompiledFunction":
            continue
        inner = function.backward

        def backward(ctx: Any, *gradients: Any, inner: Callable[..., Any] = inner) -> Any:
            try:
                return inner(ctx, *gradients)
            except Exception as error:
                raised = explain(error)
                if raised is error:
                    raise
                raise raised from error

        function.backward = staticmethod(backward)
        return True
    return False
