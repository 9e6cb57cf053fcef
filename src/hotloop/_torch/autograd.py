"""Stands around the compiled backward of one graph, so that a failure while it runs can be named."""

from __future__ import annotations

import collections
import dis
from typing import TYPE_CHECKING, Any, Protocol

import torch

from hotloop._torch.ledger import CapabilityMissingError, private
from hotloop._torch.settings import kept_graph, outside_cudagraphs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence


_VIEWS = 4
"""Views on the way from an output of a graph to the graph's own node."""
_NEAREST = 64
"""Nodes of a graph that are asked whether they were freed."""
_ALIGNED = 16
"""Bytes that Inductor's kernels take addresses to be multiples of."""


def keeps_graph_probe() -> Callable[[], bool]:
    """Give the function that tells whether the backward in progress is to keep its graph (``retain_graph=True``)."""
    try:
        asked: Callable[[], bool] = private("torch._C._autograd:_get_current_graph_task_keep_graph")
    except CapabilityMissingError:
        return lambda: True  # then every backward runs on copies
    return asked


class Around(Protocol):
    """What is to be done around each run of a compiled backward; ``node`` is the autograd node of its forward."""

    def before(self, node: Any) -> None:
        """Called before it; an exception ends the backward."""

    def after(self, node: Any, gradients: tuple[Any, ...], *, kept: bool) -> tuple[Any, ...]:
        """Called after it with what it hands out, and gives what is handed out instead.

        ``kept``: the graph is kept for another backward.
        """


def compiled_nodes(outputs: Any) -> list[Any]:
    """Give the autograd nodes of compiled graphs that made ``outputs``, also where an output is a view of theirs."""
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
    """Tell whether this thread is running a backward; False where this torch does not tell."""
    try:
        task: int = private("torch._C:_current_graph_task_id")()
    except CapabilityMissingError:
        return False
    return task != -1


def nodes_of(values: Iterable[Any]) -> list[Any]:
    """Give what autograd has of each value; None of what is no tensor, or has none."""
    return [one.grad_fn if isinstance(one, torch.Tensor) else None for one in values]


def guard_backward(
    outputs: Any,
    explain: Callable[[Exception], Exception],
    around: Around | None = None,
    written: Sequence[tuple[Any, Any]] = (),
) -> bool:
    """Wrap the backward of the autograd function that made ``outputs``; True once it is found.

    AOTAutograd makes one class a graph, so this touches no other graph of ours; one of plain ``torch.compile``'s, whose
    outputs this graph hands on, may come first, and be wrapped as well. ``explain`` maps an exception that escapes from
    the compiled backward to the one to raise. ``written``: what autograd had of each input before the graph ran, and
    has now; a graph may write what it makes into them, and hand out nothing.
    """
    run_kept = _run_kept if around is None else _run_kept_outside_cudagraphs
    found = False
    for function in _functions(outputs, written):
        inner = function.backward
        keeps_graph = keeps_graph_probe()

        def backward(ctx: Any, *gradients: Any, inner: Any = inner, keeps_graph: Any = keeps_graph) -> Any:
            try:
                if keeps_graph():
                    return run_kept(inner, ctx, gradients)
                return inner(ctx, *gradients)
            except Exception as error:
                raised = error if _while_unpacking(error) else explain(error)
                if raised is error:
                    raise
                raise raised from error

        function._hotloop_guarded = True  # noqa: SLF001 - ours, on torch's class
        function.backward = staticmethod(backward if around is None else _surrounded(backward, around, keeps_graph))
        found = True
        if around is not None:
            break
    return found


def _run_kept(inner: Callable[..., Any], ctx: Any, gradients: tuple[Any, ...]) -> Any:
    """Run a compiled backward that keeps its graph for another."""
    with kept_graph():
        return inner(_Intact(ctx), *gradients)


def _run_kept_outside_cudagraphs(inner: Callable[..., Any], ctx: Any, gradients: tuple[Any, ...]) -> Any:
    """Run it by its kernels.

    A CUDA graph of a backward was recorded while what the forward saved died in it. torch refuses to replay it where
    that lives on, having dropped its inputs, and records wrongly the second time.
    """
    with kept_graph(), outside_cudagraphs():
        return inner(_Aligned(_Intact(ctx)), *_aligned(gradients))


class _Intact:
    """An autograd node that hands out copies of the activations which its compiled backward may write over.

    A compiled backward is free to put what it computes where the forward had put what it saved (torch's donated
    buffers): that saves memory, and the next backward of a kept graph would read what is there then. Code without
    donation cannot be had for certain, since Inductor's cache of compiled code does not tell the two kinds apart.
    """

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._node, name)
        if name == "saved_tensors":
            return _copies(value, _donated(self._node))
        return _copies(value, None) if name == "_tensors_no_vc_check" else value


def _donated(node: Any) -> set[int] | None:
    """Give the places of what a node has saved that its backward may write over; None where it may be any."""
    metadata: Any = getattr(node._forward_cls, "metadata", None)  # noqa: SLF001 - in the ledger
    places = getattr(metadata, "bw_donated_idxs", None)  # among the backward's arguments, of which sizes come first
    return None if places is None else {place - metadata.num_symints_saved_for_bw for place in places}


def _copies(saved: Any, places: set[int] | None) -> Any:
    """Copy what was saved at some places of a list or tuple, or at all."""
    return type(saved)(
        _copy(one) if (places is None or place in places) and _may_be_written(one) else one
        for place, one in enumerate(saved)
    )


def _may_be_written(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.requires_grad


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its strides, which compiled code relies on, also where they leave gaps or overlap."""
    if not tensor.numel():
        return tensor
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    memory = tensor.as_strided((length,), (1,)).clone()
    return memory.as_strided(tensor.shape, tensor.stride())


class _Aligned:
    """An autograd node whose tensors are copied, as they are read, where a kernel could not take their address."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return _aligned(getattr(self._node, name))


def _aligned(value: Any) -> Any:
    """Give a tensor, or a list or tuple of them, with those copied that lie on an address Inductor does not expect."""
    if isinstance(value, (tuple, list)):
        return type(value)(_aligned(one) for one in value) if type(value) in (tuple, list) else value
    if type(value) is torch.Tensor and value.is_cuda and value.data_ptr() % _ALIGNED:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    return value


def _functions(outputs: Any, written: Sequence[tuple[Any, Any]]) -> Iterator[Any]:
    """Give the autograd functions of the graphs that made some values, without those that have their guard."""
    # A graph whose input was made by another one may hand that on: its backward has its guard.
    into = [_source_of(after) for before, after in written if after is not before]
    for node in (*compiled_nodes(outputs), *(one for one in into if one is not None)):
        if not hasattr(node._forward_cls, "_hotloop_guarded"):  # noqa: SLF001 - in the ledger
            yield node._forward_cls  # noqa: SLF001 - in the ledger


def _source_of(node: Any) -> Any:
    """Give the compiled graph's node that made what was copied into a tensor, or into the tensor that it is a view of.

    What is copied comes last among what a copy hangs on, after what was there before.
    """
    for _ in range(_VIEWS):
        if node is None or _is_compiled(node):
            return node
        node = node.next_functions[-1][0] if node.next_functions else None
    return None


def _surrounded(backward: Callable[..., Any], around: Around, keeps_graph: Callable[[], bool]) -> Callable[..., Any]:
    def surrounded(ctx: Any, *gradients: Any) -> Any:
        kept = keeps_graph()
        around.before(ctx)
        made = backward(ctx, *gradients)
        return around.after(ctx, made if isinstance(made, tuple) else (made,), kept=kept)

    return surrounded


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
