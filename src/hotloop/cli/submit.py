"""``hotloop submit``: a run on a Ray cluster: started there, followed, stopped, and its results fetched."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from rich.table import Table
from rich.text import Text

from hotloop.cli.common import INTERRUPTED, AsJson, DefaultGroup, console, echo_json

Run = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="A run by its name, or by its folder here; by default the newest."),
]
Retries = Annotated[
    int, typer.Option("--retries", metavar="N", min=0, help="How often the run is resumed there after it died.")
]


class SubmitGroup(DefaultGroup):
    """The commands; all else is the arguments of ``run``."""

    default = "run"


app = typer.Typer(
    cls=SubmitGroup, help="Run on a Ray cluster; `hotloop submit --address URL -- train ...` is `submit run`."
)


@app.command("run")
def submit(  # noqa: PLR0913, PLR0917 - options of the command line
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- train|hpo|kfold [SETTING=VALUE]...", help="The command that runs there."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="URL",
            help="Of the dashboard of the cluster's head: http://HEAD:8265.",
            show_default="that of the newest run",
        ),
    ] = None,
    retries: Retries = 0,
    pip: Annotated[
        str | None, typer.Option("--pip", metavar="FILE", help="Requirements that Ray installs for this run.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check here and there, up to the first step, and train nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Start a run on a Ray cluster: docs/how-to/submit.md.

    The files of this folder travel, but for what .gitignore names and what looks like a secret. The run goes on when
    this command, or the connection, ends.
    """
    from hotloop.remote import following, submitting  # noqa: PLC0415 - loads torch

    run = submitting.submit(command or [], address, retries, pip or "", dry=dry_run)
    if dry_run:
        how = following.print_log(run, lambda text: typer.echo(text, nl=False), follow=True)
        raise typer.Exit(0 if how == "finished" else 1)
    if as_json:
        echo_json(run.to_dict())
    else:
        typer.echo(f"Submitted: {run.name}")
        typer.echo(f"Follow it: hotloop submit logs -f {run.name}\nFetch it:  hotloop submit fetch {run.name}")


@app.command()
def status(run: Run = None, as_json: AsJson = False) -> None:
    """Show how the runs that were submitted from here are doing, the newest first; or one of them."""
    from hotloop.remote import fetch, runs  # noqa: PLC0415 - an optional package

    found = [runs.find(run)] if run else runs.known()
    rows = [{**one.to_dict(), "status": how} for one, how in zip(found, fetch.statuses(found), strict=True)]
    if as_json:
        echo_json(rows)
        return
    if not rows:
        typer.echo("No run was submitted from here")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in ("run", "status", "cluster", "command"):
        table.add_column(column, overflow="fold", no_wrap=column == "run")
    for row in rows:
        table.add_row(*(Text(one) for one in (row["name"], row["status"], row["address"], " ".join(row["command"]))))
    console().print(table)


@app.command()
def logs(
    run: Run = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
) -> None:
    """Print what a run has printed. Ctrl-C ends the printing, not the run. Exit code 1: the run has failed."""
    from hotloop.remote import following, runs  # noqa: PLC0415 - an optional package

    found = runs.find(run)
    try:
        ended = following.print_log(found, lambda text: typer.echo(text, nl=False), follow=follow)
    except KeyboardInterrupt as error:
        typer.echo(f"\nThe run goes on: hotloop submit logs -f {found.name}", err=True)
        raise typer.Exit(INTERRUPTED) from error
    if ended == "failed":
        typer.echo(f"{found.name} has failed. Go on with it: hotloop submit resume {found.name}", err=True)
        raise typer.Exit(1)


@app.command()
def stop(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run by its name, or by its folder here.")],
    as_json: AsJson = False,
) -> None:
    """Ask a run to stop, and wait until it has. It has a minute to save; `hotloop submit resume` goes on with it."""
    from hotloop.remote import following, runs  # noqa: PLC0415 - an optional package

    found = runs.find(run)
    ran, how = following.stop(found, lambda line: typer.echo(line, err=True))
    if as_json:
        echo_json({"name": found.name, "ran": ran, "status": how})
    else:
        typer.echo(f"{found.name} {'is' if ran else 'was over already:'} {how}")


@app.command()
def resume(run: Run = None, retries: Retries = 0, as_json: AsJson = False) -> None:
    """Go on with a run that was stopped or died, from its folder on its node, or from its run.storage."""
    from hotloop.remote import runs, submitting  # noqa: PLC0415 - an optional package

    again = submitting.resume(runs.find(run), retries)
    if as_json:
        echo_json(again.to_dict())
    else:
        typer.echo(f"{again.name} goes on: hotloop submit logs -f {again.name}")


@app.command()
def fetch(
    run: Run = None,
    checkpoints: Annotated[
        Literal["best", "last", "all", "none"], typer.Option("--checkpoints", help="Which checkpoints come as well.")
    ] = "best",
    as_json: AsJson = False,
) -> None:
    """Fetch what a run has written so far, also while it runs: record, report, checkpoints."""
    from hotloop.remote import fetch as fetching  # noqa: PLC0415 - an optional package
    from hotloop.remote import runs  # noqa: PLC0415
    from hotloop.report.text import count, size  # noqa: PLC0415

    found = runs.find(run)
    fetched = fetching.fetch(found, checkpoints)
    if as_json:
        echo_json({"name": found.name, "folder": found.folder, **fetched._asdict()})
        return
    typer.echo(f"{found.name} is {fetched.status}: {count(len(fetched.files), 'file')}, {size(fetched.size)}")
    if fetched.changing:
        typer.echo(f"Changing just now, so fetch again: {', '.join(fetched.changing)}")
    typer.echo(f"Folder: {found.folder}")
