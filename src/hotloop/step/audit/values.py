"""What a step is handed, keeps and returns: values that no recording takes, whatever the step's operations are."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import types
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.autograd import was_freed
from hotloop._torch.dynamo import attributes_of
from hotloop._torch.sharded import is_spread
from hotloop.measure import flatten, names, signature, untracked_attributes
from hotloop.step.naming import with_article
from hotloop.step.obstacle import RUNS, Obstacle
from hotloop.step.watch.plain import SCALARS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hotloop.step.state.holdings import Holdings

_PLAIN = (*SCALARS, numbers.Number, enum.Enum, range, torch.layout, torch.memory_format, type)
GRADIENTS_OF_ARGUMENTS = Obstacle(
    "an argument requires gradients",
    "set requires_grad inside the step, on a copy: a proof runs the step twice, and would add to such gradients twice",
    not_repeatable=True,
)
SPREAD = Obstacle(
    "the step returns a tensor that is spread over processes (a DTensor)",
    "return it whole, tensor.full_tensor(), or this process's part, tensor.to_local()",
)
_CARRIED = dataclasses.replace(
    GRADIENTS_OF_ARGUMENTS,
    hint="what an earlier step returned (the hidden state of an LSTM): detach it where it is returned, return "
    "hidden.detach(); what else computes an argument belongs into the step. A proof runs the step twice, and would add "
    "to such gradients twice",
)
_STRIDED_ONLY = (
    "where it is the same in each step, have the step read it from outside of its arguments; else pass its indices and "
    "values, and make the sparse tensor of them in the step; on a GPU, write the product out by index_add"
)
_LOCAL = "pass this process's part, tensor.to_local(), or the whole, tensor.full_tensor()"
RETURN_IT = f"return what has to be noted, and note it outside the step: {RUNS}"
_COPY_IT = "work on a copy: batch = dict(batch), or read what it holds without taking it out"
_STRIDED = "keep its indices and values as dense buffers, and make the sparse tensor of them in the step"
_DENSE = (
    "make it dense, nn.Embedding(sparse=False); or step the sparse ones with an optimizer of their own, "
    "torch.optim.SparseAdam"
)
_CLEARED = f"{_DENSE}, and call zero_grad() after the step of the optimizer, not before the backward"


def gradients_of(arguments: Iterable[Any]) -> Obstacle | None:
    """Return the obstacle that a backward in the step may reach an argument's gradients; None where none can.

    A backward has freed the graph of a hidden state that an earlier step returned: no other backward goes through it.
    """
    asking = [one for one in arguments if isinstance(one, torch.Tensor) and one.requires_grad]
    if any(one.is_leaf for one in asking):
        return GRADIENTS_OF_ARGUMENTS
    return None if all(map(was_freed, asking)) else _CARRIED


def named(args: Any, kwargs: Any) -> dict[tuple[str, str], Any]:
    """Return a call's arguments by name, with the entries of containers and the attributes put on tensors."""
    given = dict(zip(signature(args, kwargs).names(), flatten((args, kwargs))[0], strict=True))
    found = {(name, ""): one for name, one in given.items()}
    for name, one in given.items():
        if isinstance(one, torch.Tensor):
            found |= {(name, attribute): value for attribute, value in attributes_of(one).items()}
    return found


def found_in_arguments(
    before: Mapping[tuple[str, str], Any], now: Mapping[tuple[str, str], Any], shown: Callable[[str], str]
) -> list[Obstacle]:
    """Return what is wrong with what a step was handed.

    Args:
        before: the arguments as they were before the step, by name.
        now: as they are after it.
        shown: returns what an argument is called.
    """
    found, nothing = [], object()
    changed = [one for one in {**before, **now} if before.get(one, nothing) is not now.get(one, nothing)]
    if changed:
        name, attribute = changed[0]
        of = f"{attribute}, which is an attribute of" if attribute else "the dict or list that holds"
        reason = f"the step changes {of} its argument {shown(name)}"
        found.append(Obstacle(reason, RETURN_IT if attribute else _COPY_IT, not_repeatable=True))
    for (name, _), one in before.items():
        if is_spread(one):
            reason = f"argument {shown(name)} is spread over processes (a DTensor), which no recording copies"
            found.append(Obstacle(reason, _LOCAL))
        if isinstance(one, torch.Tensor) and one.layout != torch.strided:
            reason = f"argument {shown(name)} has layout {one.layout}, which no recording copies"
            found.append(Obstacle(reason, _STRIDED_ONLY))
    return found


def sparse_gradients(holdings: Holdings, fused: set[str]) -> list[Obstacle]:
    """Find sparse gradients that no recording keeps: left at the end of a step, or for a fused optimizer.

    Args:
        holdings: what the step has left.
        fused: parameters whose sparse gradient an optimizer has used that would be recorded by its fused kernel.
    """
    left = {name for name, one in holdings.gradients().items() if one is not None and one.layout != torch.strided}
    name = min(left | fused, default=None)
    reason = f"the gradient of {name} is sparse, which no recording keeps"
    return [] if name is None else [Obstacle(reason, _CLEARED if left else _DENSE)]


def not_strided(holdings: Holdings) -> list[Obstacle]:
    """Find buffers and other state in several pieces of memory, which an undo does not put back at every step."""
    tensors = {**{f"buffer {name}": one for name, one in holdings.buffers().items()}, **holdings.other_tensors()}
    return [
        Obstacle(
            f"{name} has layout {one.layout}: only strided tensors can be watched and put back",
            _STRIDED,
            not_repeatable=True,
        )
        for name, one in tensors.items()
        if one.layout != torch.strided
    ][:1]


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
