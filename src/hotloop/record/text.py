"""The record's JSON: what it makes of NaN, of other libraries' numbers, and of what JSON does not know."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any


def to_json(value: Any) -> str:
    """Give data as JSON text in the record's way: NaN and infinity, which JSON has none of, as strings."""
    return dumps(value).decode("ascii")


def joined(entries: list[dict[str, Any]]) -> bytes:
    """Give the entries of a list section as the text between its brackets."""
    return b", ".join(dumps(entry) for entry in entries)


def dumps(value: Any) -> bytes:
    """Give data as the bytes of `to_json`."""
    return json.dumps(_finite(value), default=_plain, allow_nan=False).encode("ascii")


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they are written as the strings "nan", "inf" and "-inf", and stay visible."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, AbstractSet):
        return sorted((_finite(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _plain(value: Any) -> Any:
    """Make JSON of what json does not know: numbers of other libraries by their ``item()``, all else by its text."""
    with contextlib.suppress(Exception):  # whatever another library raises, a record is no reason to stop
        item = _finite(value.item())
        if isinstance(item, str | int | float | None):
            return item
    return str(value)
