"""What every rule is made of: the problems that it can find, the function that finds them, and its advice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from hotloop.diagnose.words import figure
from hotloop.remedies import REMEDIES, Remedy
from hotloop.report.text import count, size

if TYPE_CHECKING:
    from hotloop.diagnose.case import Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Advice:
    """A diagnosis that a user can act on: what is wrong, where, what it costs, and what to change.

    Args:
        rule: the rule that found it, as `hotloop.diagnose` and the catalogue name it: ``graph_break``.
        kind: which of the rule's problems it is: ``item`` of ``graph_break``; the rule's own name if the rule has only
            one problem.
        what: one sentence in the user's terms, with its figures.
        cause: why it happens, unless that is plain.
        change: what to change, as an order: "move the print out of the model".
        component: the component it is about; None for the program or the machine as a whole.
        file, line, source: the line of the user's code, as far as it is known.
        milliseconds: what it costs a step, measured; None if it was not measured.
        seconds: what it has cost once (compiles, set-up).
        compiles: how many compiles it has cost.
        nbytes: memory that it costs, in bytes.
        times: how often it was observed.
        remedy: what `hotloop.Loop` does about it by itself (`hotloop.remedies`); None if only the user can act.
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
        """Return what the problem costs over so many steps, as far as that was measured."""
        return self.seconds + steps * max(0.0, self.milliseconds or 0.0) / 1e3

    @property
    def cost(self) -> str:
        """What the problem costs, for people; an empty string if nothing was measured."""
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
        shown = f"[{self.rule}] {head}{at}" + "".join(f"\n  {label}: {text}" for label, text in lines if text)
        # A record is a file that anybody can have written: control characters could harm the terminal, and others
        # could make the text read as what it is not.
        return "".join(sign if sign.isprintable() or sign == "\n" else "\N{REPLACEMENT CHARACTER}" for sign in shown)

    def to_dict(self) -> dict[str, Any]:
        """Return the advice as plain JSON data."""
        return dataclasses.asdict(self)


Found = Iterator[Advice]
"""What the function of a rule yields."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that a rule can find. Advice and the catalogue (docs/reference/catalogue.md) show it in these words.

    Args:
        rule: the rule's name.
        kind: the problem's name within the rule; by default the rule's own name, for a rule with only one problem.
        symptom: what is seen, as a sentence without figures.
        cause: why it happens.
        cost: what it costs, in words; figures are the advice's.
        change: what to change, as an order.
        remedy: what `hotloop.Loop` does about it by itself.
    """

    rule: str
    kind: str = ""
    symptom: str
    cause: str
    cost: str
    change: str
    remedy: Remedy | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", self.kind or self.rule)

    def advice(self, what: str, **fields: Any) -> Advice:
        """Return advice in this problem's words; ``fields`` are figures, the place, and words that replace these."""
        words = {"cause": self.cause, "change": self.change, "remedy": self.remedy}
        return Advice(rule=self.rule, kind=self.kind, what=what, **{**words, **fields})


class Rule(NamedTuple):
    """A rule: the problems that it can find, and the function that yields an advice for each of them in one run."""

    problems: tuple[Problem, ...]
    find: Callable[[Case], Found]
