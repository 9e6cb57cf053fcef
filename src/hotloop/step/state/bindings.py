"""The Python objects that hold a program's tensors: dictionaries and attributes that can be put back as they were."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.hooks import module_tables
from hotloop.step.state.holdings import EVERY_OPTIMIZERS

if TYPE_CHECKING:
    from hotloop.step.state.holdings import Holdings


class Bindings:
    """The gradients, the optimizers' dictionaries and attributes, and the attributes of the other state.

    Attributes of an optimizer are included because a user's optimizer may count its steps there, and an undone step
    must not count.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._parameters = list(holdings.parameters().values())
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._optimizers = [
            (
                optimizer,
                [(group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups],
                [(key, entry, _copy_containers(entry)) for key, entry in optimizer.state.items()],
                {
                    name: (value, _copy_containers(value))
                    for name, value in vars(optimizer).items()
                    if name not in EVERY_OPTIMIZERS
                },
            )
            for optimizer in holdings.optimizers.values()
        ]
        self._others = [
            (holder, {name: _copy_containers(value) for name, value in vars(holder).items()})
            for holder in holdings.state
            if not isinstance(holder, torch.nn.Module) and hasattr(holder, "__dict__")
        ]

    def restore(self) -> None:
        """Bind everything as it was; the tensors themselves are not touched."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        for saved in self._optimizers:
            self._restore_optimizer(*saved)
        for holder, values in self._others:
            vars(holder).clear()
            vars(holder).update({name: _copy_containers(value) for name, value in values.items()})

    @staticmethod
    def _restore_optimizer(
        optimizer: torch.optim.Optimizer,
        groups: list[tuple[dict[str, Any], dict[str, Any]]],
        state: list[tuple[Any, Any, Any]],
        attributes: dict[str, tuple[Any, Any]],
    ) -> None:
        for group, values in groups:
            group.clear()
            group.update({**values, "params": list(values["params"])})
        optimizer.param_groups[:] = [group for group, _ in groups]
        optimizer.state.clear()
        for key, entry, values in state:
            optimizer.state[key] = entry
            if isinstance(entry, MutableMapping):  # the same dictionary object, since recordings refer to it
                entry.clear()
                entry.update(_copy_containers(values))
        for name in vars(optimizer).keys() - EVERY_OPTIMIZERS - attributes.keys():
            delattr(optimizer, name)
        for name, (value, content) in attributes.items():
            if type(value) is dict:
                value.clear()
                value.update(_copy_containers(content))
            elif type(value) is list:
                value[:] = _copy_containers(content)
            vars(optimizer)[name] = value


class BufferTables:
    """The tensor that each buffer of the modules is; a step may replace a buffer, or register a first one.

    Args:
        holdings: the program, whose modules are meant.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holders: list[dict[str, torch.Tensor | None]] = [
            module_tables(module)[1] for root in holdings.modules.values() for module in root.modules()
        ]
        self._tables: list[tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]] = []
        self.save()

    def save(self) -> None:
        """Note the tensors that the buffers are now."""
        self._tables = [(held, dict(held)) for held in self._holders if held]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The buffers that were there when they were noted."""
        return [buffer for _, table in self._tables for buffer in table.values() if buffer is not None]

    def restore(self) -> None:
        """Put the same tensors under the same names; their values are not touched."""
        tables = {id(held): table for held, table in self._tables}
        for held in self._holders:
            if held or id(held) in tables:
                held.clear()
                held.update(tables.get(id(held), {}))


def _copy_containers(value: Any) -> Any:
    """Copy lists and dictionaries, whose content may change in place, but not what they contain."""
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _copy_containers(item)
        return copied
    return [_copy_containers(item) for item in value] if type(value) is list else value
