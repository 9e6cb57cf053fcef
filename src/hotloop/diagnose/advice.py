"""Advice: a diagnosis that a user can act on."""

from __future__ import annotations

import dataclasses
from typing import Any

from hotloop.diagnose.words import count, figure, safe, size
from hotloop.remedies import REMEDIES, Remedy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """What is wrong, where, what it costs, what to change.

    Args:
        rule: the rule that found it, as `hotloop.diagnose` and the catalogue name it: ``graph_break``.
        kind: which of the rule's problems in the catalogue it is: ``item`` of ``graph_break``; the rule's own name
            where it has one only.
        what: one sentence in the user's terms, with its figures.
        cause: why it is so, where that is not plain.
        change: what to change, as an order: "move the print out of the model".
        component: the component it is about; None for the program or the machine as a whole.
        file, line, source: the user's own line, where there is one.
        milliseconds: what it costs a step, measured; None where that was not measured.
        seconds: what it has cost once (compiles, set-up).
        compiles: how many compiles it has cost.
        nbytes: memory that it costs.
        times: how often it was observed.
        remedy: what hotloop's loop does about it by itself (`hotloop.remedies`); None where only the user can.
    """

    rule: str
    what: str
    change: str
    kind: str = ""
    cause: str = ""
    component: str | None = None
    file: str | None = None
    line: int | None = None
    source: str = ""
    milliseconds: float | None = None
    seconds: float = 0.0
    compiles: int = 0
    nbytes: int = 0
    times: int = 1
    remedy: Remedy | None = None

    @property
    def location(self) -> str:
        """``file:line`` of the user's code, or an empty string."""
        return f"{self.file}:{self.line}" if self.file else ""

    def lost_seconds(self, steps: int) -> float:
        """Give what it costs over so many steps, as far as that was measured."""
        return self.seconds + steps * max(0.0, self.milliseconds or 0.0) / 1e3

    @property
    def cost(self) -> str:
        """What it costs for people, as far as it was measured; an empty string where nothing was."""
        parts = []
        if self.milliseconds is not None:
            parts.append(f"{figure(self.milliseconds)} ms a step")
        if self.compiles:
            parts.append(count(self.compiles, "compile"))
        if self.seconds:
            parts.append(f"{figure(self.seconds)} s")
        if self.nbytes:
            parts.append(size(self.nbytes))
        return ", ".join(parts)

    def __str__(self) -> str:
        at = f"\n  at {self.location}: {self.source}".rstrip(": ") if self.file else ""
        head = f"{self.component}: {self.what}" if self.component else self.what
        lines = [("costs", self.cost), ("cause", self.cause), ("change", self.change)]
        if self.remedy is not None:
            lines.append(("hotloop.Loop", REMEDIES[self.remedy]))
        return safe(f"[{self.rule}] {head}{at}" + "".join(f"\n  {label}: {text}" for label, text in lines if text))

    def to_dict(self) -> dict[str, Any]:
        """Give the advice as plain JSON data."""
        return dataclasses.asdict(self)
