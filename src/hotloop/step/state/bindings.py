"""What holds the tensors of a program in Python, so that it can be bound again as it was."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop.step.state.holdings import EVERY_OPTIMIZERS

if TYPE_CHECKING:
    from hotloop.step.state.holdings import Holdings


class Bindings:
    """What holds those tensors in Python: gradients, the optimizers' dictionaries, attributes of the other state.

    An optimizer's own attributes as well: one of the user's may count its steps, and those that are undone are none.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._parameters = list(holdings.parameters().values())
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._optimizers = [
            (
                optimizer,
                [(group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups],
                [(key, entry, _copied(entry)) for key, entry in optimizer.state.items()],
                [(name, one, _copied(one)) for name, one in vars(optimizer).items() if name not in EVERY_OPTIMIZERS],
            )
            for optimizer in holdings.optimizers.values()
        ]
        self._others = [
            (one, {name: _copied(value) for name, value in vars(one).items()})
            for one in holdings.state
            if not isinstance(one, torch.nn.Module) and hasattr(one, "__dict__")
        ]

    def restore(self) -> None:
        """Bind everything as it was; the tensors themselves are not touched."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for optimizer, groups, state, attributes in self._optimizers:
            for group, values in groups:
                group.clear()
                group.update({**values, "params": list(values["params"])})
            optimizer.param_groups[:] = [group for group, _ in groups]
            optimizer.state.clear()
            for key, entry, values in state:
                optimizer.state[key] = entry
                if isinstance(entry, MutableMapping):  # the same dictionary, which recordings know
                    entry.clear()
                    entry.update(_copied(values))
            for name in vars(optimizer).keys() - EVERY_OPTIMIZERS - {name for name, _, _ in attributes}:
                delattr(optimizer, name)
            for name, one, value in attributes:
                _fill(one, value)
                vars(optimizer)[name] = one
        for one, values in self._others:
            vars(one).clear()
            vars(one).update({name: _copied(value) for name, value in values.items()})


def _copied(value: Any) -> Any:
    """Copy containers, whose content may change in place; not what they hold."""
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _copied(item)
        return copied
    return [_copied(item) for item in value] if type(value) is list else value


def _fill(container: Any, values: Any) -> None:
    """Have a list or a dictionary hold what it held when it was copied; leave anything else alone."""
    if type(container) is dict:
        container.clear()
        container.update(_copied(values))
    elif type(container) is list:
        container[:] = _copied(values)
