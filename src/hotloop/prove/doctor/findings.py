"""Findings about a machine, and how a terminal shows them, readable without colour."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.report.text import count, line

if TYPE_CHECKING:
    from collections.abc import Sequence

Level = Literal["problem", "warning", "note", "ok"]
LEVELS: tuple[Level, ...] = ("problem", "warning", "note", "ok")
"""The most serious first. A problem keeps something from working; a warning costs speed, memory or trust."""
_STYLES: dict[Level, str] = {"problem": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
_LONGEST = 600


@dataclasses.dataclass(frozen=True)
class Finding:
    """A fact about ``topic`` with its level; ``remedy`` is empty where there is nothing to do."""

    level: Level
    topic: str
    what: str
    remedy: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as plain JSON data."""
        return dataclasses.asdict(self)


def draw(findings: Sequence[Finding]) -> RenderableType:
    """Draw findings, the most serious first, under one sentence that sums them up."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        remedy = f"\ndo: {line(finding.remedy, _LONGEST)}" if finding.remedy else ""
        text = Text.assemble((f"{finding.topic}: ", "dim"), line(finding.what, _LONGEST), remedy)
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), text)
    return Group(Text(f"{sentence(findings)}\n", style="bold"), table)


def sentence(findings: Sequence[Finding]) -> str:
    """Count the problems and warnings in a sentence, and name the first remedy."""
    counts = {level: sum(finding.level == level for finding in findings) for level in LEVELS[:2]}
    serious = [count(number, level) for level, number in counts.items() if number]
    if not serious:
        return "This machine is fit to compile: no problem, no warning."
    first = next((finding.remedy for finding in findings if finding.remedy), "")
    return f"{' and '.join(serious)}{f'; first: {line(first, _LONGEST)}' if first else ''}."
