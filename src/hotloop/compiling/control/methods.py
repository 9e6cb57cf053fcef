"""The ``*_step`` methods of a LightningModule, compiled in place beside the module itself.

A trainer calls ``module.training_step(batch)``, and not the module. So an entry stands in front of the class's method,
as an attribute of that one module. What the step logs is noted while compiled code runs and handed to ``log``
afterwards: torch cannot trace Lightning's ``self.log``, and a graph need not break for it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.module import Method, eager_call
from hotloop.compiling.apply import step_methods
from hotloop.compiling.control.component import Entry, inlined
from hotloop.compiling.observe import collector, explain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hotloop.compiling.control.component import Component, Lane

AGAIN = 4
"""Steps for which a method may be compiled anew: for a short batch, a length that varies, a flag; not for a counter."""
_LOGS = ("log", "log_dict")
_NOTHING = object()
_told: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""What the log has told of each module: a trainer compiles one for its fit, and again for each evaluation."""


class Note:
    """Stands for ``log`` or ``log_dict`` while a step runs: keeps what was logged, with the values of that moment."""

    def __init__(self, name: str, into: list[tuple[str, Any, Any]]) -> None:
        self._name, self._into = name, into

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Note one call."""
        self._into.append((self._name, [_now(one) for one in args], {name: _now(one) for name, one in kwargs.items()}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Note:
        return self


def _now(value: Any) -> Any:
    """Give a value that stays as it is, as Lightning itself takes it; what is no tensor is handed on."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return {name: _now(one) for name, one in value.items()} if type(value) is dict else value


class MethodEntry:
    """Stands in front of one method of a module; a copy of the module has its class's method again."""

    def __init__(self, module: torch.nn.Module, name: str, lanes: tuple[Lane, Lane]) -> None:
        self.off = False
        """Runs the method eagerly."""
        self._method, self._lanes = Method(module, name), lanes
        self._again = 0
        """Calls for which it was compiled anew."""
        self._noted: list[tuple[str, Any, Any]] = []
        self._notes = {each: Note(each, self._noted) for each in _LOGS if hasattr(module, each)}

    @property
    def __wrapped__(self) -> Any:
        """The module's own method, which trainers look at to tell what it takes, and whether it is overridden."""
        return self._method.bound()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method, compiled in the mode that is in force."""
        if self.off or self._again > AGAIN or inlined():
            return self._method(*args, **kwargs)
        lane = self._lanes[0 if torch.is_grad_enabled() else 1]
        before_it = lane.tally.recompiles
        module = self._method.module()
        held = vars(module)
        before = {name: held.get(name, _NOTHING) for name in self._notes}
        held.update(self._notes)
        try:
            result = lane.call(self._method, args, kwargs)
            noted = list(self._noted)
        finally:
            self._noted.clear()
            for name, one in before.items():
                if one is _NOTHING:
                    held.pop(name, None)
                else:
                    held[name] = one
        for name, values, settings in noted:
            getattr(module, name)(*values, **settings)
        self._count(lane, anew=lane.tally.recompiles > before_it)
        return result

    def _count(self, lane: Lane, *, anew: bool) -> None:
        """Leave a method to the modules that it calls where it is compiled anew again and again."""
        self._again += anew
        if anew and self._again > AGAIN:
            why = f"it was compiled anew in {self._again} steps, for values that it reads"
            _left(self._method.module(), lane, self._method.name, why)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = self._method.module()
        return Method(memo.get(id(module), module), self._method.name).bound()

    def __reduce__(self) -> Any:
        return getattr, (self._method.module(), self._method.name)


class RedirectableEntry(Entry):
    """The entry of a LightningModule that has a forward of its own.

    For a step under DDP, Lightning puts a function in the place of ``forward`` and calls the module, which leads to
    ``training_step``. That call is not the forward's: it goes through, to the entry of the method.
    """

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module in the mode that is in force, or what is called through it."""
        module = self._module()
        forward = vars(module).get("forward")
        if forward is not None and getattr(forward, "__self__", None) is not module:
            return eager_call(module, *args, **kwargs)
        return super().__call__(*args, **kwargs)


def make(module: torch.nn.Module, component: Component) -> dict[str, MethodEntry]:
    """Give the entries for the step methods that a module's class defines; none where it is no LightningModule.

    Where one cannot be compiled, its children are, and the account says why.
    """
    found = step_methods(module)
    for name, why in found.items():
        if why:
            _left(module, component.lanes[name != "training_step"], name, why)
    return {name: MethodEntry(module, name, component.lanes) for name, why in found.items() if not why}


def _left(module: torch.nn.Module, lane: Lane, name: str, why: str) -> None:
    """Say that a method is left to the modules that it calls: in the account, and once for a module on the log."""
    reason = f"{name} itself stays eager, and the modules that it calls are compiled: {why}"
    event = explain.no_effect("method", lane.tally.component, reason, partly=True)
    told = _told.setdefault(module, set())
    if reason in told:
        lane.tally.said.add(explain.log_key(event))
    told.add(reason)
    collector.emit(event, lane.tally)


def put(module: torch.nn.Module, entries: dict[str, MethodEntry]) -> None:
    """Put entries in front of a module's methods; what somebody else has put there stays (see `method_of`)."""
    for name, entry in entries.items():
        vars(module).setdefault(name, entry)


def drop(module: torch.nn.Module, entries: dict[str, MethodEntry]) -> None:
    """Take entries away again."""
    for name, entry in entries.items():
        if vars(module).get(name) is entry:
            del vars(module)[name]


def switch(entries: Iterable[MethodEntry], *, off: bool) -> None:
    """Have methods run eagerly, or compiled again."""
    for entry in entries:
        entry.off = off
