"""Several runs side by side: their curves over steps and over time, the settings that differ, and their figures."""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from hotloop.report import runs
from hotloop.report.charts import Chart
from hotloop.report.series import Line
from hotloop.report.text import line, quantity, text, words
from hotloop.ui.watching import LEAST_SECONDS, LOOK_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from starlette.requests import Request

    from hotloop.ui.site import Site
    from hotloop.ui.watching import Shown

COMPARED = 8
"""Runs that are compared at most: as many as a chart has colours."""


class ComparePages:
    """Answers requests about several runs, as they are now."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def compare(self, request: Request) -> Response:
        """Show runs side by side."""
        return self.site.show(request, "compare.html.j2", charts=self._charts(request), **self._tables(request))

    def tables(self, request: Request) -> Response:
        """Show the tables alone: settings that differ, and figures."""
        return self.site.show(request, "compared.html.j2", **self._tables(request))

    def frames(self, request: Request) -> Response:
        """Show the frames of the charts alone, with their legends."""
        return self.site.show(request, "compared_charts.html.j2", charts=self._charts(request))

    def charts(self, request: Request) -> Response:
        """Return the charts as JSON."""
        return JSONResponse([one.to_json() for one in self._charts(request)])

    def news(self, request: Request) -> Response:
        """Stream that one of the runs has changed."""
        found = [path for _, path in self._named(request)]

        def pause() -> float:
            return min(LOOK_SECONDS, max(LEAST_SECONDS, *(self.site.watching.run(path).pause for path in found)))

        return self.site.news(lambda: [self.site.watching.run(path).serial for path in found], pause)

    def _named(self, request: Request) -> list[tuple[str, Path]]:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:COMPARED]
        return [(name, self.site.places.find(name)) for name in names]

    def _tables(self, request: Request) -> dict[str, Any]:
        found = [(name, self.site.watching.run(path)) for name, path in self._named(request)]
        settings = runs.beside([one.row.settings for _, one in found])
        other = {key: values for key, values in settings.items() if any(one != values[0] for one in values)}
        differ = {key: list(map(text, values)) for key, values in other.items()}
        rows = [(shown.status, shown.row) for _, shown in found]
        facts = [{"status": status, "ran": row.tier, "steps": row.steps, **row.figures} for status, row in rows]
        figures = {words(key): [quantity(key, each) for each in row] for key, row in runs.beside(facts).items()}
        return {"names": [name for name, _ in found], "differ": differ, "figures": figures}

    def _charts(self, request: Request) -> list[Chart]:
        """Return the losses over the steps and over the time that training took, and the metric of the best."""
        found = [(name, path, self.site.watching.run(path)) for name, path in self._named(request)]
        losses = {name: _loss(shown) for name, _, shown in found}
        timed = {name: _over_time(self.site.watching.elapsed(path), losses[name]) for name, path, _ in found}
        charts = [
            *_chart("loss", "Training loss over steps", losses),
            *_chart("loss-time", "Training loss over training time", timed, apart=True, axis="time"),
        ]
        if metric := next((shown.row.metric for _, _, shown in found if shown.row.metric), ""):
            metrics = {name: _metric(shown, metric) for name, _, shown in found}
            charts += _chart("metric", f"{words(line(metric, 80))} over steps", metrics, style="dots")
        return charts


def _chart(key: str, title: str, found: dict[str, Line], style: str = "line", **fields: Any) -> list[Chart]:
    """Return the chart of each run's line; none where no run has it."""
    lines = [Line(line(name, 80), one.steps, one.values) for name, one in found.items() if one]
    return [Chart.of(key, title, lines, [style] * len(lines), wide=True, **fields)] if lines else []


def _loss(shown: Shown) -> Line:
    return _line(shown, lambda chart, at: chart.key == "loss" and chart.styles[at] == "line")


def _metric(shown: Shown, metric: str) -> Line:
    wanted = (metric, f"validation {metric}")
    return _line(shown, lambda chart, at: chart.names[at] in wanted)


def _line(shown: Shown, wanted: Callable[[Chart, int], bool]) -> Line:
    """Return the first line of a run's charts that is wanted; an empty one where there is none."""
    for chart in getattr(shown.view, "charts", ()) if shown.row.kind == runs.RUN else ():  # a search counts trials
        for at, column in enumerate(chart.columns):
            if wanted(chart, at):
                return Line.of("", zip(chart.steps, column, strict=True))
    return Line("", (), ())


def _over_time(elapsed: Line, one: Line) -> Line:
    """Return a line over the seconds that training took, of one over steps."""
    if not elapsed:
        return Line("", (), ())
    at = [min(len(elapsed.steps) - 1, bisect.bisect_left(elapsed.steps, step)) for step in one.steps]
    return Line.of("", zip((elapsed.values[place] for place in at), one.values, strict=True))
