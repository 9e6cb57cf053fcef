"""The ways to run a program as a chart: the total time over the steps of a run, and where one way overtakes another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hotloop.report.charts import LINES_PER_CHART, Chart
from hotloop.report.occurrences import Mark
from hotloop.report.text import line, number, seconds


def chart(document: Mapping[str, Any]) -> Iterator[Chart]:
    """Yield the chart of the total time over steps of each way to run that was timed; none if there are not two."""
    measured = document["measurements"]
    known = measured.get("ways")
    courses: dict[str, tuple[float, float]] = {}  # seconds to get ready, and of a step
    for name, entry in known.items() if isinstance(known, Mapping) else ():
        step = (number(entry.get("paired_ms")) or number(entry.get("step_ms"))) if isinstance(entry, Mapping) else None
        if step is not None and len(courses) < LINES_PER_CHART:
            courses[line(name, 80)] = (number(entry.get("cold_seconds")) or 0.0, step / 1e3)
    if len(courses) < 2:  # noqa: PLR2004 - a single way has nothing to overtake
        return
    bench = measured.get("bench")
    stretches = bench.get("stretches") if isinstance(bench, Mapping) else None
    marks = []
    for stretch in stretches if isinstance(stretches, list | tuple) else ():
        first = number(stretch.get("first")) if isinstance(stretch, Mapping) else None
        if first:  # the way that takes the least time from the start overtakes nothing
            reasons = (f"{line(stretch.get('way'), 80)} takes the least time",)
            marks.append(Mark(first, "overtakes", "Overtakes", 1, reasons))
    planned = number(document["settings"].get("total_steps"))
    # Without a planned length the chart reaches well past the last step in which one way overtakes another.
    reach = min(1e15, max(1e3, 1.5 * max((mark.step for mark in marks), default=0.0)))
    last = int(planned) if planned is not None and planned >= 1 else round(reach)
    marks = [mark for mark in marks if mark.step <= last]
    # Two points would draw a line, but a reader points at steps.
    steps = sorted({*(float(round(last * i / 60)) for i in range(61)), *(mark.step for mark in marks)})
    totals = {name: cold + last * step for name, (cold, step) in courses.items()}
    yield Chart(
        key="ways",
        title="Total time of a run",
        unit="s",
        summary=f"After {last:,} steps " + "; ".join(f"{name}: {seconds(total)}" for name, total in totals.items()),
        steps=steps,
        names=list(courses),
        columns=[[cold + n * step for n in steps] for cold, step in courses.values()],
        styles=["line"] * len(courses),
        marks=marks,
        wide=True,
        apart=True,
    )
