"""The shape census: which inputs a run's steps see, how often, and which of their dimensions vary."""

from __future__ import annotations

import collections
import dataclasses
import numbers
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hotloop.measure.tree import Structure, flatten, names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_VALUES = frozenset({bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout})
_FLAGS = frozenset({bool, type(None)})


class Signature(NamedTuple):
    """The signature of a step's inputs: structure, each tensor's metadata, each other leaf's type and value.

    Inputs of equal signatures may be run by one graph, unless a leaf is ``Unhashed``.
    """

    structure: Structure
    leaves: tuple[Any, ...]

    @property
    def exact(self) -> bool:
        """Whether equal signatures mean equal values of everything that is no tensor."""
        return not any(isinstance(leaf, Unhashed) for leaf in self.leaves)

    def tensors(self) -> tuple[Any, ...]:
        """Return shape and dtype of each tensor: what calls take equally long by, whatever numbers they are handed."""
        return tuple([(leaf.shape, leaf.dtype) for leaf in self.leaves if type(leaf) is TensorMeta])

    def require_gradients(self) -> bool:
        """Return whether an argument is a tensor that requires gradients."""
        return any(type(leaf) is TensorMeta and leaf.requires_grad for leaf in self.leaves)

    def but_for_flags(self, other: Signature) -> bool:
        """Return whether another call differs in nothing but arguments that are True, False or None."""
        if self.structure != other.structure:
            return False
        differing = [pair for pair in zip(self.leaves, other.leaves, strict=True) if pair[0] != pair[1]]
        return all(type(leaf) is tuple and leaf[0] in _FLAGS for pair in differing for leaf in pair)

    def unhashed(self) -> dict[str, str]:
        """Return the type of each leaf whose value cannot be compared, by the leaf's name."""
        pairs = zip(self.names(), self.leaves, strict=True)
        return {name: leaf.type_name for name, leaf in pairs if isinstance(leaf, Unhashed)}

    def objects(self) -> dict[int, tuple[type, Any]]:
        """Return type and stand-in of each leaf that compares by identity alone, by its place."""
        places = enumerate(self.leaves)
        return {place: leaf for place, leaf in places if type(leaf) is tuple and leaf[0].__eq__ is object.__eq__}

    def values(self) -> dict[int, tuple[type, Any]]:
        """Return type and value of each leaf that is no tensor, by its place; without True, False and None."""
        places = enumerate(self.leaves)
        return {place: leaf for place, leaf in places if type(leaf) is tuple and leaf[0] not in _FLAGS}

    def names(self) -> list[str]:
        """Name each leaf as the step's author would: ``args[0]``, or a keyword with the path inside it."""
        paths = names(self.structure)
        return ["args" + path[3:] if path.startswith("[0]") else path[3:].removeprefix(".") for path in paths]

    def sizes(self) -> Iterator[tuple[tuple[str, int], int]]:
        """Yield the size of each tensor's dimensions, by input name and dimension."""
        for name, leaf in zip(self.names(), self.leaves, strict=True):
            if isinstance(leaf, TensorMeta):
                for dim, size in enumerate(leaf.shape):
                    yield (name, dim), size

    def __str__(self) -> str:
        return ", ".join(f"{name} {_text(leaf)}" for name, leaf in zip(self.names(), self.leaves, strict=True))


class Unhashed(NamedTuple):
    """A leaf whose value cannot be compared (a numpy array, a set): only the name of its type is known."""

    type_name: str


_incomparable: weakref.WeakSet[type] = weakref.WeakSet()
"""Types whose ``==`` has failed, so that their objects are ``Unhashed`` from then on."""


class _ExactText(str):
    """The text of a value whose ``==`` is too coarse, like 0j and -0j, or two ranges of the same numbers."""

    __slots__ = ()
    __repr__ = str.__str__


