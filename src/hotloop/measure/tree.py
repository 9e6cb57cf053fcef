"""Takes nested arguments apart into leaves and a hashable structure, and puts them together again.

Tuples, lists and dicts are containers, as are named tuples, dataclasses and mappings like transformers' BatchEncoding
and ModelOutput; each is rebuilt as its own type. Everything else is a leaf: tensors, None, numbers, modules, sets.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch

Structure = Hashable
"""Where the leaves stand: compares and hashes by containers' types, their keys, and their order."""

# A container is (type, keys, structures of its children); a leaf is this.
_LEAF = "leaf"


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Take a value apart: return its leaves from left to right, and the structure that ``unflatten`` takes.

    A dict keeps its own order, so two dicts with the same keys in another order have different structures. Attributes
    of a mapping that are neither tensors nor plain values (the encodings of a BatchEncoding) travel in the structure,
    but do not count when structures are compared.
    """
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves)


def _take_apart(value: Any, leaves: list[Any]) -> Structure:
    cls: type = type(value)
    kind = _kind(cls)
    if kind is None:
        leaves.append(value)
        return _LEAF
    keys, children = kind.split(value)
    return cls, keys, tuple([_take_apart(child, leaves) for child in children])


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Any:
    """Put leaves back where ``flatten`` found them; containers are new, and of the types that they had.

    Constructors are not called (a dataclass's ``__post_init__`` does not run again): an instance gets the attributes
    that it had, with the new leaves in them.

    Raises:
        ValueError: the structure has more or fewer places than there are leaves.
    """
    given = list(leaves)
    places = count(structure)
    if places != len(given):
        raise ValueError(f"the structure has {places} places for leaves, {len(given)} were given")
    return _put_together(structure, iter(given))


def _put_together(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure == _LEAF:
        return next(leaves)
    cls, keys, parts = cast("tuple[type, Any, tuple[Structure, ...]]", structure)
    return _container(cls).join(cls, keys, [_put_together(part, leaves) for part in parts])


def count(structure: Structure) -> int:
    """Return the number of leaves that a structure holds."""
    return 1 if structure == _LEAF else sum(count(part) for part in cast("tuple[Any, ...]", structure)[2])


def names(structure: Structure, prefix: str = "") -> list[str]:
    """Return each leaf's path, for people: ``[0].input_ids`` is the item ``input_ids`` of the first entry."""
    if structure == _LEAF:
        return [prefix]
    cls, keys, parts = cast("tuple[type, Any, tuple[Structure, ...]]", structure)
    steps = zip(_container(cls).steps(keys, len(parts)), parts, strict=True)
    return [name for step, part in steps for name in names(part, prefix + step)]


def untracked_attributes(structure: Structure, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the attributes that travel in a structure beside its leaves, each with its path.

    They are the same objects in each copy that `unflatten` makes.
    """
    if structure == _LEAF:
        return []
    cls, keys, parts = cast("tuple[type, Any, tuple[Structure, ...]]", structure)
    found: list[tuple[str, Any]] = []
    if isinstance(keys, _Keys):
        found += ((f"{prefix}.{name}", value) for name, value in keys.untracked.attributes.items())
    for step, part in zip(_container(cls).steps(keys, len(parts)), parts, strict=True):
        found += untracked_attributes(part, prefix + step)
    return found


class _Untracked:
    """Attributes that travel with a structure without counting when it is compared."""

    __slots__ = ("attributes",)

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Untracked)

    def __hash__(self) -> int:
        return 0


class _TypedKeys(tuple[Any, ...]):
    """Keys that compare with their types: 1, 1.0 and True are equal, but a step may ask for the type."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is _TypedKeys and tuple.__eq__(self, other) and [*map(type, self)] == [*map(type, other)]

    __hash__ = tuple.__hash__


def _comparable(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return keys if {*map(type, keys)} <= {str} else _TypedKeys(keys)


@dataclasses.dataclass(frozen=True)
class _Keys:
    """The children of an instance: its items, then attributes; and attributes that are items too (ModelOutput)."""

    items: tuple[Any, ...]
    attributes: tuple[str, ...]
    mirrored: tuple[str, ...]
    untracked: _Untracked
    factory: Any = None


class _Container:
    """The way that containers of a type come apart, are put together, and name their children; here a plain tuple."""

    def split(self, value: Any) -> tuple[Hashable, Iterable[Any]]:
        """Return what tells the container from others of its type, and its children."""
        return None, value

    def join(self, _cls: Any, _keys: Any, children: list[Any]) -> Any:
        """Make a container of a type from what `split` returned."""
        return tuple(children)

    def steps(self, _keys: Any, length: int) -> Iterable[str]:
        """Name the path from the container to each child."""
        return (f"[{place}]" for place in range(length))


class _TupleSubclass(_Container):
    def split(self, value: Any) -> tuple[Hashable, Iterable[Any]]:
        return getattr(value, "_fields", None) or tuple(f"{place}" for place in range(len(value))), value

    def join(self, cls: Any, _keys: Any, children: list[Any]) -> Any:
        # A structseq (torch.return_types.max) allows only its own constructor, which takes a sequence; a named tuple's
        # takes its fields one by one.
        return (
            tuple.__new__(cls, children) if hasattr(cls, "_fields") or not hasattr(cls, "n_fields") else cls(children)
        )

    def steps(self, keys: Any, _length: int) -> Iterable[str]:
        return (f".{key}" for key in keys)


class _List(_Container):
    def join(self, cls: Any, _keys: Any, children: list[Any]) -> Any:
        if cls is list:
            return children
        made = cls.__new__(cls)
        list.extend(made, children)
        return made


class _Dict(_Container):
    def split(self, value: Any) -> tuple[Hashable, Iterable[Any]]:
        return _comparable(tuple(value)), value.values()

    def join(self, _cls: Any, keys: Any, children: list[Any]) -> Any:
        return dict(zip(keys, children, strict=True))

    def steps(self, keys: Any, _length: int) -> Iterable[str]:
        return (f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]" for key in keys)


class _Dataclass(_Container):
    """Children are the fields, those without init and unset ones too as far as they are there, then attributes."""

    def split(self, value: Any) -> tuple[Hashable, Iterable[Any]]:
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        others, untracked = self.attributes(value, set(fields))
        names = (*fields, *others)
        return _Keys((), names, (), untracked), [getattr(value, name) for name in names]

    def join(self, cls: Any, keys: _Keys, children: list[Any]) -> Any:
        made = cls.__new__(cls)
        self.set(made, {**keys.untracked.attributes, **dict(zip(keys.attributes, children, strict=True))})
        return made

    def steps(self, keys: _Keys, _length: int) -> Iterable[str]:
        return (*_DICT.steps(keys.items, 0), *(f".{name}" for name in keys.attributes))

    @staticmethod
    def attributes(value: Any, known: set[str]) -> tuple[tuple[str, ...], _Untracked]:
        """Return the names of further attributes that hold tensors or plain values, and all others."""
        plain = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
        counted, untracked = [], {}
        for name, held in getattr(value, "__dict__", {}).items():
            if name in known:
                continue
            if all(isinstance(leaf, plain) for leaf in flatten(held)[0]):
                counted.append(name)
            else:
                untracked[name] = held
        return tuple(counted), _Untracked(untracked)

    @staticmethod
    def set(made: Any, attributes: dict[str, Any]) -> None:
        """Set attributes past the class's own setattr: a frozen dataclass refuses it, and ModelOutput reacts to it."""
        for name, value in attributes.items():
            object.__setattr__(made, name, value)


class _Mapping(_Dataclass):
    """Children are the items, then attributes that hold tensors or plain values."""

    def split(self, value: Any) -> tuple[Hashable, Iterable[Any]]:
        held = getattr(value, "__dict__", {})
        # Past keys() and [] of the class itself, which may hide or convert: UserDict's data, dict's own items.
        items = dict(value.data) if isinstance(value, collections.UserDict) else dict(dict.items(value))
        mirrored = tuple(name for name in held if name in items and held[name] is items[name])
        known = set(mirrored) if "data" in items else {"data", *mirrored}
        others, untracked = self.attributes(value, known)
        factory = getattr(value, "default_factory", None)
        keys = _Keys(_comparable(tuple(items)), others, mirrored, untracked, factory)
        return keys, [*items.values(), *(held[name] for name in others)]

    def join(self, cls: Any, keys: _Keys, children: list[Any]) -> Any:
        items = dict(zip(keys.items, children[: len(keys.items)], strict=True))
        attributes = dict(zip(keys.attributes, children[len(keys.items) :], strict=True))
        made = cls.__new__(cls)
        if isinstance(made, collections.UserDict):
            made.data = items
        else:
            # A dict subclass's own [] may refuse or convert, and OrderedDict keeps its order beside the dict.
            put = collections.OrderedDict.__setitem__ if isinstance(made, collections.OrderedDict) else dict.__setitem__
            for key, value in items.items():
                put(made, key, value)
            if isinstance(made, collections.defaultdict):
                made.default_factory = keys.factory
        self.set(made, {**keys.untracked.attributes, **attributes, **{name: items[name] for name in keys.mirrored}})
        return made


_DICT = _Dict()
_EXACT: dict[type, _Container] = {tuple: _Container(), list: _List(), dict: _DICT}
_SUBCLASSED: Sequence[tuple[type, _Container]] = (
    (tuple, _TupleSubclass()),
    (list, _List()),
    (dict, _Mapping()),
    (collections.UserDict, _Mapping()),
)


# Looked up once per type, as it runs at every step; bounded, since classes that a function makes would stay for good.
@functools.lru_cache(maxsize=512)
def _kind(cls: type) -> _Container | None:
    """Return how a type is handled, None for leaves."""
    if cls in _EXACT:
        return _EXACT[cls]
    if issubclass(cls, (torch.Tensor, torch.nn.Module, torch.Size)):
        return None
    for base, kind in _SUBCLASSED:
        if issubclass(cls, base):
            return kind
    return _Dataclass() if dataclasses.is_dataclass(cls) else None


def _container(cls: type) -> _Container:
    kind = _kind(cls)
    assert kind is not None
    return kind
