"""What tells calls apart beside shapes and values: arguments that are one tensor or share memory, and attributes."""

from __future__ import annotations

import bisect
import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hotloop._torch.dynamo import is_mark
from hotloop.measure import Unhashed, flatten, signature
from hotloop.step.guard.fingerprint import SCALARS
from hotloop.step.naming import with_article
from hotloop.step.obstacle import Obstacle
from hotloop.step.state.places import span_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_address = torch.Tensor.data_ptr
_of: Any = torch.Tensor
_bytes = _of.nbytes.__get__
_OF_ITS_OWN = "pass it as an argument of its own, or leave it out of the tensor; numbers and texts may stay"


class Attribute(NamedTuple):
    """What a program put on an argument tensor; ``place`` is the tensor's among the leaves."""

    place: int
    name: str
    value: Any
    """What tells it from others: a signature, or an `Unhashed` with its type where its value cannot be followed."""


class Aliasing(NamedTuple):
    """The part of a call's key that its signature lacks: which arguments share memory, and attributes of tensors."""

    shared: tuple[tuple[int, int, int], ...]
    """For each tensor the index of the first tensor that is the same object, begins at the same address, overlaps it.
    Empty where each tensor is alone."""
    attributes: tuple[Attribute, ...]

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Aliasing:
        """Return the aliasing of the leaves of a call's arguments; it runs before each replay.

        About 5 µs for 8 tensors (Python 3.12): tensors are compared pair by pair only where memory overlaps.
        """
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        marked = any(map(vars, tensors))
        return cls(shared(tensors) if len(tensors) > 1 else (), tuple(_attributes(leaves)) if marked else ())

    def obstacle(self, names: Sequence[str]) -> Obstacle | None:
        """Say which attribute of which argument keeps calls from being captured, if one does.

        Args:
            names: of the leaves, as a user knows them.
        """
        for place, name, value in self.attributes:
            if isinstance(value, Unhashed):
                what = f"argument {names[place]} has an attribute {name}, {with_article(value.type_name)}"
                return Obstacle(f"{what}, whose value a recording would freeze", _OF_ITS_OWN)
        return None

    def values(self) -> dict[tuple[int, str], Any]:
        """Give what tells each attribute from others."""
        return {(place, name): value for place, name, value in self.attributes}


def attributes_of(tensor: torch.Tensor) -> dict[str, Any]:
    """Give what a program put on a tensor: not what hotloop and torch's compiler note there."""
    return {name: value for name, value in tensor.__dict__.items() if not is_mark(name)}


def _attributes(leaves: Sequence[Any]) -> Iterator[Attribute]:
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            for name, value in attributes_of(leaf).items():
                parts = flatten(value)[0]
                followed = all(isinstance(one, enum.Enum) or type(one) in SCALARS for one in parts)
                cls = type(value)
                type_name = cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
                yield Attribute(place, name, signature((value,), {}) if followed else Unhashed(type_name))


def shared(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Give of each tensor the first that is the same, begins at the same place, has memory in common.

    Empty where each is alone: parts of one memory that do not overlap (the gradients of a flat buffer) are.
    """
    spans = [*map(_span, tensors)]
    end = 0
    for begins, ends in sorted(spans):
        if begins < end or not ends:
            return _relations(tensors, spans)
        end = ends
    return ()


class Regions:
    """The memory of some tensors, to be asked whether others lie in it.

    Args:
        tensors: which; those without an address have none.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._begins, self._ends = list[int](), list[int]()
        for begins, ends in sorted(set(map(_span, tensors)) - {(0, 0)}):
            if self._ends and begins < self._ends[-1]:
                self._ends[-1] = max(ends, self._ends[-1])
            else:
                self._begins.append(begins)
                self._ends.append(ends)

    def of(self, leaves: Sequence[Any]) -> list[int]:
        """Give for each the number of the region that it has memory in; -1 where there is none."""
        return [self._of(leaf) if isinstance(leaf, torch.Tensor) else -1 for leaf in leaves]

    def _of(self, tensor: torch.Tensor) -> int:
        begins, ends = _span(tensor)
        last = bisect.bisect_left(self._begins, ends) - 1
        return last if last >= 0 and self._ends[last] > begins else -1


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Give where the memory of a tensor begins, and where it ends: twice 0 where it has none with an address."""
    try:
        begins = _address(tensor)
        if tensor.is_contiguous():
            return begins, begins + _bytes(tensor) if begins else 0
        return begins, begins + span_of(tensor) * tensor.element_size() if begins else 0
    except (RuntimeError, NotImplementedError):  # sparse ones, and tensors in name only
        return 0, 0


def _relations(tensors: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int], ...]:
    regions, region, end = [0] * len(tensors), 0, 0
    for place in sorted(range(len(tensors)), key=spans.__getitem__):
        begins, ends = spans[place]
        region = begins if begins >= end else region
        regions[place], end = region, max(end, ends)
    found = [*zip(*map(_firsts, ([*map(id, tensors)], [begins for begins, _ in spans], regions)), strict=True)]
    return tuple(found) if any(one != (place,) * 3 for place, one in enumerate(found)) else ()


def _firsts(values: Sequence[int]) -> list[int]:
    """Give the place of the first that is equal to each; 0 is no value, and equal to none."""
    first: dict[int, int] = {}
    return [first.setdefault(value, place) if value else place for place, value in enumerate(values)]
