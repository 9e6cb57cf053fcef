"""``hotloop runs``: list, show, compare and remove runs, cross-validations and searches; works without torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hotloop.cli.common import AsJson, console, echo_json
from hotloop.errors import ConfigError
from hotloop.report import runs
from hotloop.report.text import count, figure, line, moment, quantity, text, words

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    list_rows(folder, as_json=as_json)


def list_rows(folder: Path, *, as_json: bool, kinds: tuple[str, ...] = ()) -> None:
    """Print the runs below a folder, of some kinds alone where they are given.

    Raises:
        ConfigError: there is no such folder.
    """
    if not folder.is_dir():
        is_file = "is a file, and no folder of runs" if folder.is_file() else "no such folder"
        raise ConfigError(f"{folder}: {is_file}; `hotloop train` puts runs into runs/, or into run.folder")
    found = [row for row in runs.find(folder) if not kinds or row.kind in kinds]
    if as_json:
        echo_json([row.to_dict(whole=False) for row in found])
    elif found:
        console().print(_table(found, folder))
    else:
        typer.echo(f"No {' or '.join(kinds) or 'run'} below {folder}")


@app.command()
def show(run: Run, as_json: AsJson = False) -> None:
    """Show one run: its status, its settings and figures, and the folds or trials that it consists of.

    The whole report, with charts and what was compiled, is `hotloop report RUN`.
    """
    row, inside = runs.known(run), runs.members(run)
    if as_json:
        echo_json({**row.to_dict(), "members": [one.to_dict(whole=False) for one in inside]})
        return
    facts: dict[str, Any] = {"status": row.status, "place": row.place, "kind": row.kind, "problem": row.problem}
    facts |= {
        "recipe": row.recipe,
        "when": moment(row.created),
        "steps": row.steps,
        "best": _best(row),
        "ran": row.tier,
    }
    for title, values in (("", facts), ("Figures", row.figures), ("Settings", row.settings)):
        if title and values:
            console().print(Text(f"\n{title}", style="bold"))
        shown = {name: text(value) if title == "Settings" else quantity(name, value) for name, value in values.items()
                 if value not in (None, "")}  # fmt: skip
        console().print(_pairs(shown))
    if inside:
        console().print(Text(f"\n{'Folds' if row.kind == runs.FOLDS else 'Trials'}", style="bold"))
        console().print(_table(inside, run))


@app.command()
def compare(
    names: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="The folders of two or more runs.")],
    as_json: AsJson = False,
) -> None:
    """Compare runs: the settings in which they differ, then their metrics and measurements side by side.

    Of a search, its best trial is compared.
    """
    if len(names) < 2:  # noqa: PLR2004 - one run has nothing beside it
        raise ConfigError(f"hotloop runs compare {names[0]}: expected two or more runs")
    names = [runs.best_of(name) for name in names]
    rows = [runs.known(name) for name in names]
    settings = runs.beside([row.settings for row in rows])
    differ = {name: values for name, values in settings.items() if any(one != values[0] for one in values)}
    facts = [{"status": row.status, "ran": row.tier, "steps": row.steps} for row in rows]
    figures = runs.beside([{**fact, **row.figures} for fact, row in zip(facts, rows, strict=True)])
    if as_json:
        echo_json({"runs": list(map(str, names)), "settings": differ, "figures": figures})
        return
    for title, lines in (("Settings that differ", differ), ("Figures", figures)):
        table = _plain(title, *map(str, names))
        for name, values in lines.items():
            shown = [quantity(name, one) if title == "Figures" else text(one) for one in values]
            table.add_row(*(Text(line(one, 200)) for one in (name, *shown)))
        console().print(table if lines else Text("No setting differs"), "")


@app.command("rm")
def remove(
    names: Annotated[list[Path], typer.Argument(metavar="RUN...", help="The folders to delete.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    forget: Annotated[
        bool,
        typer.Option(
            "--forget", help="Also a run on a cluster that is gone: its key is deleted, and nothing can be fetched."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete runs with all that is in their folders; asks first. It refuses a run that trains now."""
    from hotloop.remote import runs as remote_runs  # noqa: PLC0415 - filelock is an optional package
    from hotloop.train import removal  # noqa: PLC0415

    gone = [one for name in names if (one := remote_runs.of_folder(name))] if forget else []

    def confirm() -> None:
        shown = ", ".join(line(str(name), 200) for name in names)
        many = sum(map(removal.files, names))
        if not yes:
            typer.confirm(f"Delete {shown} ({count(many, 'file')})?", abort=True, err=True)
        for one in gone:  # first: whoever follows it for the page would make its folder anew
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


def _pairs(values: Mapping[str, str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for name, value in values.items():
        table.add_row(Text(line(words(name) if "." not in name else name, 200)), Text(line(value, 1000)))
    return table


def _plain(*names: str) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(Text(line(name, 200)), overflow="fold", no_wrap=name == "run")
    return table
