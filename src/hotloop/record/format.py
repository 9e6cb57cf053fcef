"""What a run record holds: its files and its sections."""

from __future__ import annotations

from typing import Any

from hotloop.record.schema import Schema

DOCUMENT, LINES = "record.json", "record.jsonl"

LISTS = ("steps", "metrics", "events", "decisions", "verdicts", "advice")
"""Sections that grow by one entry a line."""
MAPPINGS = ("environment", "settings", "told", "components", "measurements")
"""Sections of which a line updates some keys."""
SCHEMA = Schema("run record", DOCUMENT, 1, LISTS, MAPPINGS)


def empty() -> dict[str, Any]:
    """Return a document of the current schema with nothing in it."""
    return {
        "schema": SCHEMA.version,
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
