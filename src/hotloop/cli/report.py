"""``hotloop report``: a run record as a terminal summary and an HTML page; works without torch."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - Typer reads the annotations of a command when it runs
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop import record
from hotloop.cli.common import echo_result, writing_page
from hotloop.errors import ConfigError, MissingExtraError
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
    folder = run if run.is_dir() else run.parent
    view: View | FoldsView | StudyView
    if study.SCHEMA.is_at(run):
        refresh_study(folder)
        view = study.build(study.SCHEMA.load(folder))
    elif folds.SCHEMA.is_at(run):
        view = folds.build(folds.load(run))
    else:
        view = build(record.load(run), record.load_ranks(folder))
    target = html or (None if as_json else folder / PAGE)
    with writing_page(target):
        page = write_view(view, target) if target else None
    echo_result(view.to_dict(), draw(view), page, as_json=as_json)


def refresh_study(folder: Path) -> None:
    """Bring a study's document up to date with its storage, where the optional packages and the storage allow it."""
    try:
        from hotloop.train.search import document  # noqa: PLC0415 - a study is shown without the optional packages too

        if note := document.refresh(folder)[1]:
            typer.echo(note, err=True)
    except (MissingExtraError, ConfigError) as error:
        typer.echo(f"As {study.DOCUMENT} was last written: {error}", err=True)
