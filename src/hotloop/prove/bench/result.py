"""What a bench found: one object for people (a table with bars), for code (JSON) and for the run record."""

from __future__ import annotations

import dataclasses
import io
import math
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hotloop.report import write_html
from hotloop.report.text import count, figure, seconds, size

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from hotloop.prove.bench.verdict import Difference

BAR = 12
"""Characters of the longest bar."""
_STYLES = {"faster": "green", "slower": "red", "none": "", None: "dim"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to run, as it was measured; figures are None where the way was not timed, and ``reason`` says why.

    Args:
        name: a tier or a preset.
        reason: why it was not timed; empty where it was.
        step_ms: of a steady step: median over blocks, with its 95% interval ``step_ms_low`` to ``step_ms_high``.
        speed: how many times as fast as eager's a step is, with its 95% interval.
        difference: ``faster`` or ``slower`` than eager by more than noise, or ``none``.
        paired_ms: eager's step over ``speed``: what totals count with, since a machine that slows down for a while does
            so for both sides of a pair.
        cold_seconds: what getting ready takes beyond the way's own steps.
        prepared_steps: training steps until the first steady one, which began after ``prepared_seconds``.
        caches: the compile caches that it began with: ``empty``, ``warm``, or ``none`` where nothing is compiled.
        warm_seconds: ``prepared_seconds`` again with the caches that it had filled.
        compile_seconds: of ``prepared_seconds``, spent compiling.
        peak_bytes: the most memory of steady steps: held by torch on a GPU, resident in a process of its own on a CPU.
        preparing_bytes: the most memory until the first steady step.
        break_even_step: the fewest steps of a run in which it takes less time than eager; None where it never does.
        total_seconds: of a run of the steps that were asked about.
        as_asked: share of the timed steps that ran in this very way.
        notes: what else is to be known.
        block_ms: of a step, in each block.
    """

    name: str
    reason: str = ""
    step_ms: float | None = None
    step_ms_low: float | None = None
    step_ms_high: float | None = None
    speed: float | None = None
    speed_low: float | None = None
    speed_high: float | None = None
    difference: Difference | None = None
    paired_ms: float | None = None
    cold_seconds: float | None = None
    prepared_steps: int | None = None
    prepared_seconds: float | None = None
    caches: str = "none"
    warm_seconds: float | None = None
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    preparing_bytes: int | None = None
    break_even_step: int | None = None
    total_seconds: float | None = None
    as_asked: float | None = None
    notes: tuple[str, ...] = ()
    block_ms: tuple[float, ...] = ()

    @property
    def timed(self) -> bool:
        """Whether it ran, and was timed."""
        return self.step_ms is not None

    def to_dict(self) -> dict[str, Any]:
        """Give the way as plain JSON data; a bound that does not exist is None, since JSON has no infinity."""
        return {key: _plain(value) for key, value in dataclasses.asdict(self).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """What a bench found.

    Args:
        ways: each way, eager first, in the order asked for.
        verdict: the answer in one sentence.
        stretches: ``(first, way)``: from runs of so many steps on, the way takes the least time.
        noise: how far eager is from itself, as a share of its step: what is smaller is no difference.
        total_steps: that the verdict is about; None where nobody said.
        notes: what is to be known of all figures.
        document: everything as a run record's document.
    """

    ways: tuple[Way, ...]
    verdict: str
    stretches: tuple[tuple[int, str], ...]
    noise: float
    total_steps: int | None = None
    notes: tuple[str, ...] = ()
    document: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def way(self, name: str) -> Way:
        """Give one way by its name.

        Raises:
            KeyError: it was not asked for.
        """
        found = {one.name: one for one in self.ways}
        return found[name]

    def best(self, steps: int) -> str:
        """Name the way that takes the least time in a run of so many steps."""
        return [way for first, way in self.stretches if first <= steps][-1]

    def to_dict(self) -> dict[str, Any]:
        """Give the bench as plain JSON data."""
        return {
            "verdict": self.verdict,
            "total_steps": self.total_steps,
            "stretches": [{"first": first, "way": way} for first, way in self.stretches],
            "noise": _plain(self.noise),
            "notes": list(self.notes),
            "ways": [one.to_dict() for one in self.ways],
            "environment": self.document.get("environment", {}),
        }

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the bench as one self-contained HTML page.

        Raises:
            OSError: the file cannot be written.
        """
        return write_html(self.document, path)

    def __rich__(self) -> Group:
        noise = f"{100 * self.noise:.2g}% of a step" if math.isfinite(self.noise) else "not known: too few blocks"
        lines = [*self._notes(), f"Noise (eager beside itself): {noise}; a difference below it is none."]
        left_out = [Text(f"{one.name} was not timed: {one.reason}") for one in self.ways if not one.timed]
        return Group(
            _table(self.ways), *left_out, Text("\n".join(lines), style="dim"), Text(self.verdict, style="bold")
        )

    def _notes(self) -> list[str]:
        return [*self.notes, *(f"{one.name}: {note}" for one in self.ways for note in one.notes)]

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=150, force_terminal=False)
        console.print(self)
        text = console.file
        assert isinstance(text, io.StringIO)
        return text.getvalue().rstrip()


def _table(ways: tuple[Way, ...]) -> Table:
    timed = [one for one in ways if one.timed]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("way", no_wrap=True)
    table.add_column("a step", no_wrap=True, overflow="crop")
    columns = {name: [show(one) for one in timed] for name, show in _COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    for name in columns:
        table.add_column(name, justify="right", overflow="fold")
    longest = max((one.step_ms or 0.0 for one in timed), default=1.0)
    for one, *cells in zip(timed, *columns.values(), strict=True):
        bar = "█" * max(1, round(BAR * (one.step_ms or 0.0) / longest))
        table.add_row(Text(one.name, style="bold"), Text(bar, style=_STYLES[one.difference]), *map(Text, cells))
    return table


def _speed(one: Way) -> str:
    if one.speed is None:
        return ""
    none = " none" if one.difference == "none" else ""
    return f"{one.speed:.2f}{none}{_bounds(one.speed_low, one.speed_high)}"


def _pays(one: Way) -> str:
    if one.speed is None:
        return ""
    return "never" if one.break_even_step is None else f"step {one.break_even_step:,}"


_COLUMNS: Mapping[str, Callable[[Way], str]] = {
    "ms": lambda one: f"{figure(one.step_ms or 0.0)}{_bounds(one.step_ms_low, one.step_ms_high)}",
    "x eager": _speed,
    "cold": lambda one: (
        f"{_shown(one.cold_seconds, seconds)}\n{count(one.prepared_steps or 0, 'step')}"
        + (", cached" if one.caches == "warm" else "")
    ),
    "if cached": lambda one: "" if one.caches == "none" else _shown(one.warm_seconds, seconds),
    "memory": lambda one: _shown(one.peak_bytes, size),
    "pays from": _pays,
    "in all": lambda one: _shown(one.total_seconds, seconds),
}
"""What the table shows of each way; a column with nothing in it is left out."""


def _bounds(low: float | None, high: float | None) -> str:
    known = low is not None and high is not None and math.isfinite(low) and math.isfinite(high)
    return f"\n{figure(low, 3)}-{figure(high, 3)}" if known and low is not None and high is not None else ""


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return [_plain(one) for one in value] if isinstance(value, tuple) else value
