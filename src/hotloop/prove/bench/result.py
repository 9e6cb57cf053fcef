"""The result of a bench: one object for people (a table), for code (JSON) and for the run record."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Any, ClassVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hotloop.measure import interval, machine
from hotloop.prove.bench.verdict import BASELINE, Course, Speed, noise_of, sentence, why_eager
from hotloop.record import RunRecord
from hotloop.report import write_html
from hotloop.report.text import figure, seconds, size
from hotloop.shown import Shown

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from hotloop.prove.bench.measured import Measured
    from hotloop.prove.bench.verdict import Difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to run, as it was measured. If the way was not timed, ``reason`` says why, and the figures are None.

    Args:
        name: a tier or a preset.
        reason: why it was not timed; empty if it was.
        step_ms: of a steady step: median over blocks, with its 95% interval ``step_ms_low`` to ``step_ms_high``.
        speed: how many times as fast as eager's a step is, with its 95% interval.
        difference: ``faster`` or ``slower`` than eager by more than noise, or ``none``.
        cold_seconds: of getting ready, without the time of the way's own steps.
        caches: the compile caches that it began with: ``empty``, ``warm``, or ``none`` if nothing is compiled.
        compile_seconds: spent compiling until then.
        peak_bytes: the most memory that torch held for steady steps on a GPU; None on a CPU.
        break_even_step: the fewest steps of a run in which it takes less time than eager; None if it never does.
        total_seconds: of a run of the steps that were asked about.
        as_asked: share of the timed steps that ran this very way.
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
    cold_seconds: float | None = None
    caches: str = "none"
    compile_seconds: float | None = None
    peak_bytes: int | None = None
    break_even_step: int | None = None
    total_seconds: float | None = None
    as_asked: float | None = None

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
        speed = pays = ""
        if self.speed is not None:
            none = " none" if self.difference == "none" else ""
            speed = f"{self.speed:.2f}{none}{_bounds(self.speed_low, self.speed_high)}"
            pays = "never" if self.break_even_step is None else f"step {self.break_even_step:,}"
        return {
            "ms a step": f"{figure(self.step_ms or 0.0)}{_bounds(self.step_ms_low, self.step_ms_high)}",
            "x eager": speed,
            "cold": seconds(self.cold_seconds or 0.0) + (", cached" if self.caches == "warm" else ""),
            "memory": "" if self.peak_bytes is None else size(self.peak_bytes),
            "pays from": pays,
            "in all": "" if self.total_seconds is None else seconds(self.total_seconds),
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(Shown):
    """The result of a bench.

    Args:
        ways: each way, eager first, in the order asked for.
        verdict: the answer in one sentence.
        longest: the way that takes the least time in the longest runs.
        noise: how far eager is from itself, as a share of its step; a smaller difference is none.
        total_steps: that the verdict is about; None if they are not known.
        document: everything as a run record's document.
    """

    _columns: ClassVar[int] = 150
    ways: tuple[Way, ...]
    verdict: str
    longest: str
    noise: float
    total_steps: int | None = None
    document: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    def way(self, name: str) -> Way:
        """Return a way by its name.

        Raises:
            KeyError: it was not asked for.
        """
        return {way.name: way for way in self.ways}[name]

    def to_dict(self) -> dict[str, Any]:
        """Return the bench as plain JSON data."""
        return {
            "verdict": self.verdict,
            "total_steps": self.total_steps,
            "longest": self.longest,
            "noise": _plain(self.noise),
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
        notes = [
            f"{way.name}: {way.as_asked:.0%} of its steps ran as asked, the others as written"
            for way in self.ways
            if way.as_asked is not None and way.as_asked < 0.995  # noqa: PLR2004 - it would be shown as 100%
        ]
        notes.append(f"Noise (eager beside itself): {noise}; a difference below it is none.")
        left_out = [Text(f"{way.name} was not timed: {way.reason}") for way in self.ways if not way.timed]
        return Group(self._table(), *left_out, Text("\n".join(notes), style="dim"), Text(self.verdict, style="bold"))

    def _table(self) -> Table:
        """Draw the timed ways; a column without any text is left out."""
        timed = [(way, way.cells()) for way in self.ways if way.timed]
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        table.add_column("way", no_wrap=True)
        columns = [name for name in timed[0][1] if any(cells[name] for _, cells in timed)] if timed else []
        for name in columns:
            table.add_column(name, justify="right", overflow="fold")
        for way, cells in timed:
            table.add_row(Text(way.name, style="bold"), *(Text(cells[name]) for name in columns))
        return table


def conclude(
    measured: Measured, *, total_steps: int | None, steps: int | None, record: str | os.PathLike[str] | RunRecord | None
) -> Bench:
    """Sum up a bench, and write its record.

    Args:
        measured: all measurements.
        total_steps: that the verdict is about.
        steps: timed steps that were asked for.
        record: a record that the caller owns, a folder for a new one, or None for a record in memory.
    """
    noise = noise_of(measured.again)
    speeds = {way: Speed.of(pairs) for way, pairs in measured.pairs.items() if way not in measured.failed}
    step = statistics.median(eager for _, eager in measured.pairs[BASELINE])
    courses = {way: Course(way, _cold_seconds(measured, way), step / speed.median) for way, speed in speeds.items()}
    del speeds[BASELINE]
    eager = courses[BASELINE]
    faster = [courses[way] for way, speed in speeds.items() if speed.difference(noise) == "faster"]
    rivals = [eager, *faster]
    longest = min(rivals, key=lambda course: course.step_seconds)
    best = longest if total_steps is None else min(rivals, key=lambda course: course.seconds(total_steps))
    verdict = sentence(best, longest, eager, total_steps)
    if not faster:
        verdict += why_eager(speeds, noise)
    bench = Bench(
        ways=tuple(_way(measured, way, courses, speeds, noise, total_steps) for way in measured.ways),
        verdict=f"{verdict}.",
        longest=longest.way,
        noise=noise,
        total_steps=total_steps,
    )
    return dataclasses.replace(bench, document=_written(bench, best.way, measured, steps, record))


def _cold_seconds(measured: Measured, way: str) -> float:
    """Return the seconds of getting a way ready, with the compile that it found made by another way of this process."""
    base = way.removesuffix("+graph")
    ready = measured.ready[way]
    alike = (one.compile_seconds for name, one in measured.ready.items() if name.removesuffix("+graph") == base)
    return ready.cold_seconds + max(alike) - ready.compile_seconds


def _way(  # noqa: PLR0913, PLR0917 - the measurements of a bench
    measured: Measured,
    name: str,
    courses: dict[str, Course],
    speeds: dict[str, Speed],
    noise: float,
    total_steps: int | None,
) -> Way:
    """Return the figures of a way, or the reason why it was not timed."""
    if name not in courses:
        return Way(name=name, reason=measured.failed[name])
    ready, course, speed = measured.ready[name], courses[name], speeds.get(name)
    blocks = [1e3 * ours for ours, _ in measured.pairs[name]]
    low, high = interval(blocks)
    beside: dict[str, Any] = {}
    if speed is not None:
        difference = speed.difference(noise)
        pays = course.overtakes(courses[BASELINE]) if difference == "faster" else None
        beside = {"speed": speed.median, "speed_low": speed.low, "speed_high": speed.high, "difference": difference}
        beside["break_even_step"] = pays
    return Way(
        name=name,
        step_ms=statistics.median(blocks),
        step_ms_low=low,
        step_ms_high=high,
        **{**dataclasses.asdict(ready), "cold_seconds": course.cold_seconds},
        total_seconds=None if total_steps is None else course.seconds(total_steps),
        as_asked=measured.as_asked[name],
        **beside,
    )


def _written(
    bench: Bench, best: str, measured: Measured, steps: int | None, record: str | os.PathLike[str] | RunRecord | None
) -> dict[str, Any]:
    """Write the bench into a run record, and return its document."""
    run = record if isinstance(record, RunRecord) else RunRecord(record)
    workload = measured.source.name or measured.source.why
    settings = {"workload": workload, "runs": list(measured.ways), "steps": steps, "total_steps": bench.total_steps}
    run.update("environment", **machine.describe(measured.device))
    run.update("settings", name="hotloop bench", **settings)
    components = {f"{way}: {name}": part for way, parts in measured.parts.items() for name, part in parts.items()}
    run.update("components", **components)
    figures = {key: value for key, value in bench.to_dict().items() if key in ("verdict", "longest", "noise")}
    run.update("measurements", ways={way.name: way.to_record() for way in bench.ways}, bench=figures)
    run.append("verdicts", {"verdict": best, "reason": bench.verdict})
    if run is not record:
        run.finish()
    return run.document


def _bounds(low: float | None, high: float | None) -> str:
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return ""
    return f"\n{figure(low, 3)}-{figure(high, 3)}"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return [_plain(part) for part in value] if isinstance(value, tuple) else value
