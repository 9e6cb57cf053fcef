"""The shape census: which inputs a run's steps see, how often, and which of their dimensions vary."""

from __future__ import annotations

import collections
import dataclasses
import numbers
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hotloop.errors import ConfigError
from hotloop.measure.buckets import Buckets, bucket_edges
from hotloop.measure.tree import Structure, flatten, names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_VALUES = frozenset({bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.layout})
_EXACT_TEXTS = frozenset({complex, range})
"""Types whose values only their texts tell apart: 0j and -0j, and ranges of the same numbers, are equal."""
_FEW = frozenset({bool, type(None)})
_LISTED = 10  # signatures in the run record, the most frequent first


class Signature(NamedTuple):
    """What tells one step's inputs from another's: structure, each tensor's look, each other leaf's type and value.

    Two equal ones may be run by one graph, unless a leaf is ``Unhashed``.
    """

    structure: Structure
    leaves: tuple[Any, ...]

    @property
    def exact(self) -> bool:
        """Whether equal signatures mean equal values of all that is no tensor."""
        return not any(isinstance(leaf, Unhashed) for leaf in self.leaves)

    def require_gradients(self) -> bool:
        """Tell whether an argument is a tensor that requires gradients."""
        return any(type(leaf) is TensorMeta and leaf.requires_grad for leaf in self.leaves)

    def but_for_flags(self, other: Signature) -> bool:
        """Tell whether another call differs in nothing but arguments that are True, False or None."""
        if self.structure != other.structure:
            return False
        return all(
            one == also or all(type(each) is tuple and each[0] in _FEW for each in (one, also))
            for one, also in zip(self.leaves, other.leaves, strict=True)
        )

    def unhashed(self) -> dict[str, str]:
        """Give the type of each leaf whose value cannot be compared, by the leaf's name."""
        pairs = zip(self.names(), self.leaves, strict=True)
        return {name: leaf.type_name for name, leaf in pairs if isinstance(leaf, Unhashed)}

    def objects(self) -> dict[int, tuple[type, Any]]:
        """Give type and stand-in of each leaf that is told by identity alone, by its place."""
        places = enumerate(self.leaves)
        return {place: leaf for place, leaf in places if type(leaf) is tuple and leaf[0].__eq__ is object.__eq__}

    def values(self) -> dict[int, tuple[type, Any]]:
        """Give what tells each leaf that is no tensor from others, by its place; not where it has but a few values."""
        places = enumerate(self.leaves)
        return {place: leaf for place, leaf in places if type(leaf) is tuple and leaf[0] not in _FEW}

    def names(self) -> list[str]:
        """Name each leaf as the step's author would: ``args[0]``, or a keyword with what is inside it."""
        found = names(self.structure)
        return ["args" + name[3:] if name.startswith("[0]") else name[3:].removeprefix(".") for name in found]

    def __str__(self) -> str:
        return ", ".join(f"{name} {_text(leaf)}" for name, leaf in zip(self.names(), self.leaves, strict=True))


class Unhashed(NamedTuple):
    """A leaf whose value cannot be compared (a numpy array, a set): known by its type's name alone."""

    type_name: str


_incomparable: weakref.WeakSet[type] = weakref.WeakSet()
"""Types whose ``==`` was seen to fail, so that their objects are ``Unhashed`` from then on."""


class _Exactly(str):
    """The text that stands for a value."""

    __slots__ = ()
    __repr__ = str.__str__


