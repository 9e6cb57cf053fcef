"""What a record holds: its sections, and the document with nothing in it."""

from __future__ import annotations

from typing import Any

SCHEMA_VERSION = 1
DOCUMENT, LINES = "record.json", "record.jsonl"

LISTS = ("steps", "metrics", "events", "decisions", "verdicts", "advice")
"""Sections that grow by one entry a line."""
MAPPINGS = ("environment", "settings", "told", "components", "measurements")
"""Sections of which a line updates some keys."""
SINCE = ("advice", "told")
"""Sections that older records of this schema do not have."""


def empty() -> dict[str, Any]:
    """Give a document of the current schema with nothing in it."""
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
