"""Plain values to typed settings: unknown keys, wrong types and ranges, all named at once with what was expected."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from hotloop.errors import ConfigError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str], *, count: int = 3, prefix: str = "") -> str:
    """Say "did you mean" with the nearest known names, or list them all where none is near and they are few.

    What all names begin with, a ``prefix``, makes no two of them near.
    """
    known = sorted(known)
    leaf = {one: one.rsplit(".", 1)[-1] for one in known}
    near = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    near += [one for one, last in leaf.items() if last == name.rsplit(".", 1)[-1] and one not in near]
    if near:
        return f"did you mean {' or '.join(prefix + one for one in near[:count])}?"
    few = len(known) <= 12 or prefix  # noqa: PLR2004 - as many as a line holds
    return f"expected one of {', '.join(prefix + one for one in known)}" if few else "docs/settings.md lists all"


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make the settings of plain values.

    Raises:
        ConfigError: listing every setting that is unknown, missing, of a wrong type or out of its range.
    """
    coercion = _Coercion(list(keys(cls)))
    settings = coercion.dataclass(cls, values, "")
    if coercion.problems:
        raise ConfigError("\n".join(coercion.problems))
    return cast("T", settings)


def keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings of a dataclass; an open mapping (``compile.components``) is one name."""
    for name, kind in typing.get_type_hints(cls).items() if dataclasses.is_dataclass(cls) else ():
        yield prefix + name
        if dataclasses.is_dataclass(kind):
            yield from keys(cast("type", kind), f"{prefix}{name}.")


def kind_at(cls: type, path: str) -> Any:
    """Return the type of the setting at a dotted name, through open mappings too; None where there is none."""
    kind: Any = cls
    for part in path.split("."):
        if dataclasses.is_dataclass(kind):
            kind = typing.get_type_hints(kind).get(part)
        elif get_origin(kind) is Mapping:
            kind = get_args(kind)[1]
        elif kind is not Any:
            return None
    return kind


def limits_at(cls: type, path: str) -> Mapping[str, Any]:
    """Return the range of the setting at a dotted name, as its field states it."""
    parent, _, name = path.rpartition(".")
    kind = kind_at(cls, parent) if parent else cls
    fields = {one.name: one.metadata for one in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else {}
    return fields.get(name, {})


def problem(cls: type, path: str, value: Any) -> str:
    """Say why a value cannot be that of the setting at a dotted name; empty where it can."""
    coercion = _Coercion([])
    coercion.value(kind_at(cls, path), value, path, limits_at(cls, path))
    return "; ".join(coercion.problems)


class _Coercion:
    """One pass over a tree of values, collecting what does not fit.

    Args:
        known: the names of all settings, for "did you mean".
    """

    def __init__(self, known: list[str]) -> None:
        self.known = known
        self.problems: list[str] = []

    def dataclass(self, cls: Any, values: Any, path: str) -> Any:
        """Make a dataclass of a mapping; ``path`` is its dotted name with a dot at the end, or empty."""
        if not isinstance(values, Mapping):
            example = f"such as {path}{next(iter(typing.get_type_hints(cls)))}=..."
            self.problems.append(f"{path.rstrip('.')}={_shown(values)}: expected settings below it, {example}")
            return None
        hints = typing.get_type_hints(cls)
        fields = {one.name: one for one in dataclasses.fields(cls)}
        for name in values:
            if name not in fields:
                self.problems.append(f"unknown setting {path}{name}: {nearest(f'{path}{name}', self.known)}")
        made = {}
        for name, one in fields.items():
            if name in values:
                made[name] = self.value(hints[name], values[name], path + name, one.metadata)
            elif one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
                self.problems.append(f"{path}{name} is not set: expected {describe(hints[name], one.metadata)}")
        # With a problem found the whole is never used, and checks across settings would only stumble over the gap.
        return None if self.problems else cls(**made)

    def value(self, kind: Any, value: Any, path: str, limits: Mapping[str, Any]) -> Any:
        """Make a value of a type, which may be a dataclass or a mapping itself."""
        if dataclasses.is_dataclass(kind):
            return self.dataclass(kind, value, f"{path}.")
        if get_origin(kind) is Mapping:
            return self.mapping(get_args(kind)[1], value, path)
        for member in members(kind):
            fits, converted = _fit(member, value, limits)
            if fits:
                return converted
        self.problems.append(f"{path}={_shown(value)}: expected {describe(kind, limits)}")
        return None

    def mapping(self, item: Any, value: Any, path: str) -> Any:
        """Make an open mapping, whose names are the user's."""
        if not isinstance(value, Mapping):
            self.problems.append(f"{path}={_shown(value)}: expected a mapping, such as {path}.<name>=<value>")
            return None
        if item is Any:
            return dict(value)
        self.known += [f"{path}.{name}.{one}" for name in value for one in keys(item)]
        return {str(name): self.value(item, one, f"{path}.{name}", {}) for name, one in value.items()}


def members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fit(kind: Any, value: Any, limits: Mapping[str, Any]) -> tuple[bool, Any]:
    """Say whether a value is of a simple type and in range, and give it as that type."""
    if get_origin(kind) is Literal:
        return value in get_args(kind) and not isinstance(value, bool), value
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            return False, None
        parts = [_fit(get_args(kind)[0], one, limits) for one in value]
        return all(fits for fits, _ in parts), tuple(one for _, one in parts)
    plain = get_origin(kind) or kind
    if plain in (Any, types.NoneType, bool, str, Mapping):
        return plain is Any or isinstance(value, plain), value
    if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
        return False, None
    return _in_range(value, limits), kind(value)


def _in_range(value: float, limits: Mapping[str, Any]) -> bool:
    low, high = limits.get("low"), limits.get("high")
    above = low is None or (value > low if limits.get("open_low") else value >= low)
    return above and (high is None or value <= high) and value == value and abs(value) != float("inf")  # noqa: PLR0124


def describe(kind: Any, limits: Mapping[str, Any]) -> str:
    """Say in words what a setting may be: "an integer of at least 1, or null"."""
    return ", or ".join(_describe_one(member, limits) for member in members(kind))


def _describe_one(kind: Any, limits: Mapping[str, Any]) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(str(one) for one in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(str(one.value) for one in kind)
    if get_origin(kind) in (tuple, list):
        return f"a list of items that are each {_describe_one(get_args(kind)[0], limits)}"
    if isinstance(get_origin(kind), type) or dataclasses.is_dataclass(kind):
        return "a mapping"
    words = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "text",
        types.NoneType: "null",
        Any: "any value",
    }
    return words.get(kind, getattr(kind, "__name__", str(kind))) + (
        _describe_range(limits) if kind in (int, float) else ""
    )


def _describe_range(limits: Mapping[str, Any]) -> str:
    low, high = limits.get("low"), limits.get("high")
    if low is not None and high is not None and not limits.get("open_low") and not limits.get("open_high"):
        return f" from {low} to {high}"
    above = "" if low is None else f" above {low}" if limits.get("open_low") else f" of at least {low}"
    below = "" if high is None else f" below {high}" if limits.get("open_high") else f" of at most {high}"
    return f"{above} and{below}" if above and below else above + below


def _shown(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else repr(value)
    )
