"""The page of a cross-validation: one file that needs nothing else, runs no script, and escapes all of its data."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jinja2
from markupsafe import Markup

from hotloop.report.page import asset, digest, version, write_page

if TYPE_CHECKING:
    from pathlib import Path

    from hotloop.report.folds import FoldsView


def write(view: FoldsView, path: Path) -> Path:
    """Write the page, replacing ``path`` atomically.

    Raises:
        OSError: it cannot be written.
    """
    return write_page(render(view), path)


def render(view: FoldsView) -> str:
    """Give the page's text."""
    style = asset("page.css")
    return _template().render(
        view=view,
        style=Markup(style),  # noqa: S704 - our own file
        style_hash=digest(style),
        version=version(),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    return environment.from_string(asset("folds.html.j2"))
