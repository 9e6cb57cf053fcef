"""Takes nested arguments apart into leaves and a hashable structure, and puts them together again.

Tuples, lists and dicts are containers, as are named tuples, dataclasses and mappings like transformers' BatchEncoding
and ModelOutput; each is rebuilt as its own type. All else is a leaf: tensors, None, numbers, modules, sets.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch

Structure = Hashable
"""Where the leaves stand: compares and hashes by containers' types, their keys, and their order."""

# A container is (type, keys, structures of its children); a leaf is this.
_LEAF = "leaf"
_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)

_Split = Callable[[Any], tuple[Hashable, Iterable[Any]]]
_Join = Callable[[Any, Any, list[Any]], Any]
_Name = Callable[[Any], Iterator[str]]


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Take a value apart: its leaves from left to right, and the structure that ``unflatten`` takes.

    A dict keeps its own order, so two dicts with the same keys in another order have different structures. What a
    mapping carries besides its items and is neither tensor nor plain value (the encodings of a BatchEncoding) travels
    in the structure but does not count in its comparison.
    """
    leaves: list[Any] = []
    return leaves, _take_apart(value, leaves)


def _take_apart(value: Any, leaves: list[Any]) -> Structure:
    kind = _kind(type(value))
    if kind is None:
        leaves.append(value)
        return _LEAF
    keys, children = kind.split(value)
    return type(value), keys, tuple([_take_apart(child, leaves) for child in children])


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
    kind = _kind(cls)
    assert kind is not None
    return kind.join(cls, keys, [_put_together(part, leaves) for part in parts])


def count(structure: Structure) -> int:
    """Give the number of leaves that a structure holds."""
    return 1 if structure == _LEAF else sum(count(part) for part in cast("tuple[Any, ...]", structure)[2])


def names(structure: Structure, prefix: str = "") -> list[str]:
    """Give each leaf's path, for people: ``[0].input_ids`` is the item ``input_ids`` of the first entry."""
    if structure == _LEAF:
        return [prefix]
    cls, keys, parts = cast("tuple[type, Any, tuple[Structure, ...]]", structure)
    steps = zip(_steps(cls, keys, parts), parts, strict=True)
    return [name for step, part in steps for name in names(part, prefix + step)]


def _steps(cls: type, keys: Any, parts: Sequence[Structure]) -> Iterable[str]:
    kind = _kind(cls)
    assert kind is not None
    return kind.name(keys) if kind.name else (f"[{place}]" for place in range(len(parts)))


def untracked_attributes(structure: Structure) -> list[tuple[str, Any]]:
    """Give what travels in a structure beside its leaves, each with its path: the same object in each copy."""
    return list(_untracked_attributes(structure, ""))


def _untracked_attributes(structure: Structure, prefix: str) -> Iterator[tuple[str, Any]]:
    if structure == _LEAF:
        return
    cls, keys, parts = cast("tuple[type, Any, tuple[Structure, ...]]", structure)
    if isinstance(keys, _Keys):
        yield from ((f"{prefix}.{name}", value) for name, value in keys.aside.attributes.items())
    for step, part in zip(_steps(cls, keys, parts), parts, strict=True):
        yield from _untracked_attributes(part, prefix + step)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How containers of a type come apart, are put together, and name their children (None: by number)."""

    split: _Split
    join: _Join
    name: _Name | None = None


class _Aside:
    """Attributes that travel with a structure without counting in its comparison."""

    __slots__ = ("attributes",)

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Aside)

    def __hash__(self) -> int:
        return 0


class _OfTypes(tuple[Any, ...]):
    """Keys that compare with their types: 1, 1.0 and True are equal, and a step may ask which."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is _OfTypes and tuple.__eq__(self, other) and [*map(type, self)] == [*map(type, other)]

    __hash__ = tuple.__hash__


