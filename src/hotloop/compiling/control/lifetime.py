"""The one helper for CUDA graphs outside a loop: marks the step, and copies what is to outlive it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hotloop._torch import cudagraphs
from hotloop._torch.autograd import in_backward
from hotloop.compiling.control import boundary
from hotloop.compiling.fallback.lifetime import copied_together, steps
from hotloop.measure import flatten, unflatten

if TYPE_CHECKING:
    from hotloop.compiling.observe import Tally

_T = TypeVar("_T")
_SHAPES = 16
"""Different shapes of arguments that are counted apart, for each component and mode."""


def own(output: _T) -> _T:
    """Give what a compiled call returned, as tensors that outlive the next call.

    For modules that ``torch.compile`` compiled with CUDA graphs (``mode="reduce-overhead"``): a later call overwrites
    their outputs. What lies in the memory of such graphs is copied, everything else (parameters, inputs, numbers) is
    given back as it is; copies stay in the autograd graph, and tensors that share memory share it afterwards. A step is
    marked where no backward is pending, so that the next call may reuse the memory: at once for outputs without
    gradients, after each optimizer step for others. A module that `hotloop.compile` compiled does all that by itself,
    and nothing is copied twice.

    Args:
        output: a tensor, or tensors nested in tuples, lists, mappings and dataclasses; gradients as well
            (``hotloop.own([p.grad for p in model.parameters()])``).

    Returns:
        the same structure.
    """
    leaves, structure = flatten(output)
    memory = cudagraphs.memory()
    places = [place for place, one in enumerate(leaves) if isinstance(one, torch.Tensor) and memory.holds(one)]
    for place, copy in zip(places, copied_together([leaves[place] for place in places]), strict=True):
        leaves[place] = copy
    if any(leaves[place].requires_grad for place in places):
        boundary.install()
        steps.mark_after_optimizer()
    elif places:
        steps.mark_where_safe()
    result: _T = unflatten(structure, leaves) if places else output
    return result


def count_call(tally: Tally, args: tuple[Any, ...], kwargs: dict[str, Any], *, marks: bool) -> None:
    """Count a call of a component under CUDA graphs: its shapes, its pace, and whether a backward entered it.

    With ``marks`` a step is marked before it, unless a forward waits for its backward.

    Raises:
        StaleOutputError: under ``strict_lifetime``, an output is held that the call may overwrite.
    """
    if marks:
        steps.enter()
        tally.per_mark.at(cudagraphs.marked(), tally.calls)
    if in_backward():
        tally.in_backward += 1
    shapes = _shapes(args, kwargs)
    if shapes in tally.shapes or len(tally.shapes) < _SHAPES:
        tally.shapes[shapes] += 1
    else:
        tally.shapes["others"] += 1


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Give the shapes of the tensors among the arguments themselves, for people."""
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    return ", ".join("x".join(map(str, one.shape)) or "scalar" for one in tensors) or "no tensors"
