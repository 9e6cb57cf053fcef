"""The conditions that a capture relies on: what must stay as it was before it is made, and while it is replayed."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.hooks import gradient_hooks, hooks_of_gradients
from hotloop.step.obstacle import INTO_IT
from hotloop.step.state.holdings import Holdings, Views, view_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.step.capture.optimizers import Recorded


@dataclasses.dataclass(frozen=True)
class Change:
    """A difference from the state at the capture; ``optimizer`` names the optimizer whose frozen setting changed.

    ``hint``: what to do where it changes again and again.
    """

    what: str
    optimizer: str | None = None
    hint: str = "keep it constant, pass it as a tensor, or change it less often"


class Invariants:
    """The parameters and optimizer state that an audit and a warm-up have seen: a capture needs them unchanged.

    An optimizer whose state was cleared, for example, would create it anew inside the recording, and in each replay.

    Args:
        holdings: everything that the step may change.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._parameters = list(holdings.parameters().values())
        self._facts = self._facts_now()

    def holds(self) -> bool:
        """Return whether everything still is as it was."""
        now = list(self._holdings.parameters().values())
        same = len(now) == len(self._parameters) and all(map(operator.is_, now, self._parameters))
        return same and self._facts_now() == self._facts

    def _facts_now(self) -> tuple[Any, ...]:
        optimizers = self._holdings.optimizers.values()
        keys = [tuple(optimizer.state.get(one) or ()) for optimizer in optimizers for one in self._parameters]
        kinds = [(one.requires_grad, one.dtype, one.device, gradient_hooks(one)) for one in self._parameters]
        return keys, kinds, _group_sizes(self._holdings)


class Frozen:
    """The state that a recording has frozen: memory that it reads and writes, and settings that Python reads no more.

    Args:
        holdings: everything that the step may change.
        recorded: the optimizers whose steps are in the recording, by name.
    """

    def __init__(self, holdings: Holdings, recorded: Mapping[str, Recorded]) -> None:
        self._holdings, self._recorded = holdings, recorded
        self._names, self._parameters = list(holdings.parameters()), list(holdings.parameters().values())
        self._views = Views(self._parameters)
        self._trained, self._hooks = self._trained_now(), hooks_of_gradients(self._parameters)
        self._buffers = Views(holdings.buffers().values())
        self._others = self._views_of_others()
        self._states = [_State(optimizer.optimizer) for optimizer in recorded.values()]
        self._groups = _group_sizes(holdings)

    def _trained_now(self) -> list[bool]:
        reader: Any = torch.Tensor.requires_grad  # read without the attribute look-up of each parameter
        return [*map(reader.__get__, self._parameters)]

    def _views_of_others(self) -> list[tuple[Any, ...]]:
        """Return the views of the other state's memory; the guard of Python state notices replaced objects."""
        return [*map(view_of, self._holdings.other_tensors().values())]

    def changed(self) -> Change | None:
        """Return something that is no longer as it was captured; None if everything is."""
        if self._groups != _group_sizes(self._holdings):
            return Change("a parameter group was added or removed")
        trained, hooks = self._trained_now(), hooks_of_gradients(self._parameters)
        if not self._views.same() or trained != self._trained or hooks != self._hooks:
            what = self._changed_parameter()
            return Change(what, hint=INTO_IT) if self._views.moved() else Change(what)
        for name, optimizer in self._recorded.items():
            if setting := optimizer.changed():
                return Change(setting, name)
        if any(state.changed() for state in self._states):
            return Change("the optimizer's state was replaced")
        if not self._buffers.same() or self._others != self._views_of_others():
            return Change("a buffer or other state was replaced", hint=INTO_IT)
        return None

    def _changed_parameter(self) -> str:
        """Return which parameter has changed, and what of it."""
        moved = {*map(id, self._views.moved())}
        for name, parameter, trained in zip(self._names, self._parameters, self._trained, strict=True):
            if id(parameter) in moved:
                return f"the memory of parameter {name}, or its shape or strides"
            if parameter.requires_grad != trained:
                return f"requires_grad of parameter {name}"
        hooks = self._hooks or [(None, None)] * len(self._names)
        parts = zip(self._names, self._parameters, hooks, strict=True)
        return f"the gradient hooks of parameter {next(name for name, one, had in parts if gradient_hooks(one) != had)}"


class _State:
    """The tensors of an optimizer's state, which a recording updates in place, and the memory they are in.

    They are compared all at once, and no tensor is hashed: Adam has three for each parameter.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._state = optimizer, optimizer.state
        self._entries = list(optimizer.state.values())
        self._lengths, self._values = [*map(len, self._entries)], self._values_now()
        self._views = Views([value for value in self._values if isinstance(value, torch.Tensor)])

    def _values_now(self) -> list[Any]:
        return [*itertools.chain.from_iterable([entry.values() for entry in self._entries])]

    def changed(self) -> bool:
        """Return whether a tensor, or a dictionary around it, was replaced."""
        if self._optimizer.state is not self._state or len(self._state) != len(self._entries):
            return True
        if not all(map(operator.is_, self._state.values(), self._entries)):
            return True
        if [*map(len, self._entries)] != self._lengths or not all(map(operator.is_, self._values_now(), self._values)):
            return True
        return not self._views.same()


def _group_sizes(holdings: Holdings) -> list[int]:
    return [len(group["params"]) for optimizer in holdings.optimizers.values() for group in optimizer.param_groups]
