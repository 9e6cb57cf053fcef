"""The ``*_step`` methods of a LightningModule, compiled in place beside the module itself.

A trainer calls ``module.training_step(batch)``, and not the module. So an entry stands in front of the class's method,
as an attribute of that one module. What the step logs is noted while compiled code runs and handed to ``log``
afterwards: torch cannot trace Lightning's ``self.log``, and a graph need not break for it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import Method
from hotloop.compiling.apply import step_methods
from hotloop.compiling.control.lane import inlined
from hotloop.compiling.observe import collector, explain

if TYPE_CHECKING:
    from hotloop.compiling.control.lane import Lane

AGAIN = 4
"""Steps for which a method may be compiled anew: a short batch, a varying length or a flag needs fewer."""
_MISSING = object()
_logged: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""The reasons logged for each module: a trainer compiles one for its fit, and again for each evaluation."""


class Note:
    """Stands for ``log`` or ``log_dict`` while a step runs: keeps what was logged, with the values of that moment."""

    def __init__(self, name: str, into: list[tuple[str, Any, Any]]) -> None:
        self._name, self._into = name, into

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Note one call, with detached copies of its tensors, which is how Lightning itself keeps them."""
        self._into.append(
            (
                self._name,
                [self._frozen(value) for value in args],
                {name: self._frozen(value) for name, value in kwargs.items()},
            )
        )

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return {name: self._frozen(inner) for name, inner in value.items()} if type(value) is dict else value

    def __deepcopy__(self, memo: dict[int, Any]) -> Note:
        return self


class MethodEntry:
    """Stands in front of one method of a module; a copy of the module has its class's method again."""

    def __init__(self, module: torch.nn.Module, name: str, lanes: tuple[Lane, Lane]) -> None:
        self.off = False
        """Runs the method eagerly."""
        self._method, self._lanes = Method(module, name), lanes
        self._again = 0
        """Calls for which it was compiled anew."""
        self._noted: list[tuple[str, Any, Any]] = []
        self._notes = {log: Note(log, self._noted) for log in ("log", "log_dict") if hasattr(module, log)}

    @property
    def __wrapped__(self) -> Any:
        """The module's own method: trainers read its parameters, and whether it is overridden."""
        return self._method.bound()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method, compiled in the mode that is in force."""
        if self.off or self._again > AGAIN or inlined():
            return self._method(*args, **kwargs)
        lane = self._lanes[0 if torch.is_grad_enabled() else 1]
        recompiles = lane.tally.recompiles
        module = self._method.module()
        attributes = vars(module)
        before = {name: attributes.get(name, _MISSING) for name in self._notes}
        attributes.update(self._notes)
        try:
            result = lane.call(self._method, args, kwargs)
            noted = list(self._noted)
        finally:
            self._noted.clear()
            for name, value in before.items():
                if value is _MISSING:
                    attributes.pop(name, None)
                else:
                    attributes[name] = value
        for name, values, settings in noted:
            getattr(module, name)(*values, **settings)
        if lane.tally.recompiles > recompiles:
            self._again += 1
            if self._again > AGAIN:
                why = f"it was compiled anew in {self._again} steps, for values that it reads"
                _report_left(module, lane, self._method.name, why)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._method.module()
        return Method(memo.get(id(module), module), self._method.name).bound()

    def __reduce__(self) -> Any:
        return getattr, (self._method.module(), self._method.name)


def make_entries(module: torch.nn.Module, lanes: tuple[Lane, Lane]) -> dict[str, MethodEntry]:
    """Return entries for the step methods that a module's class defines; none where it is no LightningModule.

    A method that cannot be compiled gets none: its children are compiled, and the status says why.
    """
    reasons = step_methods(module)
    for name, why in reasons.items():
        if why:
            _report_left(module, lanes[name != "training_step"], name, why)
    return {name: MethodEntry(module, name, lanes) for name, why in reasons.items() if not why}


def _report_left(module: torch.nn.Module, lane: Lane, name: str, why: str) -> None:
    """Report that a method is left to the modules that it calls: in the status, and once for a module in the log."""
    reason = f"{name} itself stays eager, and the modules that it calls are compiled: {why}"
    event = explain.no_effect("method", lane.tally.component, reason, partly=True)
    logged = _logged.setdefault(module, set())
    if reason in logged:
        lane.tally.said.add(explain.log_key(event))
    logged.add(reason)
    collector.emit(event, lane.tally)
