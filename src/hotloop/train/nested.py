"""Nested settings as plain data: walked, set and merged by dotted names."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values; a group without anything in it is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by dotted names as groups; later ones lie on top of earlier ones."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        put(found, name, value)
    return found


def put(values: dict[str, Any], name: str, value: Any) -> None:
    """Set what has a dotted name; groups on the way are made."""
    *parents, last = name.split(".")
    for part in parents:
        if not isinstance(values.get(part), dict):
            values[part] = {}
        values = values[part]
    values[last] = value


def drop(values: dict[str, Any], name: str) -> None:
    """Take out what has a dotted name, where there is something."""
    first, _, rest = name.partition(".")
    if not rest:
        values.pop(first, None)
    elif isinstance(values.get(first), dict):
        drop(values[first], rest)


def merge(values: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Put values on top of others, group by group, and return them; what was there before is not changed itself."""
    for name, value in above.items():
        if isinstance(value, Mapping) and isinstance(values.get(name), Mapping):
            values[name] = merge(dict(values[name]), value)
        else:
            values[name] = copy.deepcopy(value)
    return values
