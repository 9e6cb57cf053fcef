"""Findings about a machine for a terminal, readable without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.prove.doctor.findings import LEVELS, Finding, Level
from hotloop.report.text import line

if TYPE_CHECKING:
    from collections.abc import Sequence

_STYLES: dict[Level, str] = {"problem": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
_LONGEST = 600


def draw(findings: Sequence[Finding]) -> RenderableType:
    """Draw findings, the most serious first, under one sentence that sums them up."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in findings:
        table.add_row(Text(one.level, style=_STYLES[one.level]), _finding(one))
    return Group(Text(f"{sentence(findings)}\n", style="bold"), table)


def sentence(findings: Sequence[Finding]) -> str:
    """Say how the machine is, and what to do first."""
    counts = {level: sum(one.level == level for one in findings) for level in LEVELS}
    said = [f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in LEVELS[:2] if counts[level]]
    if not said:
        return "This machine is fit to compile: no problem, no warning."
    first = next((one.remedy for one in findings if one.remedy), "")
    return f"{' and '.join(said)}{f'; first: {line(first, _LONGEST)}' if first else ''}."


def _finding(one: Finding) -> Text:
    remedy = f"\ndo: {line(one.remedy, _LONGEST)}" if one.remedy else ""
    return Text.assemble((f"{one.topic}: ", "dim"), line(one.what, _LONGEST), remedy)
