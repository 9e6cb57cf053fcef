"""The ways to run a program as a chart: what a run of so many steps takes in each, and where one overtakes another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotloop.report.charts import LINES_PER_CHART, Chart
from hotloop.report.occurrences import Mark
from hotloop.report.text import line, number, seconds

EAGER = "eager"
POINTS = 60
"""Points of each line: two would do for drawing it, but a reader points at steps."""
_PAST = 1.5
"""Without a planned number of steps the chart reaches this many times past the last point where a way overtakes."""
_FEWEST = 1_000


def charts(document: Mapping[str, Any]) -> list[Chart]:
    """Draw the total time over steps of each way that was timed; nothing where there are not two."""
    measured = document["measurements"]
    known = measured.get("ways")
    rows = known.items() if isinstance(known, Mapping) else ()
    lines = {line(name, 80): found for name, each in rows if (found := _course(each)) is not None}
    lines = dict(list(lines.items())[:LINES_PER_CHART])
    if len(lines) < 2:  # noqa: PLR2004 - one line has nothing to overtake
        return []
    overtakes = _overtakes(measured.get("bench"))
    last = _last(document, overtakes)
    steps = sorted({*(round(last * i / POINTS) for i in range(POINTS + 1)), *(at for at, _ in overtakes if at <= last)})
    columns: list[list[float | None]] = [[cold + n * step for n in steps] for cold, step in lines.values()]
    marks = [Mark(at, "overtakes", "Overtakes", 1, (f"{way} takes the least time",)) for at, way in overtakes]
    said = "; ".join(f"{name}: {seconds(column[-1] or 0.0)}" for name, column in zip(lines, columns, strict=True))
    return [
        Chart(
            key="ways",
            title="Total time of a run",
            unit="s",
            summary=f"After {last:,} steps {said}",
            steps=[float(n) for n in steps],
            names=list(lines),
            columns=columns,
            styles=["line"] * len(lines),
            marks=[mark for mark in marks if mark.step <= last],
            wide=True,
            apart=True,
        )
    ]


def verdict(document: Mapping[str, Any]) -> str:
    """Give the verdict of a bench; empty where the record holds none."""
    measured = document.get("measurements", {})
    bench = measured.get("bench") if isinstance(measured, Mapping) else None
    return line(bench.get("verdict") or "", 1_000) if isinstance(bench, Mapping) else ""


def _course(entry: Any) -> tuple[float, float] | None:
    """Read seconds to get ready and seconds of a step."""
    if not isinstance(entry, Mapping):
        return None
    step = number(entry.get("paired_ms")) or number(entry.get("step_ms"))
    cold = number(entry.get("cold_seconds"))
    return None if step is None else (cold or 0.0, step / 1e3)


def _overtakes(bench: Any) -> list[tuple[float, str]]:
    """Read where which way begins to take the least time; the one that does so from the start is left out."""
    stretches = bench.get("stretches") if isinstance(bench, Mapping) else None
    found = stretches if isinstance(stretches, Sequence) and not isinstance(stretches, str) else ()
    pairs = [(number(each.get("first")), line(each.get("way"), 80)) for each in found if isinstance(each, Mapping)]
    return [(first, way) for first, way in pairs if first]


def _last(document: Mapping[str, Any], overtakes: Sequence[tuple[float, str]]) -> int:
    planned = number(document["settings"].get("total_steps"))
    if planned is not None and planned >= 1:
        return int(planned)
    return round(max(_FEWEST, _PAST * max((at for at, _ in overtakes), default=0.0)))
