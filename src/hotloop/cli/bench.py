"""``hotloop bench``: the ways to run a user's own step side by side, and which one pays over so many steps."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - Typer reads the annotations of a command when it runs
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hotloop.cli.printing import console, users_program
from hotloop.errors import ConfigError, HotloopError

if TYPE_CHECKING:
    from hotloop.prove.bench.result import Bench


def bench(  # noqa: PLR0913, PLR0917 - the options of the command
    workload: Annotated[
        str, typer.Argument(metavar="FILE.py:make", help="A function that gives a hotloop.Workload; or module:make.")
    ],
    runs: Annotated[
        str | None,
        typer.Option(metavar="a,b,c", help="Tiers and presets; eager is always among them.", show_default="by device"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Timed steps of each way, 12 or more.", show_default="about two seconds"),
    ] = None,
    total_steps: Annotated[
        int | None, typer.Option("--total-steps", metavar="N", help="How long the run is to be that it is about.")
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold/--no-cold", help="Get each way ready in a process of its own, caches empty.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with the total time over steps.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FOLDER", help="Keep the run record, for hotloop report.")
    ] = None,
) -> None:
    """Time the ways to run your own training step side by side, and say which one pays.

    Exit code 1: none of the ways that were asked for could be timed but eager. 3: your program raised.
    """
    from hotloop.prove.bench.bench import bench as measure  # noqa: PLC0415 - torch, for this command only

    names = None if runs is None else tuple(name.strip() for name in runs.split(","))
    if names is not None and not all(names):
        raise ConfigError(f"--runs {runs!r}: expected names of tiers or presets with commas between them")
    _refuse_folder(html)
    with Console(stderr=True).status("") as shown, users_program():
        found = measure(
            workload,
            names,
            steps=steps,
            total_steps=total_steps,
            cold=cold,
            record=record,
            say=lambda line: shown.update(escape(line)),
        )
    page = _page(found, html) if html is not None else None
    if as_json:
        typer.echo(json.dumps({**found.to_dict(), "html": page and str(page)}, indent=2))
    else:
        console().print(found)
        if page:
            typer.echo(f"\nReport: {page}")
    others = found.ways[1:]
    if others and not any(one.timed for one in others):
        raise typer.Exit(1)


def _refuse_folder(html: Path | None) -> None:
    """Refuse a page that cannot be written before minutes are spent."""
    if html is not None and html.is_dir():
        raise ConfigError(f"--html {html}: it is a folder; expected the name of a file")


def _page(found: Bench, html: Path) -> Path:
    try:
        return found.report(html)
    except OSError as error:
        raise HotloopError(
            f"the page {html} cannot be written ({error.strerror or error}): name another file with --html"
        ) from error
