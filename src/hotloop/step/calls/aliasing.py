"""The parts of a call's key that shapes and values lack: arguments that share memory, and attributes of tensors."""

from __future__ import annotations

import bisect
import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hotloop._torch.dynamo import attributes_of
from hotloop.measure import Unhashed, flatten, signature
from hotloop.step.guard.fingerprint import SCALARS
from hotloop.step.naming import with_article
from hotloop.step.obstacle import Obstacle
from hotloop.step.state.memory import span_of

if TYPE_CHECKING:
    from collections.abc import Sequence


class Aliasing(NamedTuple):
    """The part of a call's key that its signature lacks: which arguments share memory, and attributes of tensors."""

    shared: tuple[tuple[int, int, int], ...]
    """For each tensor the index of the first tensor that is the same object, begins at the same address, overlaps it.
    Empty where each tensor is alone."""
    attributes: tuple[tuple[int, str, Any], ...]
    """The attributes that a program put on argument tensors: index of the leaf, name, and a signature of the value, or
    an `Unhashed` with its type if the value cannot be followed."""

    @classmethod
    def of(cls, leaves: Sequence[Any]) -> Aliasing:
        """Return the aliasing of the leaves of a call's arguments; it runs before each replay.

        About 5 µs for 8 tensors (Python 3.12): tensors are compared pair by pair only where memory overlaps.
        """
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        attributes: list[tuple[int, str, Any]] = []
        if any(map(vars, tensors)):
            for place, leaf in enumerate(leaves):
                for name, value in attributes_of(leaf).items() if isinstance(leaf, torch.Tensor) else ():
                    followed = all(isinstance(one, enum.Enum) or type(one) in SCALARS for one in flatten(value)[0])
                    cls_ = type(value)
                    builtin = cls_.__module__ == "builtins"
                    type_name = cls_.__name__ if builtin else f"{cls_.__module__}.{cls_.__qualname__}"
                    attributes.append((place, name, signature((value,), {}) if followed else Unhashed(type_name)))
        return cls(shared(tensors) if len(tensors) > 1 else (), tuple(attributes))

    def obstacle(self, names: Sequence[str]) -> Obstacle | None:
        """Return the obstacle of an attribute whose value cannot be followed, if there is one.

        Args:
            names: of the leaves, as a user knows them.
        """
        for place, name, value in self.attributes:
            if isinstance(value, Unhashed):
                what = f"argument {names[place]} has an attribute {name}, {with_article(value.type_name)}"
                return Obstacle(
                    f"{what}, whose value a recording would freeze",
                    "pass it as an argument of its own, or leave it out of the tensor; numbers and texts may stay",
                )
        return None

    def values(self) -> dict[tuple[int, str], Any]:
        """Return the value of each attribute."""
        return {(place, name): value for place, name, value in self.attributes}


def shared(tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int, int], ...]:
    """Return for each tensor the first tensor that is the same, begins at the same address, overlaps it, as indices.

    Empty if each tensor is alone. Parts of one memory that do not overlap (the gradients of a flat buffer) are alone.
    """
    spans = [*map(_span, tensors)]
    end = 0
    for begins, ends in sorted(spans):
        if begins < end or not ends:
            break
        end = ends
    else:
        return ()
    regions, region, end = [0] * len(tensors), 0, 0
    for place in sorted(range(len(tensors)), key=spans.__getitem__):
        begins, ends = spans[place]
        region = begins if begins >= end else region
        regions[place], end = region, max(end, ends)
    columns = []
    for values in ([*map(id, tensors)], [begins for begins, _ in spans], regions):
        first: dict[int, int] = {}  # 0 is no address, and equal to none
        columns.append([first.setdefault(value, place) if value else place for place, value in enumerate(values)])
    relations = [*zip(*columns, strict=True)]
    return tuple(relations) if any(one != (place,) * 3 for place, one in enumerate(relations)) else ()


class Regions:
    """The memory of some tensors, as regions in which other tensors are looked up.

    Args:
        tensors: the tensors; those without an address have no region.
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
        """Return for each leaf the number of the region that it has memory in; -1 if it has none in any."""
        return [self._of(leaf) if isinstance(leaf, torch.Tensor) else -1 for leaf in leaves]

    def _of(self, tensor: torch.Tensor) -> int:
        begins, ends = _span(tensor)
        last = bisect.bisect_left(self._begins, ends) - 1
        return last if last >= 0 and self._ends[last] > begins else -1


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses where a tensor's memory begins and ends; twice 0 if it has none with an address."""
    try:
        begins = tensor.data_ptr()
        if not begins:
            return 0, 0
        size = tensor.nbytes if tensor.is_contiguous() else span_of(tensor) * tensor.element_size()
    except (RuntimeError, NotImplementedError):  # sparse tensors, and wrapper subclasses without memory
        return 0, 0
    return begins, begins + size
