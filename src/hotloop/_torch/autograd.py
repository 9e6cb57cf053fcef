"""Wraps the compiled backward of a graph, so that its failures can be named and kept graphs stay right."""

from __future__ import annotations

import collections
import dis
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import private_or
from hotloop._torch.settings import kept_graph, outside_cudagraphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_VIEWS = 4
"""Views on the way from an output of a graph to the graph's own node."""


def keeps_graph_probe() -> Callable[[], bool]:
    """Return the function that says whether the backward in progress is to keep its graph (``retain_graph=True``).

    Where this torch has no such function, every backward runs on copies, as if it kept its graph.
    """
    probe: Callable[[], bool] = private_or("torch._C._autograd:_get_current_graph_task_keep_graph", lambda: True)
    return probe


def compiled_nodes(outputs: Any) -> list[Any]:
    """List the autograd nodes of the compiled graphs that made ``outputs``, or made the bases of views in them."""
    found: dict[int, Any] = {}
    for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        for _ in range(_VIEWS):
            if node is None or _is_compiled(node):
                break
            node = next((following for following, _ in node.next_functions if following is not None), None)
        if node is not None and _is_compiled(node):
            found[id(node)] = node
    return list(found.values())


def _is_compiled(node: Any) -> bool:
    function = getattr(node, "_forward_cls", None)
    return function is not None and function.__name__ == "CompiledFunction"


def in_backward() -> bool:
    """Return whether this thread is running a backward; False where this torch does not say."""
    return bool(private_or("torch._C:_current_graph_task_id", lambda: -1)() != -1)


def guard_backward(
    outputs: Any,
    explain: Callable[[Exception], Exception],
    around: Any = None,
) -> bool:
    """Wrap the backward of the autograd function that made ``outputs``; return whether the function was found.

    AOTAutograd makes a class for each graph, so other graphs of hotloop's are not touched. A graph of plain
    ``torch.compile`` whose outputs this graph hands on may come first, and be wrapped as well.

    Args:
        outputs: of the graph.
        explain: maps an exception that escapes from the compiled backward to the exception to raise.
        around: runs around each backward: ``before(node)``, with the autograd node of its forward, and ``after(node,
            gradients, kept=...)``, which returns the gradients to hand out; ``kept``: the graph is kept for another.
    """
    found = False
    for function in _unguarded_functions(outputs):
        function._hotloop_guarded = True  # noqa: SLF001 - ours, on torch's class
        function.backward = staticmethod(_guarded(function.backward, explain, around))
        found = True
        if around is not None:
            break
    return found


def _guarded(inner: Callable[..., Any], explain: Callable[[Exception], Exception], around: Any) -> Callable[..., Any]:
    keeps_graph = keeps_graph_probe()

    def backward(ctx: Any, *gradients: Any) -> Any:
        try:
            if not keeps_graph():
                return inner(ctx, *gradients)
            with kept_graph():
                if around is None:
                    return inner(_Intact(ctx), *gradients)
                # A CUDA graph of a backward was recorded while the saved tensors died in it. torch refuses to replay it
                # where they live on, having dropped its inputs, and records wrongly the second time: kernels run here.
                with outside_cudagraphs():
                    return inner(_Aligned(_Intact(ctx)), *_aligned(gradients))
        except Exception as error:
            raised = error if _while_unpacking(error) else explain(error)
            if raised is error:
                raise
            raise raised from error

    if around is None:
        return backward

    def surrounded(ctx: Any, *gradients: Any) -> Any:
        kept = keeps_graph()
        around.before(ctx)
        made = backward(ctx, *gradients)
        return around.after(ctx, made if isinstance(made, tuple) else (made,), kept=kept)

    return surrounded


class _Intact:
    """An autograd node that hands out copies of the activations which its compiled backward may write over.

    A compiled backward may write its results over what the forward saved (torch's donated buffers). That saves memory,
    but the next backward of a kept graph would read the overwritten values. Code without donation cannot be had for
    certain, since Inductor's cache of compiled code does not distinguish the two kinds.
    """

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._node, name)
        if name == "saved_tensors":
            return self._copies(value, self._donated())
        return self._copies(value, None) if name == "_tensors_no_vc_check" else value

    def _donated(self) -> set[int] | None:
        """Return the places of the saved tensors that the backward may write over; None where it may be any."""
        metadata: Any = getattr(self._node._forward_cls, "metadata", None)  # noqa: SLF001 - in the ledger
        places = getattr(metadata, "bw_donated_idxs", None)  # among the backward's arguments, of which sizes come first
        return None if places is None else {place - metadata.num_symints_saved_for_bw for place in places}

    @staticmethod
    def _copies(saved: Any, places: set[int] | None) -> Any:
        """Copy the saved tensors at some places of a list or tuple, or all of them."""
        copied = list(saved)
        for place, tensor in enumerate(saved):
            writable = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.requires_grad
            if writable and tensor.numel() and (places is None or place in places):
                # With its strides, on which compiled code relies, also where they leave gaps or overlap.
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                length = 1 + sum((size - 1) * stride for size, stride in steps)
                memory = tensor.as_strided((length,), (1,)).clone()
                copied[place] = memory.as_strided(tensor.shape, tensor.stride())
        return type(saved)(copied)


class _Aligned:
    """An autograd node whose tensors are copied, as they are read, where a kernel could not take their address."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return _aligned(getattr(self._node, name))


def _aligned(value: Any) -> Any:
    """Return a tensor, or a list or tuple of tensors, with copies of those whose address Inductor does not expect."""
    if isinstance(value, (tuple, list)):
        return type(value)(_aligned(item) for item in value) if type(value) in (tuple, list) else value
    if type(value) is torch.Tensor and value.is_cuda and value.data_ptr() % 16:  # bytes, by Inductor's kernels
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return value


def _unguarded_functions(outputs: Any) -> Iterator[Any]:
    """Yield the autograd functions of the graphs that made some values, without those that are wrapped already."""
    # A graph may hand on an input that another graph made: that graph's backward is wrapped already.
    for node in compiled_nodes(outputs):
        if not hasattr(node._forward_cls, "_hotloop_guarded"):  # noqa: SLF001 - in the ledger
            yield node._forward_cls  # noqa: SLF001 - in the ledger


def _while_unpacking(error: Exception) -> bool:
    """Return whether saved tensors could not be read, which eager raises too.

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
    """Return whether a backward has freed some of a tensor's graph, so that no other backward can go through it.

    The saved values of a node can be read until it is freed; a graph that saved nothing is never freed. A freed loss
    shows it in its first nodes, so only the nearest 64 nodes are asked.
    """
    waiting, seen = collections.deque([tensor.grad_fn]), set[Any]()
    nearest = 64
    while waiting and len(seen) < nearest:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        names = ["saved_tensors"] if hasattr(type(node), "saved_tensors") else []
        for name in names or [attribute for attribute in dir(type(node)) if attribute.startswith("_saved_")]:
            try:
                getattr(node, name)
            except RuntimeError:
                return True
        waiting += [following for following, _ in node.next_functions]
    return False
