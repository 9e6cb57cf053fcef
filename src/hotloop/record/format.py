"""What a record holds, its sections, and how its values become JSON: NaN, and values that JSON does not know."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

SCHEMA_VERSION = 1
DOCUMENT, LINES = "record.json", "record.jsonl"

LISTS = ("steps", "metrics", "events", "decisions", "verdicts", "advice")
"""Sections that grow by one entry a line."""
MAPPINGS = ("environment", "settings", "told", "components", "measurements")
"""Sections of which a line updates some keys."""


def empty() -> dict[str, Any]:
    """Return a document of the current schema with nothing in it."""
    return {
        "schema": SCHEMA_VERSION,
        "status": "running",
        "created": None,
        "updated": None,
        "finished": None,
        "error": None,
        "starts": 0,
        "idle_seconds": 0.0,
        **{name: {} for name in MAPPINGS},
        **{name: [] for name in LISTS},
    }


def to_json(value: Any) -> str:
    """Return data as ASCII JSON text; NaN and infinity, which JSON does not have, become strings."""
    return json.dumps(_finite(value), default=_plain, allow_nan=False)


def _finite(value: Any) -> Any:
    """Replace NaN and infinity by the strings "nan", "inf" and "-inf", so that they stay visible."""
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
    """Return a value that JSON does not know by its ``item()``, if it is another library's number, else by its text."""
    with contextlib.suppress(Exception):  # whatever another library raises, a record is no reason to stop
        item = _finite(value.item())
        if isinstance(item, str | int | float | None):
            return item
    return str(value)
