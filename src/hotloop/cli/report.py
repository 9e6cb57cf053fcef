"""``hotloop report``: a run record as a terminal summary and an HTML page; works without torch."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - Typer reads the annotations of a command when it runs
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop import record
from hotloop.cli.printing import console
from hotloop.errors import ConfigError, HotloopError, MissingExtraError
from hotloop.report import build, folds, study
from hotloop.report.page import write_view
from hotloop.report.terminal import draw

if TYPE_CHECKING:
    from hotloop.report import View
    from hotloop.report.folds import FoldsView
    from hotloop.report.study import StudyView

PAGE = "report.html"


def report(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The folder of a run, a cross-validation or a search, or a document in it."),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            "--html", metavar="FILE", help="Where to write the page.", show_default=f"{PAGE} in the run's folder"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON; write a page only where --html says so.")
    ] = False,
) -> None:
    """Say what a run ran and why, in the terminal and as one HTML page that works offline."""
    if study.is_study(run):
        _study(run, html, as_json=as_json)
        return
    view: View | FoldsView = folds.build(folds.load(run)) if folds.is_cross_validation(run) else build(record.load(run))
    target = html or (None if as_json else (run if run.is_dir() else run.parent) / PAGE)
    page = _write(view, target) if target else None
    if as_json:
        typer.echo(json.dumps({**view.to_dict(), "html": str(page) if page else None}, indent=2))
        return
    console().print(draw(view))
    if page:
        typer.echo(f"\nReport: {page}")


def _write(view: View | FoldsView | StudyView, target: Path) -> Path:
    try:
        return write_view(view, target)
    except OSError as error:
        raise HotloopError(
            f"the page {target} cannot be written ({error.strerror or error}): name another file with --html"
        ) from error


def _study(path: Path, html: Path | None, *, as_json: bool) -> None:
    """Show a search, as its storage has it now where that can be asked."""
    folder = path if path.is_dir() else path.parent
    try:
        from hotloop.train.search import document  # noqa: PLC0415 - a study is shown without the optional packages too

        if note := document.refresh(folder)[1]:
            typer.echo(note, err=True)
    except (MissingExtraError, ConfigError) as error:
        typer.echo(f"As {study.DOCUMENT} was last written: {error}", err=True)
    view = study.build(study.load(folder))
    target = html or (None if as_json else folder / PAGE)
    page = _write(view, target) if target else None
    if as_json:
        typer.echo(json.dumps({**view.to_dict(), "html": str(page) if page else None}, indent=2))
        return
    console().print(draw(view))
    if page:
        typer.echo(f"\nReport: {page}")
