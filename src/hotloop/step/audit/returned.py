"""What a step returns, on its way to the caller."""

from __future__ import annotations

import enum
import numbers
import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.autograd import was_freed
from hotloop.measure import flatten, names, unflatten, untracked_attributes
from hotloop.step.guard.fingerprint import SCALARS
from hotloop.step.naming import with_article

if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN = (*SCALARS, numbers.Number, enum.Enum, torch.layout, torch.memory_format, type)


def without_used_graph(result: Any) -> Any:
    """Detach the tensors whose graph a backward has freed; others are the caller's to go backward through.

    A graph that is kept keeps the nodes that accumulate its parameters' gradients, which remember the stream that they
    were made on: a later step that is captured on another stream would fail. A replay's results have none either.
    """
    leaves, structure = flatten(result)
    used = [isinstance(one, torch.Tensor) and one.grad_fn is not None and was_freed(one) for one in leaves]
    if not any(used):
        return result
    return unflatten(structure, [one.detach() if freed else one for one, freed in zip(leaves, used, strict=True)])


def not_copied(result: Any, known: Iterable[Any]) -> str:
    """Name something in a step's result that may hold what the step made, and that a replay would hand out again.

    A replay's tensors are copied out, alone or in the containers that ``flatten`` knows. An object of a class of the
    user's would be one object for all replays, and the tensors in it the recording's own.

    Args:
        result: what a step returned.
        known: objects that there were before the step.

    Returns:
        the type, and where it stands; empty where all is copied or plain.
    """
    leaves, structure = flatten(result)
    before = {id(one) for one in known}
    for path, one in (*zip(names(structure), leaves, strict=True), *untracked_attributes(structure)):
        for leaf in flatten(one)[0]:
            if not (isinstance(leaf, (torch.Tensor, *_PLAIN)) or id(leaf) in before or _is_bare(leaf)):
                return with_article(type(leaf).__name__) + (f" (result{path})" if path else "")
    return ""


def _is_bare(value: Any) -> bool:
    """Return whether a value is a function that holds no tensor: no closure, and plain defaults."""
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    if not isinstance(value, types.FunctionType) or value.__closure__:
        return False
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return all(isinstance(one, _PLAIN) for one in defaults)
