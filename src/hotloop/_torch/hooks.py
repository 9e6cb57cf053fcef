"""Where torch keeps hooks, and what a module holds: each change there is one that a recording has not seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

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
    """Give the numbers of the hooks that run as a parameter's gradient is made: a recording holds what they did."""
    hooks, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001 - in the ledger
    return (tuple(hooks) if hooks else None, tuple(after) if after else None)


_descriptors: Any = torch.Tensor
_before = _descriptors._backward_hooks.__get__  # noqa: SLF001 - in the ledger
_after = _descriptors._post_accumulate_grad_hooks.__get__  # noqa: SLF001 - in the ledger


def hooks_of_gradients(parameters: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    """Give `gradient_hooks` of each; nothing at all where none has any, as before most replays."""
    if not any(map(_before, parameters)) and not any(map(_after, parameters)):
        return []
    return [*map(gradient_hooks, parameters)]


def gradient_hook_functions(parameter: torch.Tensor) -> list[Callable[..., Any]]:
    """Give those hooks themselves."""
    hooks, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # noqa: SLF001 - in the ledger
    return [*(hooks or {}).values(), *(after or {}).values()]


def module_tables(module: torch.nn.Module) -> tuple[_Table, _Table, _Table]:
    """Give what a module holds by name: its parameters, buffers and children."""
    return module._parameters, module._buffers, module._modules  # noqa: SLF001 - in the ledger


def module_hooks(module: torch.nn.Module) -> tuple[_Table, ...]:
    """Give the hooks that run with one module, by their numbers."""
    return (
        module._forward_hooks,  # noqa: SLF001 - in the ledger, as the others
        module._forward_pre_hooks,  # noqa: SLF001
        module._backward_hooks,  # noqa: SLF001
        module._backward_pre_hooks,  # noqa: SLF001
    )


def optimizer_hooks(optimizer: torch.optim.Optimizer) -> tuple[_Table, ...]:
    """Give the hooks that run with one optimizer's steps, by their numbers."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001 - in the ledger


def first_after_step(optimizer: torch.optim.Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Register a hook that runs after an optimizer's steps, before all others that do."""
    handle = optimizer.register_step_post_hook(hook)
    table = optimizer_hooks(optimizer)[1]
    for number in [one for one in table if one != handle.id]:
        table[number] = table.pop(number)
    return handle


def global_hooks() -> list[_Table]:
    """Give the hooks that run with every module's calls and every optimizer's steps, by their numbers."""
    found = []
    for path in _GLOBAL:
        try:
            found.append(private(path))
        except CapabilityMissingError:  # a torch without such hooks has none to look at
            continue
    return found
