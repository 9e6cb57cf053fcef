"""Stands around the compiled backward of one graph, so that a failure while it runs can be named."""

from __future__ import annotations

import collections
import dis
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private
from hotloop._torch.settings import kept_graph

if TYPE_CHECKING:
    from collections.abc import Callable


_NEAREST = 64
"""Nodes of a graph that are asked whether they were freed."""


def _keeps_graph() -> Callable[[], bool]:
    """Give the function that tells whether the backward in progress is to keep its graph (``retain_graph=True``)."""
    try:
        asked: Callable[[], bool] = private("torch._C._autograd:_get_current_graph_task_keep_graph")
    except CapabilityMissingError:
        return lambda: True  # then the setting is changed for every backward, which costs 1 µs
    return asked


def in_backward() -> bool:
    """Tell whether this thread is running a backward; False where this torch does not tell."""
    try:
        task: int = private("torch._C:_current_graph_task_id")()
    except CapabilityMissingError:
        return False
    return task != -1


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
        keeps_graph = _keeps_graph()

        def backward(ctx: Any, *gradients: Any, inner: Any = inner, keeps_graph: Any = keeps_graph) -> Any:
            try:
                if not keeps_graph():
                    return inner(ctx, *gradients)
                with kept_graph():
                    return inner(ctx, *gradients)
            except Exception as error:
                raised = error if _while_unpacking(error) else explain(error)
                if raised is error:
                    raise
                raise raised from error

        function.backward = staticmethod(backward)
        return True
    return False


def _while_unpacking(error: Exception) -> bool:
    """Tell whether saved tensors could not be had, which eager raises too.

    The graph was freed by an earlier backward, an input was changed in place, or an unpack hook (a checkpoint's)
    raised.
    """
    trace = error.__traceback__
    while trace is not None:
        code = dis.get_instructions(trace.tb_frame.f_code)
        if any(step.offset == trace.tb_lasti and step.argval == "saved_tensors" for step in code):
            return True
        trace = trace.tb_next
    return False


def was_freed(tensor: torch.Tensor) -> bool:
    """Tell whether a backward has freed some of a tensor's graph, so that none can go through it again.

    What a node has saved cannot be read once it is freed, and can before; a graph that saved nothing is never freed.
    A loss tells by its first nodes, so of a large graph only the nearest ones are asked.
    """
    waiting, seen = collections.deque([tensor.grad_fn]), set[Any]()
    while waiting and len(seen) < _NEAREST:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        names = ["saved_tensors"] if hasattr(type(node), "saved_tensors") else []
        for name in names or [one for one in dir(type(node)) if one.startswith("_saved_")]:
            try:
                getattr(node, name)
            except RuntimeError:
                return True
        waiting += [following for following, _ in node.next_functions]
    return False
