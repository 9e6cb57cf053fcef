"""Takes nested arguments apart into leaves and a hashable structure, and puts them together again.

Tuples, lists and dicts are containers, as are named tuples, dataclasses and mappings like transformers' BatchEncoding
and ModelOutput; each is rebuilt as its own type. Everything else is a leaf: tensors, None, numbers, modules, sets.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch

Structure = Hashable
"""Where the leaves stand: compares and hashes by containers' types, their keys, and their order."""

# A container is (type, keys, structures of its children); a leaf is this.
_LEAF = "leaf"
_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Types of leaves that an attribute beside a container's items may hold, to count as leaves themselves."""


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
    places = _count(structure)
    if places != len(given):
        raise ValueError(f"the structure has {places} places for leaves, {len(given)} were given")
    return _put_together(structure, iter(given))


def _put_together(structure: Structure, leaves: Iterator[Any]) -> Any:
    if structure == _LEAF:
        return next(leaves)
    cls, keys, parts = _container(structure)
    return cast("_Kind", _kind(cls)).join(cls, keys, [_put_together(part, leaves) for part in parts])


def _count(structure: Structure) -> int:
    return 1 if structure == _LEAF else sum(map(_count, _container(structure)[2]))


def _container(structure: Structure) -> tuple[type, Any, tuple[Structure, ...]]:
    return cast("tuple[type, Any, tuple[Structure, ...]]", structure)


def names(structure: Structure, prefix: str = "") -> list[str]:
    """Return each leaf's path, for people: ``[0].input_ids`` is the item ``input_ids`` of the first entry."""
    if structure == _LEAF:
        return [prefix]
    return [name for step, part in _children(structure) for name in names(part, prefix + step)]


def untracked_attributes(structure: Structure, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the attributes that travel in a structure beside its leaves, each with its path.

    They are the same objects in each copy that `unflatten` makes.
    """
    if structure == _LEAF:
        return []
    keys = _container(structure)[1]
    own = keys.untracked.items() if isinstance(keys, _Keys) else ()
    found = [(f"{prefix}.{name}", value) for name, value in own]
    for step, part in _children(structure):
        found += untracked_attributes(part, prefix + step)
    return found


def _children(structure: Structure) -> Iterator[tuple[str, Structure]]:
    """Yield the children of a container, each with the step of the path that leads to it."""
    cls, keys, parts = _container(structure)
    if isinstance(keys, _Keys):
        steps = [*map(_item, keys.items), *(f".{name}" for name in keys.attributes)]
    elif keys is None:
        steps = [f"[{place}]" for place in range(len(parts))]
    else:
        steps = [_item(key) if cls is dict else f".{key}" for key in keys]
    return zip(steps, parts, strict=True)


def _item(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


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
    untracked: dict[str, Any] = dataclasses.field(compare=False)
    factory: Any = None


class _Kind(NamedTuple):
    """How containers of a type come apart, into keys and children, and are put together."""

    split: Callable[[Any], tuple[Hashable, Iterable[Any]]]
    join: Callable[[Any, Any, list[Any]], Any]


def _split_named(value: Any) -> tuple[Hashable, Iterable[Any]]:
    return getattr(value, "_fields", None) or tuple(map(str, range(len(value)))), value


def _join_named(cls: Any, _keys: Any, children: list[Any]) -> Any:
    # A structseq (torch.return_types.max) allows only its own constructor, which takes a sequence; a named tuple's
    # takes its fields one by one.
    structseq = hasattr(cls, "n_fields") and not hasattr(cls, "_fields")
    return cls(children) if structseq else tuple.__new__(cls, children)


def _join_list(cls: Any, _keys: Any, children: list[Any]) -> Any:
    made = cls.__new__(cls)
    list.extend(made, children)
    return made


def _split_instance(value: Any) -> tuple[Hashable, Iterable[Any]]:
    """Take apart a mapping with attributes, or a dataclass, whose fields are attributes that always count."""
    held = getattr(value, "__dict__", {})
    items: dict[Any, Any] = {}
    fields: list[str] = []
    # Past keys() and [] of the class itself, which may hide or convert: UserDict's data, dict's own items.
    if isinstance(value, collections.UserDict):
        items = dict(value.data)
    elif isinstance(value, dict):
        items = dict(dict.items(value))
    else:
        fields = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    mirrored = tuple(name for name in held if name in items and held[name] is items[name])
    passed = {*mirrored, *fields, *(["data"] if isinstance(value, collections.UserDict) else [])}
    others = {name: one for name, one in held.items() if name not in passed}
    counted = [name for name, one in others.items() if all(isinstance(leaf, _PLAIN) for leaf in flatten(one)[0])]
    attributes = (*fields, *counted)
    untracked = {name: one for name, one in others.items() if name not in counted}
    keys = _Keys(_comparable(tuple(items)), attributes, mirrored, untracked, getattr(value, "default_factory", None))
    return keys, [*items.values(), *(getattr(value, name) for name in attributes)]


def _join_instance(cls: Any, keys: _Keys, children: list[Any]) -> Any:
    made = cls.__new__(cls)
    items = dict(zip(keys.items, children, strict=False))
    if isinstance(made, collections.UserDict):
        made.data = items
    # A dict subclass's own [] may refuse or convert, and OrderedDict keeps its order beside the dict.
    put: Any = collections.OrderedDict if isinstance(made, collections.OrderedDict) else dict
    for key, value in items.items() if isinstance(made, dict) else ():
        put.__setitem__(made, key, value)
    if isinstance(made, collections.defaultdict):
        made.default_factory = keys.factory
    attributes = dict(zip(keys.attributes, children[len(keys.items) :], strict=True))
    # Past the class's own setattr: a frozen dataclass refuses it, and ModelOutput reacts to it.
    for name, value in {**keys.untracked, **attributes, **{name: items[name] for name in keys.mirrored}}.items():
        object.__setattr__(made, name, value)
    return made


_INSTANCE = _Kind(_split_instance, _join_instance)
_EXACT: dict[type, _Kind] = {
    tuple: _Kind(lambda value: (None, value), lambda _cls, _keys, children: tuple(children)),
    list: _Kind(lambda value: (None, value), lambda _cls, _keys, children: children),
    dict: _Kind(
        lambda value: (_comparable(tuple(value)), value.values()),
        lambda _cls, keys, children: dict(zip(keys, children, strict=True)),
    ),
}
_SUBCLASSED: dict[type, _Kind] = {
    tuple: _Kind(_split_named, _join_named),
    list: _Kind(lambda value: (None, value), _join_list),
    dict: _INSTANCE,
    collections.UserDict: _INSTANCE,
}


# Looked up once per type, as it runs at every step; bounded, since classes that a function makes would stay for good.
@functools.lru_cache(maxsize=512)
def _kind(cls: type) -> _Kind | None:
    """Return how a type is handled, None for leaves."""
    if cls in _EXACT:
        return _EXACT[cls]
    if issubclass(cls, (torch.Tensor, torch.nn.Module, torch.Size)):
        return None
    subclassed = next((kind for base, kind in _SUBCLASSED.items() if issubclass(cls, base)), None)
    return subclassed or (_INSTANCE if dataclasses.is_dataclass(cls) else None)
