"""The HTML pages: view data into one file that needs nothing else, and lets nothing in a record act as code.

One writer serves the pages of a run, a cross-validation and a search: a view names its template.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from hotloop.files import whole
from hotloop.report import text
from hotloop.report.view import View, build
from hotloop.version import __version__

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    import jinja2

    from hotloop.report.folds import FoldsView
    from hotloop.report.study import StudyView


def write_html(document: Mapping[str, Any], path: str | os.PathLike[str]) -> Path:
    """Write a run record as one self-contained page that works offline, replacing ``path`` atomically.

    Args:
        document: a run record's document (`hotloop.record.load`).
        path: the file to write; missing folders are made.

    Raises:
        OSError: the file cannot be written.
    """
    return write_view(build(document), Path(path))


def write_view(view: View | FoldsView | StudyView, path: Path) -> Path:
    """Write the page of a run, a cross-validation or a search, as `write_html` does."""
    with whole(path, durable=False, shared=True) as file:
        file.write(render(view).encode("utf-8", "replace"))
    return path


def render(view: View | FoldsView | StudyView) -> str:
    """Return the page's text."""
    script = asset("uplot.min.js") + "\n" + asset("page.js")
    style = asset("uplot.min.css") + "\n" + asset("page.css")
    return (
        environment()
        .get_template(view.template)
        .render(
            view=view,
            data=embedded([chart.to_json() for chart in view.charts]),
            script=Markup(script),  # noqa: S704 - our own files
            style=Markup(style),  # noqa: S704 - our own files
            script_hash=_digest(script),
            style_hash=_digest(style),
            version=__version__,
            text=text,
        )
    )


def embedded(data: Any) -> Markup:
    """Return data as JSON that can stand in a script element, whatever its strings hold."""
    # Only these characters could end the element, or be read as other than JSON text; as escapes they mean the same.
    escapes = {ord(char): f"\\u{ord(char):04x}" for char in "<>&'\u2028\u2029"}
    return Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).translate(escapes))  # noqa: S704 - escaped


def _digest(content: str) -> str:
    """Return a content security policy's source for one inline element, so that nothing else on the page may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


@functools.cache
def asset(name: str) -> str:
    """Return the text of a template, a script or a style of the pages."""
    return (importlib.resources.files("hotloop.report") / "assets" / name).read_text(encoding="utf-8").strip()


@functools.cache
def environment() -> jinja2.Environment:
    """Return the environment of the pages' templates: everything is escaped, and a name that is missing is an error."""
    import jinja2  # noqa: PLC0415 - a program that is compiled draws no page

    return jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        loader=jinja2.FunctionLoader(asset),
    )
