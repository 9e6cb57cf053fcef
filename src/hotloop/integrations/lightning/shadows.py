"""Methods of ours on a LightningModule object, in front of its class's methods, for the time of a fit."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import lightning.pytorch as pl


class Method:
    """A method that stands in front of a module's own, on that object alone.

    A copy of the module (weight averaging makes one at the start of a fit) has its class's method again.
    """

    def __init__(self, module: pl.LightningModule, name: str, run: Callable[..., Any]) -> None:
        self._module, self._name, self._run = module, name, run
        self.__wrapped__ = own_method(module, name)  # Lightning reads it to find out whether the method is overridden

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run ours."""
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return own_method(memo.get(id(self._module), self._module), self._name)

    def __reduce__(self) -> Any:
        return getattr, (self._module, self._name)


def own_method(module: pl.LightningModule, name: str) -> Callable[..., Any]:
    """Return the method that the module's class defines, bound to the module."""
    return types.MethodType(getattr(type(module), name), module)


class Shadows:
    """Methods in front of a module's own, and the way back.

    Args:
        module: the module; nothing but its ``__dict__`` is changed.
    """

    _ABSENT = object()

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._before: dict[str, Any] = {}

    def put(self, name: str, run: Callable[..., Any]) -> None:
        """Put a method in front; an attribute that the user had set there comes back at the end."""
        held = vars(self._module)
        self._before.setdefault(name, held.get(name, self._ABSENT))
        held[name] = Method(self._module, name, run)

    def take_off(self) -> None:
        """Leave the module as it was."""
        held = vars(self._module)
        for name, before in self._before.items():
            if before is self._ABSENT:
                held.pop(name, None)
            else:
                held[name] = before
        self._before.clear()