class _WithOwnEq:
    """An object whose class defines ``==``. Where the user's ``==`` returns neither yes nor no, it counts as unequal.

    Two objects that are equal and hold other values (a task that compares by its name, and has a weight) are unequal.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _WithOwnEq):
            return False
        try:
            return self.value is other.value or (bool(self.value == other.value) and self._same_attributes(other.value))
        except Exception:  # noqa: BLE001 - the object compares arrays, say, which is no reason for a run to end
            _incomparable.update((type(self.value), type(other.value)))
            return False

    def _same_attributes(self, other: Any) -> bool:
        ours, theirs = getattr(self.value, "__dict__", {}), getattr(other, "__dict__", {})
        return ours.keys() == theirs.keys() and all(self._alike(value, theirs[key]) for key, value in ours.items())

    @staticmethod
    def _alike(value: Any, other: Any) -> bool:
        """Return whether two attributes are the same object, or equal by an ``==`` of their own class."""
        if value is other:
            return True
        cls: Any = type(value)
        compares: Any = cls.__eq__
        if cls is not type(other) or isinstance(value, torch.Tensor) or compares is object.__eq__:
            return False
        return bool(_WithOwnEq(value) == _WithOwnEq(other) if hasattr(value, "__dict__") else value == other)


class TensorMeta(NamedTuple):
    """A tensor as a compiler sees it.

    ``memory`` is None where the tensor is contiguous, else its strides, or its layout where it has no strides (sparse).
    ``subclass`` is None for a plain tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    memory: tuple[int, ...] | torch.layout | None
    subclass: type | None


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Return the signature of a step's inputs: a hashable value that holds no tensor.

    It runs at every step, and takes about 6 µs for 5 tensors, hashing included (Python 3.11, AMD EPYC). So each type is
    inspected only once (a cache in ``tree``), nothing is formatted, contiguous tensors have no strides, and values stay
    as torch holds them. Numbers carry their type, since 1, 1.0 and True compare equal. Floats are their bits, since NaN
    is unequal to itself, and -0.0 equal to 0.0.
    """
    leaves, structure = flatten((tuple(args), kwargs if type(kwargs) is dict else dict(kwargs)))
    return Signature(structure, tuple([_leaf(leaf) for leaf in leaves]))


def _leaf(leaf: Any) -> Any:
    cls = type(leaf)
    if isinstance(leaf, torch.Tensor):
        memory: tuple[int, ...] | torch.layout | None = None
        if leaf.layout is not torch.strided:
            memory = leaf.layout
        elif not leaf.is_contiguous():
            memory = leaf.stride()
        return TensorMeta(
            leaf.shape,
            leaf.dtype,
            leaf.device,
            leaf.requires_grad,
            memory,
            None if cls is torch.Tensor else cls,
        )
    if cls is float:
        return cls, leaf.hex()
    if cls in _VALUES:
        return cls, leaf
    try:
        hash(leaf)
    except Exception:  # noqa: BLE001 - TypeError where there is none; a user's own may raise anything
        return Unhashed(f"{cls.__module__}.{cls.__qualname__}")
    return Unhashed(f"{cls.__module__}.{cls.__qualname__}") if cls in _incomparable else (cls, _stand_in(leaf))


def _stand_in(leaf: Any) -> Any:
    """Return what stands for a value in a signature.

    An object that compares by identity is held weakly, so that a batch, say, does not stay alive.
    """
    cls: Any = type(leaf)
    if cls in (complex, range) or (cls.__module__ == "numpy" and isinstance(leaf, numbers.Number)):
        return _ExactText(repr(leaf))
    if cls is frozenset:
        return frozenset([(type(member), member) for member in leaf])  # 1, 1.0 and True compare equal
    if cls.__module__ == "builtins" or isinstance(leaf, type):  # functions and classes among them
        return leaf
    if cls.__eq__ is not object.__eq__:
        return _WithOwnEq(leaf)
    try:
        return weakref.ref(leaf)
    except TypeError:
        return leaf


def _text(leaf: Any) -> str:
    if isinstance(leaf, TensorMeta):
        where = "" if leaf.device.type == "cpu" else f" {leaf.device}"
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}{where}"
    if isinstance(leaf, Unhashed):
        return leaf.type_name
    cls, value = leaf
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, _WithOwnEq):
        value = value.value
    return repr(float.fromhex(value) if cls is float else value)


@dataclasses.dataclass(frozen=True)
class VaryingDim:
    """A dimension of an input that had several sizes."""

    name: str
    dim: int
    least: int
    most: int
    distinct: int


class Census:
    """A counter of signatures in bounded memory.

    Args:
        limit: how many signatures are counted each; of later ones only the steps are counted.

    Attributes:
        steps: how many were counted.
        counts: of each signature, in the order in which they came first.
    """

    def __init__(self, limit: int = 256) -> None:
        self.steps = 0
        self.counts: dict[Signature, int] = {}
        self._first: dict[Signature, int] = {}
        self._limit = limit

    def note(self, inputs: Signature) -> None:
        """Count one step's signature."""
        if inputs in self.counts or len(self.counts) < self._limit:
            self.counts[inputs] = self.counts.get(inputs, 0) + 1
            self._first.setdefault(inputs, self.steps)
        self.steps += 1

    def new_in_last(self, steps: int) -> int:
        """Count the signatures that came for the first time in the last steps."""
        return sum(first >= self.steps - steps for first in self._first.values())

    def varying_dims(self) -> list[VaryingDim]:
        """List each dimension that had more than one size, by input name and dimension."""
        found = collections.defaultdict[tuple[str, int], set[int]](set)
        for inputs in self.counts:
            for place, size in inputs.sizes():
                found[place].add(size)
        pairs = [(place, sizes) for place, sizes in found.items() if len(sizes) > 1]
        return [VaryingDim(*place, min(sizes), max(sizes), len(sizes)) for place, sizes in pairs]

    def to_dict(self) -> dict[str, Any]:
        """Return the census as plain JSON data, for the run record; with the ten most frequent signatures."""
        frequent = sorted(self.counts.items(), key=lambda item: -item[1])[:10]
        return {
            "steps": self.steps,
            "signatures": len(self.counts),
            "untracked_steps": self.steps - sum(self.counts.values()),
            "frequent": [
                {"inputs": str(inputs), "count": count, "first": self._first[inputs]} for inputs, count in frequent
            ],
            "varying_dims": [dataclasses.asdict(dim) for dim in self.varying_dims()],
        }
