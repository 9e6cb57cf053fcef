"""Several runs side by side: their losses, the settings that differ, and their figures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response

from hotloop.report import runs
from hotloop.report.charts import Chart
from hotloop.report.series import Line
from hotloop.report.text import line, quantity, text, words

if TYPE_CHECKING:
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
        found = self._found(request)
        settings = runs.beside([one.row.settings for one in found.values()])
        facts = [{"status": one.status, "ran": one.row.tier, **one.row.figures} for one in found.values()]
        tables: dict[str, Any] = {
            "Settings that differ": {
                key: [*map(text, values)] for key, values in settings.items() if any(one != values[0] for one in values)
            },
            "Figures": {words(key): [quantity(key, one) for one in row] for key, row in runs.beside(facts).items()},
        }
        return self.site.show(
            request, "compare.html.j2", names=[*found], charts=_charts(found), tables=tables, query=request.url.query
        )

    def charts(self, request: Request) -> Response:
        """Return the charts as JSON."""
        return JSONResponse([one.to_json() for one in _charts(self._found(request))])

    def _found(self, request: Request) -> dict[str, Shown]:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:COMPARED]
        return {name: self.site.watching.run(self.site.places.find(name)) for name in names}


def _charts(found: dict[str, Shown]) -> list[Chart]:
    lines = [Line(line(name, 80), one.steps, one.values) for name, shown in found.items() if (one := _loss(shown))]
    return [Chart.of("loss", "Training loss", lines, ["line"] * len(lines), wide=True)] if lines else []


def _loss(shown: Shown) -> Line | None:
    """Return the training loss of a run over its steps; None where it has none."""
    for chart in getattr(shown.view, "charts", ()) if shown.row.kind == runs.RUN else ():  # a search counts trials
        if chart.key == "loss" and "line" in chart.styles:
            return Line.of("", zip(chart.steps, chart.columns[chart.styles.index("line")], strict=True))
    return None
