"""What a capture needs to stand as it was found, before it is made and as long as it is replayed."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.hooks import gradient_hooks, hooks_of_gradients
from hotloop.step.state.memory import Views, view_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hotloop.step.capture.optimizers import Recorded
    from hotloop.step.state.holdings import Holdings

_descriptors: Any = torch.Tensor
_trained = _descriptors.requires_grad.__get__


@dataclasses.dataclass(frozen=True)
class Change:
    """What no longer is as it was captured; ``optimizer`` is the name of the one whose frozen setting it is."""

    what: str
    optimizer: str | None = None


class Invariants:
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
        self._views, self._facts = Views(self._parameters), _facts(self._parameters)
        self._buffers = Views(holdings.buffers().values())
        self._others = _views_of_others(holdings)
        self._states = [_State(one.optimizer) for one in recorded.values()]
        self._groups = _group_sizes(holdings)

    def changed(self) -> Change | None:
        """Name something that no longer is as it was captured; None where all is."""
        if self._groups != _group_sizes(self._holdings):
            return Change("a parameter group was added or removed")
        if not self._views.same() or self._facts != _facts(self._parameters):
            return Change(self._which())
        for name, one in self._recorded.items():
            if setting := one.changed():
                return Change(setting, name)
        if any(one.changed() for one in self._states):
            return Change("the optimizer's state was replaced")
        if not self._buffers.same() or self._others != _views_of_others(self._holdings):
            return Change("a buffer or other state was replaced")
        return None

    def _which(self) -> str:
        """Say of which parameter what is not as it was."""
        moved = self._views.moved()
        for name, parameter, trained in zip(self._names, self._parameters, self._facts[0], strict=True):
            if any(one is parameter for one in moved):
                return f"the memory of parameter {name}, or its shape or strides"
            if parameter.requires_grad != trained:
                return f"requires_grad of parameter {name}"
        then = self._facts[1] or [(None, None)] * len(self._names)
        pairs = zip(self._names, self._parameters, then, strict=True)
        return f"the gradient hooks of parameter {next(name for name, one, had in pairs if gradient_hooks(one) != had)}"


class _State:
    """The tensors of an optimizer's state, which a recording updates in place, and where they stand.

    They are looked at all at once, and no tensor is hashed: there are three of them for each parameter of Adam's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._state = optimizer, optimizer.state
        self._entries = list(optimizer.state.values())
        self._lengths, self._values = [*map(len, self._entries)], self._values_now()
        self._views = Views([one for one in self._values if isinstance(one, torch.Tensor)])

    def _values_now(self) -> list[Any]:
        return [*itertools.chain.from_iterable([entry.values() for entry in self._entries])]

    def changed(self) -> bool:
        """Tell whether a tensor, or a dictionary around it, is another one."""
        if self._optimizer.state is not self._state or len(self._state) != len(self._entries):
            return True
        if not all(map(operator.is_, self._state.values(), self._entries)):
            return True
        if [*map(len, self._entries)] != self._lengths or not all(map(operator.is_, self._values_now(), self._values)):
            return True
        return not self._views.same()


def _facts(parameters: Sequence[torch.nn.Parameter]) -> tuple[list[bool], list[tuple[Any, ...]]]:
    return [*map(_trained, parameters)], hooks_of_gradients(parameters)


def _views_of_others(holdings: Holdings) -> list[tuple[Any, ...]]:
    """Give the memory of other state, and how it is viewed; that none was replaced is for the watch to see."""
    return [*map(view_of, holdings.other_tensors().values())]


def _group_sizes(holdings: Holdings) -> list[int]:
    return [len(group["params"]) for optimizer in holdings.optimizers.values() for group in optimizer.param_groups]
