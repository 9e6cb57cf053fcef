"""The places where torch keeps hooks, and the contents of a module: a recording does not know of changes there."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private, private_or

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils.hooks import RemovableHandle

_Table = dict[Any, Any]
_GLOBAL = (
    "torch.nn.modules.module:_global_forward_hooks",
    "torch.nn.modules.module:_global_forward_pre_hooks",
    "torch.nn.modules.module:_global_backward_hooks",
    "torch.nn.modules.module:_global_backward_pre_hooks",
    "torch.optim.optimizer:_global_optimizer_pre_hooks",
    "torch.optim.optimizer:_global_optimizer_post_hooks",
)


def gradient_hooks(parameter: torch.Tensor) -> tuple[Any, ...]:
    """Return the numbers of the hooks that run as a parameter's gradient is made: a recording holds their work."""
    hooks, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001 - in the ledger
    return (tuple(hooks) if hooks else None, tuple(after) if after else None)


_descriptors: Any = torch.Tensor
_before = _descriptors._backward_hooks.__get__  # noqa: SLF001 - in the ledger
_after = _descriptors._post_accumulate_grad_hooks.__get__  # noqa: SLF001 - in the ledger


def hooks_of_gradients(parameters: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Return `gradient_hooks` of each parameter; an empty list where none has hooks, as before most replays."""
    if not any(map(_before, parameters)) and not any(map(_after, parameters)):
        return []
    return [*map(gradient_hooks, parameters)]


def calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer calls torch's hooks; a wrapper that leaves out `Optimizer.__init__` does not."""
    table = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    return hasattr(type(optimizer).step, "hooked") and isinstance(table, collections.OrderedDict)


def module_tables(module: torch.nn.Module) -> tuple[_Table, _Table, _Table]:
    """Return the tables of a module by name: its parameters, buffers and children."""
    return module._parameters, module._buffers, module._modules  # noqa: SLF001 - in the ledger


def module_hooks(module: torch.nn.Module) -> tuple[_Table, ...]:
    """Return the hooks that run with a module, by their numbers."""
    return (
        module._forward_hooks,  # noqa: SLF001 - in the ledger, as the others
        module._forward_pre_hooks,  # noqa: SLF001
        module._backward_hooks,  # noqa: SLF001
        module._backward_pre_hooks,  # noqa: SLF001
    )


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> tuple[_Table, ...]:
    """Return the hooks that run with an optimizer's steps, by their numbers."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001 - in the ledger


def every_optimizers_pre_hooks() -> _Table:
    """Return the hooks that run before the steps of every optimizer."""
    found: _Table = private_or("torch.optim.optimizer:_global_optimizer_pre_hooks", {})
    return found


def before_steps(optimizer: torch.optim.Optimizer, hook: Callable[..., None], number: int | None) -> RemovableHandle:
    """Register a hook that runs before an optimizer's steps, under the number that it had before, if any.

    A program may compile ``optimizer.step``. That code is guarded on the numbers of the hooks: each new one is a
    compile, and past torch's limit of these all its steps run eager.
    """
    handle = optimizer.register_step_pre_hook(hook)
    if number is not None and (table := handle.hooks_dict_ref()) is not None:
        table[number] = table.pop(handle.id)
        handle.id = number
    return handle


def first_after_step(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook that runs after an optimizer's steps, before all other such hooks."""
    handle = optimizer.register_step_post_hook(hook)
    table = optimizer_hooks(optimizer)[1]
    for number in [one for one in table if one != handle.id]:
        table[number] = table.pop(number)
    return handle


def global_hooks() -> list[_Table]:
    """Return the hooks that run with every module's calls and every optimizer's steps, by their numbers."""
    found = []
    for path in _GLOBAL:
        try:
            found.append(private(path))
        except CapabilityMissingError:  # this torch has no such hooks
            continue
    return found
