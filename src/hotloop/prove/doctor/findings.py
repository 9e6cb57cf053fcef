"""A finding about a machine: how serious it is, what it is about, and the remedy in one line."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Level = Literal["problem", "warning", "note", "ok"]
LEVELS: tuple[Level, ...] = ("problem", "warning", "note", "ok")
"""The most serious first. A problem keeps something from working; a warning costs speed, memory or trust."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found about ``topic``; ``remedy`` is empty where there is nothing to do."""

    level: Level
    topic: str
    what: str
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Give the finding as plain JSON data."""
        return dataclasses.asdict(self)


def size(nbytes: float) -> str:
    """Give a number of bytes in GiB, or in MiB below one."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