class _Own:
    """An object with an ``==`` of its own, which is the user's: where that gives no yes or no, it is unequal.

    Two that are equal and hold other values (a task that is equal by its name, and has a weight) are told apart.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash(self.value)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Own):
            return False
        try:
            return self.value is other.value or (bool(self.value == other.value) and self._holds_what(other.value))
        except Exception:  # noqa: BLE001 - it compares arrays, say: no reason for a run to end
            _incomparable.update((type(self.value), type(other.value)))
            return False

    def _holds_what(self, other: Any) -> bool:
        """Tell whether another holds the same attributes: what is no object of a class of its own by ``==``."""
        ours, theirs = getattr(self.value, "__dict__", {}), getattr(other, "__dict__", {})
        return ours.keys() == theirs.keys() and all(_alike(one, theirs[key]) for key, one in ours.items())


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    cls: Any = type(one)
    compares: Any = cls.__eq__
    if cls is not type(other) or isinstance(one, torch.Tensor) or compares is object.__eq__:
        return False
    return bool(_Own(one) == _Own(other) if hasattr(one, "__dict__") else one == other)


class TensorMeta(NamedTuple):
    """A tensor as a compiler sees it.

    ``memory`` is None where it is contiguous, else its strides, or its layout where it has none (sparse); ``subclass``
    is None for a plain tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    memory: tuple[int, ...] | torch.layout | None
    subclass: type | None


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """Give a step's inputs as one hashable value, which holds no tensor.

    It runs at every step, so types are looked at once a type (a cache in ``tree``), nothing is formatted, contiguous
    tensors give no strides, and what is looked up comes as torch holds it. About 6 µs for 5 tensors, hashing included
    (Python 3.11, AMD EPYC). Numbers carry their type, since 1, 1.0 and True compare equal, and floats their bits,
    since NaN does not and -0.0 does.
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
    return Unhashed(f"{cls.__module__}.{cls.__qualname__}") if cls in _incomparable else (cls, _held(leaf))


def _held(leaf: Any) -> Any:
    """Tell a value from others without keeping alive what compares by identity: a batch may be an object of a class."""
    cls: Any = type(leaf)
    if cls in _EXACT_TEXTS or (cls.__module__ == "numpy" and isinstance(leaf, numbers.Number)):
        return _Exactly(repr(leaf))
    if cls is frozenset:
        return frozenset([(type(one), one) for one in leaf])  # 1, 1.0 and True compare equal
    if cls.__module__ == "builtins" or isinstance(leaf, type):  # functions and classes among them
        return leaf
    if cls.__eq__ is not object.__eq__:
        return _Own(leaf)
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
    if isinstance(value, _Own):
        value = value.value
    return repr(float.fromhex(value) if cls is float else value)


@dataclasses.dataclass(slots=True)
class Seen:
    """How a signature stands: times seen, the step (from 0) that saw it first, and its share of all steps.

    ``tracked`` is false for one that came when the census was full: its count is not known, and given as 1.
    """

    count: int
    first: int
    share: float
    tracked: bool

    @property
    def new(self) -> bool:
        """Whether this was the first time, as far as is known."""
        return self.count == 1


@dataclasses.dataclass(frozen=True)
class VaryingDim:
    """A dimension of an input that had several sizes."""

    name: str
    dim: int
    least: int
    most: int
    distinct: int


@dataclasses.dataclass(slots=True)
class _Entry:
    count: int
    first: int


class Census:
    """Counts signatures in bounded memory.

    Args:
        limit: how many signatures are counted one by one; later ones are counted together, and their sizes kept.
    """

    def __init__(self, limit: int = 256) -> None:
        if limit < 1:
            raise ConfigError(f"limit={limit}: a census needs room for at least 1 signature")
        self.steps = 0
        self.untracked = 0
        self._limit = limit
        self._entries: dict[Signature, _Entry] = {}
        self._untracked_at: collections.deque[int] = collections.deque(maxlen=limit)
        self._untracked_sizes: dict[tuple[str, int], dict[int, int]] = {}

    def note(self, inputs: Signature) -> Seen:
        """Count one step's signature."""
        step, self.steps = self.steps, self.steps + 1
        entry = self._entries.get(inputs)
        if entry is not None:
            entry.count += 1
        elif len(self._entries) < self._limit:
            entry = self._entries[inputs] = _Entry(1, step)
        else:
            self._note_untracked(inputs, step)
            return Seen(1, step, 1 / self.steps, tracked=False)
        return Seen(entry.count, entry.first, entry.count / self.steps, tracked=True)

    def _note_untracked(self, inputs: Signature, step: int) -> None:
        self.untracked += 1
        self._untracked_at.append(step)
        for place, size in _sizes(inputs):
            sizes = self._untracked_sizes.setdefault(place, {}) if self._has_room(place) else {}
            if size in sizes or len(sizes) < self._limit * 16:
                sizes[size] = sizes.get(size, 0) + 1

    def _has_room(self, place: tuple[str, int]) -> bool:
        return place in self._untracked_sizes or len(self._untracked_sizes) < self._limit

    def seen(self, inputs: Signature) -> Seen | None:
        """Say how a signature stands without counting it; None for one that is not tracked."""
        entry = self._entries.get(inputs)
        return Seen(entry.count, entry.first, entry.count / self.steps, tracked=True) if entry else None

    def counted(self) -> list[tuple[Signature, int]]:
        """Give each signature that is counted one by one, with its count."""
        return [(inputs, entry.count) for inputs, entry in self._entries.items()]

    def new_in_last(self, steps: int) -> int:
        """Give how many signatures came for the first time in the last steps.

        Those that came when the census was full each count as new, at most ``limit`` of them.
        """
        since = self.steps - steps
        tracked = sum(entry.first >= since for entry in self._entries.values())
        return tracked + sum(step >= since for step in self._untracked_at)

    def sizes(self, name: str, dim: int) -> dict[int, int]:
        """Give how often each size of an input's dimension was seen; ``name`` is as in ``varying_dims``."""
        return dict(self._histograms().get((name, dim), {}))

    def varying_dims(self) -> list[VaryingDim]:
        """Give each dimension that had more than one size, by input name and place."""
        found = self._histograms().items()
        return [VaryingDim(*place, min(sizes), max(sizes), len(sizes)) for place, sizes in found if len(sizes) > 1]

    def suggest_buckets(self, name: str, dim: int, buckets: int, multiple: int = 1) -> Buckets:
        """Give the edges that would waste the least padding on what was seen; ``bucket_edges`` says how.

        Raises:
            ConfigError: no input of that name has that dimension.
        """
        sizes = self.sizes(name, dim)
        if not sizes:
            known = sorted({known for known, _ in self._histograms()})
            raise ConfigError(
                f"no input {name!r} with a dimension {dim} was seen; seen were {', '.join(known) or 'none'}"
            )
        return bucket_edges(sizes, buckets, multiple)

    def _histograms(self) -> dict[tuple[str, int], dict[int, int]]:
        found = {place: dict(sizes) for place, sizes in self._untracked_sizes.items()}
        for inputs, entry in self._entries.items():
            for place, size in _sizes(inputs):
                sizes = found.setdefault(place, {})
                sizes[size] = sizes.get(size, 0) + entry.count
        return found

    def to_dict(self) -> dict[str, Any]:
        """Give the census as plain JSON data, for the run record."""
        frequent = sorted(self._entries.items(), key=lambda item: (-item[1].count, item[1].first))
        return {
            "steps": self.steps,
            "signatures": len(self._entries),
            "untracked_steps": self.untracked,
            "frequent": [
                {"inputs": str(inputs), "count": entry.count, "first": entry.first}
                for inputs, entry in frequent[:_LISTED]
            ],
            "varying_dims": [dataclasses.asdict(dim) for dim in self.varying_dims()],
        }


def _sizes(inputs: Signature) -> Iterator[tuple[tuple[str, int], int]]:
    for name, leaf in zip(inputs.names(), inputs.leaves, strict=True):
        if isinstance(leaf, TensorMeta):
            for dim, size in enumerate(leaf.shape):
                yield (name, dim), size
