"""Measurements of the presets on training steps: rows of a committed result file, shipped for the table."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One preset on one workload: median step times in ms of one run, cold seconds, peak reserved memory in MB."""

    workload: str
    regions: str
    ms: float
    eager_ms: float
    speedup: float
    cold_s: float
    eager_mb: int
    compiling_mb: int
    after_mb: int

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON data."""
        return dataclasses.asdict(self)


@functools.cache
def _document() -> dict[str, Any]:
    text = importlib.resources.files("hotloop").joinpath("measured.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def rows(preset: str) -> tuple[Measurement, ...]:
    """Return the measurements of a preset; no rows for ``none``, which is the baseline of every row."""
    known = {field.name for field in dataclasses.fields(Measurement)}
    found = [row for row in _document()["rows"] if row["preset"] == preset]
    return tuple(Measurement(**{key: value for key, value in row.items() if key in known}) for row in found)


def __getattr__(name: str) -> Any:
    if name == "MACHINE":
        return _document()["machine"]
    if name == "CONTRADICTIONS":
        return tuple(_document()["contradictions"])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
