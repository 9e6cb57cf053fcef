"""Declared buckets: arguments of varying size are padded to one of a few sizes, so that few shapes occur."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from hotloop.errors import ConfigError

_log = logging.getLogger("hotloop")


@dataclasses.dataclass(frozen=True)
class Pad:
    """The padding of one argument; only declared arguments are ever padded.

    Args:
        dim: the dimension that varies; a negative number counts from the last.
        value: the value of the padding.
        to: the sizes to pad to; a larger argument stays as it is.

    Raises:
        ConfigError: a value does not fit.
    """

    dim: int
    value: float
    to: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.dim) is not int:
            raise ConfigError(f"Pad dim {self.dim!r}: expected a whole number")
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            raise ConfigError(f"Pad value {self.value!r}: expected a number")
        sizes = tuple(self.to) if isinstance(self.to, Iterable) else ()
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ConfigError(f"Pad to {self.to!r}: expected sizes of 1 or more, e.g. to=(64, 128, 256)")
        object.__setattr__(self, "to", tuple(sorted(set(sizes))))

    def apply(self, name: str, tensor: Any) -> torch.Tensor:
        """Return a tensor padded to the next size.

        Raises:
            ConfigError: the argument is no tensor, or has no such dimension.
        """
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"buckets[{name!r}]: the argument is a {type(tensor).__name__}, expected a tensor")
        if not -tensor.ndim <= self.dim < tensor.ndim:
            raise ConfigError(f"buckets[{name!r}]: dim {self.dim} does not exist in shape {tuple(tensor.shape)}")
        size = tensor.shape[self.dim]
        target = next((edge for edge in self.to if edge >= size), size)
        if target == size:
            return tensor
        shape = list(tensor.shape)
        shape[self.dim] = target - size
        return torch.cat([tensor, tensor.new_full(shape, self.value)], dim=self.dim)


class Buckets:
    """The declared buckets of a loop.

    Args:
        declared: by the name of the step's argument, or by a key in an argument that is a mapping.

    Raises:
        ConfigError: an entry is no `Pad`.
    """

    def __init__(self, declared: Mapping[str, Pad]) -> None:
        if not isinstance(declared, Mapping):
            raise ConfigError(f"buckets {declared!r}: expected a mapping of argument name to hotloop.Pad")
        for name, pad in declared.items():
            if not isinstance(pad, Pad):
                raise ConfigError(f"buckets[{name!r}]: expected hotloop.Pad(dim=..., value=..., to=...), got {pad!r}")
        self.declared = dict(declared)
        self._said: set[str] = set()

    def of(self, function: Callable[..., Any]) -> Callable[[Any, Any], tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the function that pads the arguments of a call of ``function``."""
        signature = inspect.signature(function) if self.declared else inspect.Signature()

        def pad(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            bound = signature.bind(*args, **kwargs)
            used: set[str] = set()
            bound.arguments.update({name: self._padded(name, one, used) for name, one in bound.arguments.items()})
            if missing := set(self.declared) - used:
                raise ConfigError(
                    f"buckets names {', '.join(sorted(missing))}: no such argument in {function.__name__}{signature}, "
                    "nor a key in one that is a mapping"
                )
            return bound.args, bound.kwargs

        return pad

    def _padded(self, name: str, value: Any, used: set[str]) -> Any:
        """Return an argument, padded if it or a key in it is declared; add the names that were found to ``used``."""
        if name in self.declared:
            used.add(name)
            return self._pad(name, value)
        if not isinstance(value, Mapping) or not any(key in self.declared for key in value):
            return value
        # A mapping of the same type; the user's own is not changed.
        copied: Any = value.copy() if hasattr(value, "copy") else dict(value)
        for key, item in value.items():
            if key in self.declared:
                used.add(key)
                copied[key] = self._pad(key, item)
        return copied

    def _pad(self, name: str, value: Any) -> torch.Tensor:
        pad = self.declared[name]
        padded = pad.apply(name, value)
        size, largest = padded.shape[pad.dim], pad.to[-1]
        if size > largest and name not in self._said:
            self._said.add(name)
            _log.warning(
                "buckets[%r]: a batch has size %d, more than the largest bucket %d: it is not padded",
                name, size, largest,
            )  # fmt: skip
        return padded
