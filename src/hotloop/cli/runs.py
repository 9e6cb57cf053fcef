"""``hotloop runs``: list, show, compare and remove runs, cross-validations and searches; works without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hotloop.cli.common import AsJson, console, echo_json
from hotloop.errors import ConfigError
from hotloop.report import runs
from hotloop.report.text import count, figure, line, moment, quantity, text, words

app = typer.Typer(no_args_is_help=True)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, a cross-validation or a search.")]
_STYLES = {"finished": "green", "running": "cyan", runs.ON_CLUSTER: "cyan", "open": "cyan"}
_STYLES |= {"interrupted": "yellow", "killed": "yellow"}


@app.command("list")
def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to look for runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs below a folder, the newest first: status, what ran, when, steps, and the best metric.

    If FOLDER is a cross-validation or a search, list its folds or trials. A run that cannot be read is listed with
    what is wrong with it.
    """
    if not folder.is_dir():
        is_file = "is a file, and no folder of runs" if folder.is_file() else "no such folder"
        raise ConfigError(f"{folder}: {is_file}; `hotloop train` puts runs into runs/, or into run.folder")
    found = runs.find(folder)
    if as_json:
        echo_json([row.to_dict(whole=False) for row in found])
    elif found:
        console().print(_table(found, folder))
    else:
        typer.echo(f"No run below {folder}")


@app.command()
def show(run: Run, as_json: AsJson = False) -> None:
    """Show one run: its status, its settings and figures, and the folds or trials that it consists of.

    The whole report, with charts and what was compiled, is `hotloop report RUN`.
    """
    row, inside = runs.known(run), runs.members(run)
    if as_json:
        echo_json({**row.to_dict(), "members": [one.to_dict(whole=False) for one in inside]})
        return
    facts = {
        "status": row.status,
        "place": row.place,
        "kind": row.kind,
        "problem": row.problem,
        "recipe": row.recipe,
        "when": moment(row.created),
        "steps": row.steps,
        "best": _best(row),
        "ran": row.tier,
    }
    figures = {name: quantity(name, value) for name, value in row.figures.items()}
    for title, values in (("", facts), ("Figures", figures), ("Settings", row.settings)):
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        for name, value in values.items():
            if value not in (None, ""):
                table.add_row(Text(line(name if "." in name else words(name), 200)), Text(line(value, 1000)))
        console().print(Text(title, style="bold"), table)
    if inside:
        console().print(Text("Folds" if row.kind == runs.FOLDS else "Trials", style="bold"), _table(inside, run))


@app.command()
def compare(
    names: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="The folders of two or more runs.")],
    as_json: AsJson = False,
) -> None:
    """Compare runs: the settings in which they differ, then their metrics and measurements side by side."""
    if len(names) < 2:  # noqa: PLR2004 - one run has nothing beside it
        raise ConfigError(f"hotloop runs compare {names[0]}: expected two or more runs")
    rows = [runs.known(name) for name in names]
    settings = runs.beside([row.settings for row in rows])
    differ = {name: values for name, values in settings.items() if any(one != values[0] for one in values)}
    figures = runs.beside([{"status": row.status, "ran": row.tier, "steps": row.steps, **row.figures} for row in rows])
    if as_json:
        echo_json({"runs": list(map(str, names)), "settings": differ, "figures": figures})
        return
    shown = {name: [quantity(name, one) for one in values] for name, values in figures.items()}
    for title, values in (("Settings that differ" if differ else "No setting differs", differ), ("Figures", shown)):
        table = _plain(title, *map(str, names))
        for name, each in values.items():
            table.add_row(*(Text(line(one, 200)) for one in (name, *each)))
        console().print(table, "")


@app.command("rm")
def remove(
    names: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders to delete.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    forget: Annotated[
        bool,
        typer.Option("--forget", help="Also a run on a cluster that is gone: nothing can be fetched any more."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete runs with all that is in their folders; asks first. It refuses a run that trains now."""
    from hotloop.remote import runs as remote_runs  # noqa: PLC0415
    from hotloop.train import removal  # noqa: PLC0415

    gone = [one for name in names if (one := remote_runs.of_folder(name))] if forget else []

    def confirm() -> None:
        shown = ", ".join(line(str(name), 200) for name in names)
        many = sum(map(removal.files, names))
        if not yes:
            typer.confirm(f"Delete {shown} ({count(many, 'file')})?", abort=True, err=True)
        for one in gone:
            remote_runs.forget(one.name)

    removal.remove(names, confirm, on_cluster=forget)
    if as_json:
        echo_json({"removed": list(map(str, names))})
    else:
        typer.echo(f"Deleted: {', '.join(map(str, names))}")


def _best(row: runs.Row) -> str:
    mean = "mean " if row.kind == runs.FOLDS else ""
    return f"{mean}{row.metric} {figure(row.best)}" if row.best is not None else ""


def _table(rows: list[runs.Row], folder: Path) -> Group:
    """Return a table of runs, and a line below it for each that something is wrong with."""
    table = _plain("run", "status", "recipe", "when", "steps", "best", "ran")
    below = []
    for row in rows:
        name = line(str(row.folder.relative_to(folder)) if row.folder != folder else str(folder), 200)
        member = {runs.FOLDS: "fold", runs.SEARCH: "trial"}.get(row.kind)
        steps = count(row.members or 0, member) if member else text(row.steps)
        status = Text(row.status, style=_STYLES.get(row.status, "red"))
        cells = (row.recipe.rpartition("/")[2], moment(row.created), steps, _best(row), row.tier)
        table.add_row(Text(name), status, *map(Text, cells))
        below += [Text(f"{name}: {one}") for one in (row.place, row.problem) if one]
    return Group(table, *below)


def _plain(*names: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(Text(line(name, 200)), overflow="fold", no_wrap=name == "run")
    return table
