"""``hotloop bench``: times the ways to run a user's own step, and says which one pays over so many steps."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - Typer reads the annotations of a command when it runs
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hotloop.cli.common import AsJson, Workload, echo_result, users_program, writing_page
from hotloop.errors import ConfigError


def bench(  # noqa: PLR0913, PLR0917 - the options of the command
    workload: Workload,
    runs: Annotated[
        str | None,
        typer.Option(metavar="a,b,c", help="Tiers and presets; eager is always among them.", show_default="by device"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", help="Timed steps of each way, 12 or more.", show_default="about two seconds"),
    ] = None,
    total_steps: Annotated[
        int | None, typer.Option("--total-steps", metavar="N", help="Steps that the real run will have.")
    ] = None,
    cold: Annotated[
        bool, typer.Option("--cold", help="Measure cold seconds in a process of each way's own, caches empty.")
    ] = False,
    as_json: AsJson = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")] = None,
    record: Annotated[
        Path | None, typer.Option("--record", metavar="FOLDER", help="Keep the run record, for hotloop report.")
    ] = None,
) -> None:
    """Time the ways to run your own training step side by side, and say which one pays.

    Exit code 1: none of the ways that were asked for could be timed but eager. 3: your program raised.
    """
    from hotloop.prove.bench.bench import bench as measure  # noqa: PLC0415 - loads torch

    names = None if runs is None else tuple(name.strip() for name in runs.split(","))
    if names is not None and not all(names):
        raise ConfigError(f"--runs {runs!r}: expected names of tiers or presets with commas between them")
    if html is not None and html.is_dir():  # now, before minutes are spent
        raise ConfigError(f"--html {html}: it is a folder; expected the name of a file")

    with Console(stderr=True).status("") as status, users_program():
        result = measure(
            workload,
            names,
            steps=steps,
            total_steps=total_steps,
            cold=cold,
            record=record,
            say=lambda line: status.update(escape(line)),
        )
    with writing_page(html):
        page = result.report(html) if html is not None else None
    echo_result(result.to_dict(), result, page, as_json=as_json)
    others = result.ways[1:]
    if others and not any(way.timed for way in others):
        raise typer.Exit(1)
