"""What a capture needs to stand as it was found, before it is made and as long as it is replayed."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.hooks import gradient_hooks
from hotloop.step.memory import Memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.step.holdings import Holdings
    from hotloop.step.optimizers import Recorded

_Fact = tuple[int, bool, Any]


@dataclasses.dataclass(frozen=True)
class Change:
    """What no longer is as it was captured; ``optimizer`` is the name of the one whose frozen setting it is."""

    what: str
    optimizer: str | None = None


class Standing:
    """The parameters and optimizer state that a survey and a warm-up have seen: a capture needs them as they were.

    An optimizer whose state was cleared, say, would make it anew inside the recording, and so in each replay.

    Args:
        holdings: whose.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._parameters = list(holdings.parameters().values())
        self._facts = self._look()

    def holds(self) -> bool:
        """Tell whether everything still is as it was."""
        now = list(self._holdings.parameters().values())
        same = len(now) == len(self._parameters) and all(a is b for a, b in zip(now, self._parameters, strict=True))
        return same and self._look() == self._facts

    def _look(self) -> tuple[Any, ...]:
        optimizers = self._holdings.optimizers.values()
        kept = [tuple(one.state.get(parameter) or ()) for one in optimizers for parameter in self._parameters]
        asked = [(one.requires_grad, one.dtype, one.device, gradient_hooks(one)) for one in self._parameters]
        return kept, asked, _group_sizes(self._holdings)


class Frozen:
    """What a recording has frozen: memory that it reads and writes, and settings that are no more read in Python.

    Args:
        holdings: whose.
        recorded: the optimizers whose steps are in the recording, by name.
    """

    def __init__(self, holdings: Holdings, recorded: Mapping[str, Recorded]) -> None:
        self._holdings, self._recorded = holdings, recorded
        self._names, self._parameters = list(holdings.parameters()), list(holdings.parameters().values())
        self._facts = _facts(self._parameters)
        self._buffers = list(holdings.buffers().values())
        self._storages = _storages(self._buffers, holdings)
        self._states = [_State(one.optimizer) for one in recorded.values()]
        self._groups = _group_sizes(holdings)

    def changed(self) -> Change | None:
        """Name something that no longer is as it was captured; None where all is."""
        if self._groups != _group_sizes(self._holdings):
            return Change("a parameter group was added or removed")
        if self._facts != (facts := _facts(self._parameters)):
            return Change(self._which(facts))
        for name, one in self._recorded.items():
            if setting := one.changed():
                return Change(setting, name)
        if any(one.changed() for one in self._states):
            return Change("the optimizer's state was replaced")
        if self._storages != _storages(self._buffers, self._holdings):
            return Change("a buffer or other state was replaced")
        return None

    def _which(self, facts: Sequence[_Fact]) -> str:
        """Say of which parameter what is not as it was."""
        every = zip(self._names, self._facts, facts, strict=True)
        name, was, now = next((name, was, now) for name, was, now in every if was != now)
        if was[0] != now[0]:
            return f"the memory of parameter {name}"
        if was[1] != now[1]:
            return f"requires_grad of parameter {name}"
        return f"the gradient hooks of parameter {name}"


class _State:
    """The tensors of an optimizer's state, which a recording updates in place, and where they stand."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._state = optimizer, optimizer.state
        self._entries = [(entry, list(entry.values())) for entry in optimizer.state.values()]
        tensors = [one for _, values in self._entries for one in values if isinstance(one, torch.Tensor)]
        self._memory = Memory(tensors)

    def changed(self) -> bool:
        """Tell whether a tensor, or a dictionary around it, is another one. No tensor is hashed, which is slow."""
        if self._optimizer.state is not self._state or len(self._state) != len(self._entries):
            return True
        replaced = any(
            entry is not held or len(entry) != len(values) or not all(map(operator.is_, entry.values(), values))
            for entry, (held, values) in zip(self._state.values(), self._entries, strict=True)
        )
        return replaced or bool(self._memory.moved())


def _facts(parameters: Sequence[torch.nn.Parameter]) -> list[_Fact]:
    return [(parameter.data_ptr(), parameter.requires_grad, gradient_hooks(parameter)) for parameter in parameters]


def _storages(buffers: Sequence[torch.Tensor], holdings: Holdings) -> list[int]:
    """Give the memory of buffers and other state; that no buffer was replaced is for the watch to see."""
    return [tensor.data_ptr() for tensor in (*buffers, *holdings.other_tensors().values())]


def _group_sizes(holdings: Holdings) -> list[int]:
    return [len(group["params"]) for optimizer in holdings.optimizers.values() for group in optimizer.param_groups]
