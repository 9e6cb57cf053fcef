"""The result of a bench: one object for people (a table with bars), for code (JSON) and for the run record."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hotloop.report import write_html
from hotloop.report.text import count, figure, seconds, size
from hotloop.shown import Shown

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    from hotloop.prove.bench.verdict import Difference

BAR = 12
"""Characters of the longest bar."""
_STYLES = {"faster": "green", "slower": "red", "none": "", None: "dim"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run, as it was measured. If the way was not timed, ``reason`` says why, and the figures are None.

    Args:
        name: a tier or a preset.
        reason: why it was not timed; empty if it was.
        step_ms: of a steady step: median over blocks, with its 95% interval ``step_ms_low`` to ``step_ms_high``.
        speed: how many times as fast as eager's a step is, with its 95% interval.
        difference: ``faster`` or ``slower`` than eager by more than noise, or ``none``.
        paired_ms: eager's step over ``speed``. Totals count with this, since a machine that slows down for a while does
            so for both sides of a pair.
        cold_seconds: of getting ready, without the time of the way's own steps.
        prepared_steps: training steps until the first steady one, which began after ``prepared_seconds``.
        caches: the compile caches that it began with: ``empty``, ``warm``, or ``none`` if nothing is compiled.
        warm_seconds: ``prepared_seconds`` again with the caches that it had filled.
        compile_seconds: the part of ``prepared_seconds`` spent compiling.
        peak_bytes: the most memory of steady steps: held by torch on a GPU, resident in a process of its own on a CPU.
        preparing_bytes: the most memory until the first steady step.
        break_even_step: the fewest steps of a run in which it takes less time than eager; None if it never does.
        total_seconds: of a run of the steps that were asked about.
        as_asked: share of the timed steps that ran this very way.
        notes: further facts.
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
        """Whether the way ran and was timed."""
        return self.step_ms is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the way as plain JSON data; a bound that does not exist is None, since JSON has no infinity."""
        return {key: _plain(value) for key, value in dataclasses.asdict(self).items()}

    def to_record(self) -> dict[str, Any]:
        """Return the known figures for the run record; only ``failed`` with the reason if the way was not timed."""
        if self.reason:
            return {"failed": self.reason}
        return {key: value for key, value in self.to_dict().items() if value not in (None, "", []) and key != "name"}

    def cells(self) -> dict[str, str]:
        """Return the text of each column of the table, empty if there is none."""
        cold = f"{_shown(self.cold_seconds, seconds)}\n{count(self.prepared_steps or 0, 'step')}"
        speed = pays = ""
        if self.speed is not None:
            none = " none" if self.difference == "none" else ""
            speed = f"{self.speed:.2f}{none}{_bounds(self.speed_low, self.speed_high)}"
            pays = "never" if self.break_even_step is None else f"step {self.break_even_step:,}"
        return {
            "ms": f"{figure(self.step_ms or 0.0)}{_bounds(self.step_ms_low, self.step_ms_high)}",
            "x eager": speed,
            "cold": cold + (", cached" if self.caches == "warm" else ""),
            "if cached": "" if self.caches == "none" else _shown(self.warm_seconds, seconds),
            "memory": _shown(self.peak_bytes, size),
            "pays from": pays,
            "in all": _shown(self.total_seconds, seconds),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(Shown):
    """The result of a bench.

    Args:
        ways: each way, eager first, in the order asked for.
        verdict: the answer in one sentence.
        stretches: ``(first, way)``: from runs of so many steps on, the way takes the least time.
        noise: how far eager is from itself, as a share of its step; a smaller difference is none.
        total_steps: that the verdict is about; None if they are not known.
        notes: facts about all figures.
        document: everything as a run record's document.
    """

    _columns: ClassVar[int] = 150
    ways: tuple[Way, ...]
    verdict: str
    stretches: tuple[tuple[int, str], ...]
    noise: float
    total_steps: int | None = None
    notes: tuple[str, ...] = ()
    document: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def way(self, name: str) -> Way:
        """Return a way by its name.

        Raises:
            KeyError: it was not asked for.
        """
        return {way.name: way for way in self.ways}[name]

    def best(self, steps: int) -> str:
        """Name the way that takes the least time in a run of so many steps."""
        return [way for first, way in self.stretches if first <= steps][-1]

    def to_dict(self) -> dict[str, Any]:
        """Return the bench as plain JSON data."""
        return {
            "verdict": self.verdict,
            "total_steps": self.total_steps,
            "stretches": [{"first": first, "way": way} for first, way in self.stretches],
            "noise": _plain(self.noise),
            "notes": list(self.notes),
            "ways": [way.to_dict() for way in self.ways],
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
        notes = [*self.notes, *(f"{way.name}: {note}" for way in self.ways for note in way.notes)]
        notes.append(f"Noise (eager beside itself): {noise}; a difference below it is none.")
        left_out = [Text(f"{way.name} was not timed: {way.reason}") for way in self.ways if not way.timed]
        return Group(self._table(), *left_out, Text("\n".join(notes), style="dim"), Text(self.verdict, style="bold"))

    def _table(self) -> Table:
        """Draw the timed ways; a column without any text is left out."""
        timed = [(way, way.cells()) for way in self.ways if way.timed]
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        table.add_column("way", no_wrap=True)
        table.add_column("a step", no_wrap=True, overflow="crop")
        columns = [name for name in timed[0][1] if any(cells[name] for _, cells in timed)] if timed else []
        for name in columns:
            table.add_column(name, justify="right", overflow="fold")
        longest = max((way.step_ms or 0.0 for way, _ in timed), default=1.0)
        for way, cells in timed:
            bar = Text("█" * max(1, round(BAR * (way.step_ms or 0.0) / longest)), style=_STYLES[way.difference])
            table.add_row(Text(way.name, style="bold"), bar, *(Text(cells[name]) for name in columns))
        return table


def _bounds(low: float | None, high: float | None) -> str:
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"\n{figure(low, 3)}-{figure(high, 3)}"


def _shown(value: float | None, show: Callable[[float], str]) -> str:
    return "" if value is None else show(value)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
