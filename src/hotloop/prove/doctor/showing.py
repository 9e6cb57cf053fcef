"""Findings about a machine for a terminal, readable without colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from hotloop.prove.doctor.findings import LEVELS, Finding, Level
from hotloop.report.text import line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_STYLES: dict[Level, str] = {"problem": "bold red", "warning": "yellow", "note": "cyan", "ok": "green"}
_WIDTH = max(len(level) for level in LEVELS) + 1
_LONGEST = 600


def draw(findings: Sequence[Finding]) -> RenderableType:
    """Draw findings, the most serious first, under one sentence that sums them up."""
    return Group(Text(sentence(findings), style="bold"), *(each for one in findings for each in _finding(one)))


def sentence(findings: Sequence[Finding]) -> str:
    """Say how the machine is, and what to do first."""
    counts = {level: sum(one.level == level for one in findings) for level in LEVELS}
    said = [f"{counts[level]} {level}{'' if counts[level] == 1 else 's'}" for level in LEVELS[:2] if counts[level]]
    if not said:
        return "This machine is fit to compile: no problem, no warning."
    first = next((one.remedy for one in findings if one.remedy), "")
    return f"{' and '.join(said)}{f'; first: {line(first, _LONGEST)}' if first else ''}."


def _finding(one: Finding) -> Iterator[RenderableType]:
    head = (f"{one.level:<{_WIDTH}}", _STYLES[one.level])
    yield Text.assemble(head, (f"{one.topic}: ", "dim"), line(one.what, _LONGEST))
    if one.remedy:
        yield Padding(Text.assemble(("do: ", "dim"), line(one.remedy, _LONGEST)), (0, 0, 0, _WIDTH))
