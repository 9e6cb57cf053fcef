"""What a harness found: what goes wrong under CUDA graphs, what is held past its step and by whom, the counters."""

from __future__ import annotations

import dataclasses
import io
from typing import Any, Literal

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

Kind = Literal["error", "numerics", "held", "skipped", "stepped down", "not called", "recompiles"]
REMEDY = "consume it before the next call, keep a copy of it (hotloop.own, .clone()), or make it again"
_NOT_AS_ASKED = frozenset({"skipped", "stepped down", "not called"})
"""Findings that make nothing wrong: no CUDA graph stands where one was asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong (``fails``), or that is to be known."""

    kind: Kind
    what: str
    remedy: str = ""
    fails: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (f". {self.remedy[:1].upper()}{self.remedy[1:]}" if self.remedy else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """A compiled output that was alive when a later call was allowed to overwrite it.

    Args:
        output: which one: place, shape, dtype, of which call of which component.
        file, line: the user's operation that made it.
        holders: who holds it: variables, attributes, entries, each with its place where that is known.
        times: at how many marks.
    """

    output: str
    component: str
    file: str | None
    line: int | None
    holders: tuple[str, ...]
    times: int = 1

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDY

    def __str__(self) -> str:
        return f"{self.output}; held by {', '.join(self.holders)}" + (
            f" ({self.times:,} times)" if self.times > 1 else ""
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harness:
    """What a harness found.

    Args:
        preset: of the training calls, and ``inference`` of those without gradients.
        emulated: no GPU ran it: the emulation of CUDA graphs stood in, with eager's kernels.
        rounds: training steps, each followed by ``calls`` calls without gradients.
        findings: what is wrong, and what is to be known.
        held: outputs that the program keeps past a mark. `hotloop.compile` copies them, so that they are right at the
            cost of a copy; under ``strict_lifetime`` they fail.
        strict_lifetime: whether they do.
        components: each component's status, as `hotloop.status` gives it.
        nearest: which tensor came nearest to its limit against eager, and how near.
    """

    preset: str
    inference: str
    emulated: bool
    rounds: int
    calls: int
    findings: tuple[Finding, ...] = ()
    held: tuple[Held, ...] = ()
    strict_lifetime: bool = False
    components: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    nearest: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.worst is None

    @property
    def worst(self) -> Finding | None:
        """The first of what is wrong, what is not safe before what does not run as asked; None where nothing is."""
        failing = [one for one in self.findings if one.fails]
        return min(failing, key=lambda one: one.kind in _NOT_AS_ASKED, default=None)

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        where = "under the emulation of CUDA graphs, since there is no GPU" if self.emulated else "on the GPU"
        done = f"{self.rounds} training steps and {self.rounds * self.calls} calls between them, {where}"
        if (first := self.worst) is not None:
            wrong = "does not run as asked" if first.kind in _NOT_AS_ASKED else "is not safe"
            return f"{self.name} {wrong} here ({done}): {first.kind}: {first.what.rstrip('.')}."
        copies = " (its outputs that are held are copied)" if self.held else ""
        return f"{self.name} is safe here{copies}: {done}; {self.nearest or 'nothing was compared'}."

    @property
    def name(self) -> str:
        """The preset, or both where they differ."""
        if self.preset == self.inference:
            return self.preset
        return f"{self.preset} (training), {self.inference} (inference)"

    def to_dict(self) -> dict[str, Any]:
        """Give the harness as plain JSON data."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            **dataclasses.asdict(self),
            "held": [{**dataclasses.asdict(one), "remedy": one.remedy} for one in self.held],
        }

    def __rich__(self) -> Group:
        found = [Text(str(one), style="bold red" if one.fails else "yellow") for one in self.findings]
        held = [Text("Held when a later call may overwrite it:", style="bold")] if self.held else []
        held += [Text(f"  {one}") for one in self.held]
        held += [Text(f"  remedy: {REMEDY}", style="dim")] if self.held else []
        return Group(_table(self.components), *held, *found, Text(self.verdict, style="bold"))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=140, force_terminal=False)
        console.print(self)
        text = console.file
        assert isinstance(text, io.StringIO)
        return text.getvalue().rstrip()


def _table(components: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("component", "mode", "preset", "calls", "a step", "shapes", "in a backward", "compiles", "copied"):
        table.add_column(name, justify="left" if name in ("component", "mode", "preset", "shapes") else "right")
    for name, part in components.items():
        for mode, counts in part["modes"].items():
            asked = part["requested"] if mode == "training" else part["inference"]
            pace = ", ".join(f"{calls} ({times}x)" for calls, times in counts.get("calls_per_step", {}).items())
            shapes = "; ".join(counts.get("shapes", {}))
            row = (name, mode, asked, counts["calls"], pace, shapes, counts.get("calls_in_backward", 0))
            copied = part.get("outputs_copied", 0) if mode == "training" else ""
            table.add_row(*(Text(str(cell)) for cell in (*row, counts["compiles"], copied)))
    return table