def _told_apart(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    return keys if {*map(type, keys)} <= _TEXT else _OfTypes(keys)


_TEXT = frozenset({str})


@dataclasses.dataclass(frozen=True)
class _Keys:
    """The children of an instance: its items, then attributes; and attributes that are items too (ModelOutput)."""

    items: tuple[Any, ...]
    attributes: tuple[str, ...]
    mirrored: tuple[str, ...] = ()
    aside: _Aside = dataclasses.field(default_factory=lambda: _Aside({}))
    factory: Any = None


def _find_kind(cls: type) -> _Kind | None:
    """Give how a type is handled, None for leaves."""
    if cls in _EXACT:
        return _EXACT[cls]
    if issubclass(cls, (torch.Tensor, torch.nn.Module, torch.Size)):
        return None
    for base, kind in _SUBCLASSED:
        if issubclass(cls, base):
            return kind
    return _Kind(_split_fields, _join_fields, _name_keys) if dataclasses.is_dataclass(cls) else None


# Looked up once a type, as it runs at every step; bounded, since classes made in a trial function would stay for good.
_kind: Callable[[type], _Kind | None] = functools.lru_cache(maxsize=512)(_find_kind)


def _join_tuple(cls: Any, _keys: Any, children: list[Any]) -> Any:
    # A structseq (torch.return_types.max) allows only its own constructor, which takes a sequence; a named tuple's
    # takes its fields one by one.
    return tuple.__new__(cls, children) if hasattr(cls, "_fields") or not hasattr(cls, "n_fields") else cls(children)


def _name_tuple(keys: Any) -> Iterator[str]:
    return (f".{key}" for key in keys)


def _split_tuple(value: Any) -> tuple[Hashable, Iterable[Any]]:
    return getattr(value, "_fields", None) or tuple(f"{place}" for place in range(len(value))), value


def _join_list(cls: Any, _keys: Any, children: list[Any]) -> Any:
    made = cls.__new__(cls)
    list.extend(made, children)
    return made


def _name_item(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _name_dict(keys: Any) -> Iterator[str]:
    return map(_name_item, keys)


def _name_keys(keys: _Keys) -> Iterator[str]:
    yield from map(_name_item, keys.items)
    yield from (f".{name}" for name in keys.attributes)


def _split_fields(value: Any) -> tuple[Hashable, Iterable[Any]]:
    """A dataclass's children are its fields, those without init and unset ones too as far as they are there."""
    fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    others, aside = _attributes(value, set(fields))
    found = (*fields, *others)
    return _Keys((), found, aside=aside), [getattr(value, name) for name in found]


def _join_fields(cls: Any, keys: _Keys, children: list[Any]) -> Any:
    made = cls.__new__(cls)
    _set(made, {**keys.aside.attributes, **dict(zip(keys.attributes, children, strict=True))})
    return made


def _split_mapping(value: Any) -> tuple[Hashable, Iterable[Any]]:
    """A mapping's children are its items, then attributes that hold tensors or plain values."""
    held = getattr(value, "__dict__", {})
    # Past keys() and [] of the class itself, which may hide or convert: UserDict's data, dict's own items.
    items = dict(value.data) if isinstance(value, collections.UserDict) else dict(dict.items(value))
    mirrored = tuple(name for name in held if name in items and held[name] is items[name])
    others, aside = _attributes(value, {"data", *mirrored} if "data" not in items else set(mirrored))
    keys = _Keys(_told_apart(tuple(items)), others, mirrored, aside, getattr(value, "default_factory", None))
    return keys, [*items.values(), *(held[name] for name in others)]


def _join_mapping(cls: Any, keys: _Keys, children: list[Any]) -> Any:
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
    _set(made, {**keys.aside.attributes, **attributes, **{name: items[name] for name in keys.mirrored}})
    return made


def _attributes(value: Any, known: set[str]) -> tuple[tuple[str, ...], _Aside]:
    """Give the names of further attributes that count, and those that only travel along."""
    counted, aside = [], {}
    for name, held in getattr(value, "__dict__", {}).items():
        if name in known:
            continue
        leaves, _ = flatten(held)
        if all(isinstance(leaf, _PLAIN) for leaf in leaves):
            counted.append(name)
        else:
            aside[name] = held
    return tuple(counted), _Aside(aside)


def _set(made: Any, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        object.__setattr__(made, name, value)  # a frozen dataclass, and ModelOutput, refuse or react to setattr


_EXACT: dict[type, _Kind] = {
    tuple: _Kind(lambda value: (None, value), lambda _cls, _keys, children: tuple(children)),
    list: _Kind(lambda value: (None, value), lambda _cls, _keys, children: children),
    dict: _Kind(
        lambda value: (_told_apart(tuple(value)), value.values()),
        lambda _cls, keys, children: dict(zip(keys, children, strict=True)),
        _name_dict,
    ),
}
_SUBCLASSED: Sequence[tuple[type, _Kind]] = (
    (tuple, _Kind(_split_tuple, _join_tuple, _name_tuple)),
    (list, _Kind(lambda value: (None, value), _join_list)),
    (dict, _Kind(_split_mapping, _join_mapping, _name_keys)),
    (collections.UserDict, _Kind(_split_mapping, _join_mapping, _name_keys)),
)
