"""The HTML page: view data into one file that needs nothing else, and lets nothing in the record act as code."""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup

from hotloop.report import text
from hotloop.report.occurrences import KINDS
from hotloop.report.view import View, build

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.report.charts import Chart

_ASSETS = importlib.resources.files("hotloop.report") / "assets"
# In a script element only these could end it or be read as other than JSON text; as escapes they mean the same.
_ESCAPES = {ord(char): f"\\u{ord(char):04x}" for char in "<>&'\u2028\u2029"}


def write_html(document: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a run record as one self-contained page that works offline, replacing ``path`` atomically.

    Args:
        document: a run record's document (`hotloop.record.load`).
        path: the file to write; missing folders are made.

    Raises:
        OSError: the file cannot be written.
    """
    return write_view(build(document), Path(path))


def write_view(view: View, path: Path) -> Path:
    """Write view data that is built already, as `write_html` does."""
    return write_page(render(view), path)


def write_page(page: str, path: Path) -> Path:
    """Write a page's text so that the file at ``path`` is always a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(page, encoding="utf-8", errors="replace", newline="\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path


def render(view: View) -> str:
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


def embedded(data: Any) -> Markup:
    """Give data as JSON that can stand in a script element, whatever its strings hold."""
    return Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).translate(_ESCAPES))  # noqa: S704 - escaped


def version() -> str:
    """Give the installed version of hotloop; empty where it runs from a source tree."""
    try:
        return importlib.metadata.version("hotloop")
    except importlib.metadata.PackageNotFoundError:
        return ""


def drawn(chart: Chart) -> dict[str, Any]:
    """Give a chart as JSON data, its numbers with the digits that a screen can show."""
    data = dataclasses.asdict(chart)
    data["columns"] = [[_rounded(value) for value in column] for column in chart.columns]
    data["steps"] = [int(step) if step.is_integer() else step for step in chart.steps]
    return data


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def digest(content: str) -> str:
    """Give a content security policy's source for one inline element: nothing else on the page may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


@functools.cache
def asset(name: str) -> str:
    """Give the text of one of our own files."""
    return (_ASSETS / name).read_text(encoding="utf-8").strip()


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    environment.globals["kinds"] = KINDS
    return environment.from_string(asset("page.html.j2"))
