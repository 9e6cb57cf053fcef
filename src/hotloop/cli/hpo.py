"""``hotloop hpo``: search for settings, and write the best ones; ``hpo_fast`` searches cheaply."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.common import INTERRUPTED, DefaultGroup, ProgramCommand, echo_json
from hotloop.cli.train import Config, Dry, Overrides, Printed, Quiet, echo_outcome
from hotloop.errors import ConfigError
from hotloop.record import SUBMITTED
from hotloop.report import study as study_report
from hotloop.report.runs import SEARCH, find

if TYPE_CHECKING:
    from hotloop.train.settings import Settings

Trials = Annotated[int | None, typer.Option("--n-trials", metavar="N", help="Trials in all: hpo.n_trials.")]
Workers = Annotated[
    str | None,
    typer.Option("--workers", metavar="N", help="Processes that run them: hpo.workers, or auto."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
Fast = Annotated[bool, typer.Option("--fast", help="A cheap first pass: the settings of hpo=fast.")]


class SearchGroup(DefaultGroup):
    """The commands; all else is the arguments of ``search``."""

    default = "search"


app = typer.Typer(cls=SearchGroup, help="Search for the settings that train best; `hotloop hpo SETTINGS` is `search`.")


@app.command(cls=ProgramCommand)
def search(  # noqa: PLR0913, PLR0917 - options of the command line
    arguments: Overrides = None,
    n_trials: Trials = None,
    workers: Workers = None,
    fast: Fast = False,
    config: Config = None,
    dry_run: Dry = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search for the settings that train best, or go on with a search: docs/how-to/search.md.

    After a kill or Ctrl-C, the same command goes on with the trials that are left. `hotloop hpo best STUDY` prints the
    best settings, and writes them as best.yaml for `hotloop train --config`.
    """
    named = {"hpo": "fast" if fast else None, "hpo.n_trials": n_trials, "hpo.workers": workers}
    options = [f"{name}={value}" for name, value in named.items() if value is not None]
    _search([*(arguments or []), *options], config, Printed(dry=dry_run, as_json=as_json, quiet=quiet))


@app.command()
def best(
    study: Annotated[
        Path | None, typer.Argument(metavar="[STUDY]", help="A search's folder; by default the newest below runs/.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the best settings of a study, and write them as best.yaml into its folder."""
    from hotloop.train import conf_files  # noqa: PLC0415 - loads the optional packages
    from hotloop.train.search import document  # noqa: PLC0415

    places = [study] if study else [row.folder for row in find(Path("runs")) if row.kind == SEARCH]
    if not places:
        raise ConfigError("there is no search below runs/: name the folder of one")
    found, note = document.refresh(places[0])
    values, path = document.best_values(found), places[0] / document.BEST
    typer.echo(f"{note}\nTrial {found['best']}. Train with: hotloop train --config {path}".lstrip(), err=True)
    if as_json:
        echo_json({"trial": found["best"], "values": values, "settings": conf_files.read(path), "file": str(path)})
    else:
        typer.echo(path.read_text(), nl=False)


def hpo_fast(  # noqa: PLR0913, PLR0917 - as search
    arguments: Overrides = None,
    n_trials: Trials = None,
    workers: Workers = None,
    config: Config = None,
    dry_run: Dry = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Search cheaply, to see where a space is good at all: `hotloop hpo --fast`."""
    search(arguments, n_trials, workers, True, config, dry_run, as_json, quiet)


def _search(overrides: list[str], config: Path | None, asked: Printed) -> None:
    from hotloop.train import configure  # noqa: PLC0415 - loads the optional packages
    from hotloop.train.search import command  # noqa: PLC0415
    from hotloop.train.search.preparing import prepared  # noqa: PLC0415

    with asked.alone():
        settings = command.with_workers(prepared(configure.load_search(overrides, config)))
        if settings.run.folder or settings.run.resume:
            raise ConfigError(
                "run.folder and run.resume belong to a run: a search has hpo.folder, and the same command resumes it"
            )
        if not asked.quiet:
            _announce(settings)
        if asked.dry:
            checked = command.check(settings, asked.console)
    if asked.dry:
        echo_outcome(checked, asked)
        return
    say = (lambda _: None) if asked.quiet else (lambda line: typer.echo(line, err=True))
    with asked.alone(Path(settings.hpo.folder)):
        ended = command.search(settings, say)
    found = ended.document.get("best")
    if asked.as_json:
        echo_json({"status": ended.status, "folder": str(ended.folder), **ended.document})
    elif asked.quiet:
        told = "no trial is complete" if found is None else f"best trial {found}"
        typer.echo(f"{ended.status}: {told}, {ended.folder}")
    else:
        _summarize(ended.status, ended.folder, ended.document)
    if ended.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if found is None:
        raise typer.Exit(1)


def _announce(settings: Settings) -> None:
    """Print on stderr what a search varies, and what makes its trials differ from a run."""
    from hotloop.train.search import space  # noqa: PLC0415 - loads the optional packages

    hpo = settings.hpo
    names = ", ".join(setting.name for setting in space.parse(settings).searched)
    typer.echo(f"Search {hpo.folder}: {hpo.n_trials} trials by {hpo.sampler}, pruner {hpo.pruner}", err=True)
    typer.echo(f"Objective: {hpo.towards} {hpo.metric}. Searched: {names}", err=True)
    changed = [space.override(name, value) for name, value in space.trial_changes(settings).items()]
    if changed:
        typer.echo(f"In trials alone: {' '.join(changed)}", err=True)


def _summarize(status: str, folder: Path, document: dict[str, object]) -> None:
    """Print how a search ended: its trials by state, the best one, and what is left.

    The commands that go on with it name a folder here; a job on a cluster prints those for the machine of the user.
    """
    from hotloop.train.search.document import BEST  # noqa: PLC0415 - loads the optional packages

    attempts, name = document.get("trials"), os.environ.get(SUBMITTED)
    counts = study_report.counts_of(attempts) if isinstance(attempts, list) else ""
    typer.echo(f"Search {status}: {counts or 'no trial'}")
    if document.get("best") is not None:
        train = f"hotloop train --config {folder / BEST}"
        typer.echo(f"Best: trial {document['best']}. Its settings{f' are fetched as {BEST}' if name else f': {train}'}")
    if left := document.get("left"):
        again = f": hotloop submit resume {name}" if name else ": the same command goes on"
        typer.echo(f"{left} trials are left{again}")
    if not name:
        typer.echo(f"Report: hotloop report {folder}")
