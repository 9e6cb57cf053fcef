"""The result of a harness: what goes wrong under CUDA graphs, which outputs are held past their step, the counters."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.shown import Shown

REMEDY = "consume it before the next call, keep a copy of it (hotloop.own, .clone()), or make it again"
_NOT_AS_ASKED = frozenset({"skipped", "stepped down", "not called"})
"""Kinds of findings that make nothing wrong: a CUDA graph is missing where it was asked for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault (``fails``), or a fact worth knowing."""

    kind: Literal["error", "numerics", "held", "skipped", "stepped down", "not called", "recompiles"]
    what: str
    remedy: str = ""
    fails: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" + (f". {self.remedy[:1].upper()}{self.remedy[1:]}" if self.remedy else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held:
    """A compiled output that was alive when a later call was allowed to overwrite it.

    Args:
        output: its place among the outputs, shape, dtype, and the call and component that made it.
        file, line: the user's operation that made it.
        times: the number of marks at which it was held.
    """

    output: str
    component: str
    file: str | None
    line: int | None
    times: int = 1

    @property
    def remedy(self) -> str:
        """How to stop holding it."""
        return REMEDY

    def __str__(self) -> str:
        times = f" ({self.times:,} times)" if self.times > 1 else ""
        return f"{self.output}{times}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Harness(Shown):
    """The result of a harness.

    Args:
        preset: of the training calls, and ``inference`` of those without gradients.
        emulated: the emulation of CUDA graphs ran the program with eager's kernels, since no GPU did.
        rounds: training steps, each followed by ``calls`` calls without gradients.
        findings: the faults, and facts worth knowing.
        held: outputs that the program keeps past a mark. `hotloop.compile` copies them, so that they are right at the
            cost of a copy.
        components: each component's status, as `hotloop.status` gives it.
        nearest: the tensor that came nearest to its limit against eager, and how near.
    """

    preset: str
    inference: str
    emulated: bool
    rounds: int
    calls: int
    findings: tuple[Finding, ...] = ()
    held: tuple[Held, ...] = ()
    components: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    nearest: str = ""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.worst is None

    @property
    def worst(self) -> Finding | None:
        """The first fault, unsafe ones before a missing CUDA graph; None if there is no fault."""
        failing = [finding for finding in self.findings if finding.fails]
        return min(failing, key=lambda finding: finding.kind in _NOT_AS_ASKED, default=None)

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
        """The preset, or both presets if they differ."""
        if self.preset == self.inference:
            return self.preset
        return f"{self.preset} (training), {self.inference} (inference)"

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain JSON data."""
        return {
            "passed": self.passed,
            "verdict": self.verdict,
            **dataclasses.asdict(self),
            "held": [{**dataclasses.asdict(held), "remedy": held.remedy} for held in self.held],
        }

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [self._table()]
        if self.held:
            parts.append(Text("Held when a later call may overwrite it:", style="bold"))
            parts += [Text(f"  {held}") for held in self.held]
            parts.append(Text(f"  remedy: {REMEDY}", style="dim"))
        parts += [Text(str(finding), style="bold red" if finding.fails else "yellow") for finding in self.findings]
        return Group(*parts, Text(self.verdict, style="bold"))

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("component", "mode", "preset", "calls", "a step", "shapes", "in a backward", "compiles", "copied"):
            left = name in ("component", "mode", "preset", "shapes")
            table.add_column(name, justify="left" if left else "right")
        for name, part in self.components.items():
            for mode, counts in part["modes"].items():
                preset = part["requested"] if mode == "training" else part["inference"]
                pace = ", ".join(f"{calls} ({times}x)" for calls, times in counts.get("calls_per_step", {}).items())
                shapes = "; ".join(counts.get("shapes", {}))
                row = (name, mode, preset, counts["calls"], pace, shapes, counts.get("calls_in_backward", 0))
                copied = part.get("outputs_copied", 0) if mode == "training" else ""
                table.add_row(*(Text(str(cell)) for cell in (*row, counts["compiles"], copied)))
        return table
