"""The page of a search: one file that needs nothing else, and lets nothing in the document act as code."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hotloop.report import text
from hotloop.report.page import asset, digest, drawn, embedded, version, write_page

if TYPE_CHECKING:
    from pathlib import Path

    from hotloop.report.study import StudyView

BEST_SHOWN = 10
"""Trials that the terminal's table has."""


def write(view: StudyView, path: Path) -> Path:
    """Write the page, replacing ``path`` atomically.

    Raises:
        OSError: it cannot be written.
    """
    return write_page(render(view), path)


def render(view: StudyView) -> str:
    """Give the page's text."""
    script = asset("uplot.min.js") + "\n" + asset("page.js")
    style = asset("uplot.min.css") + "\n" + asset("page.css")
    return _template().render(
        view=view,
        data=embedded([drawn(chart) for chart in view.charts]),
        script=Markup(script),  # noqa: S704 - our own files
        style=Markup(style),  # noqa: S704 - our own files
        script_hash=digest(script),
        style_hash=digest(style),
        version=version(),
        text=text,
    )


def draw(view: StudyView) -> Any:
    """Give the summary for a terminal."""
    found: list[Any] = [Text(f"{view.title}: {view.sentence}"), *(Text(f"  {fact}") for fact in view.facts)]
    if view.best_value is not None:
        best = "  ".join(f"{name}={value}" for name, value in view.best)
        found += [Text(f"Best {view.metric} {text.figure(view.best_value)}: {best}")]
    if view.importances:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in view.importances)
        found += [Text(f"What mattered: {shares}")]
    table = Table(
        "trial", "state", escape(view.metric), *(escape(name.rsplit(".", 1)[-1]) for name in view.names), "cause"
    )
    sign = -1 if view.maximize else 1
    for row in sorted(view.trials, key=lambda one: (one.state != "complete", sign * (one.value or 0)))[:BEST_SHOWN]:
        value = "" if row.value is None else text.figure(row.value)
        table.add_row(*(Text(cell) for cell in (str(row.number), row.state, value, *row.cells, row.cause)))
    return Group(*found, table)


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    return environment.from_string(asset("study.html.j2"))
