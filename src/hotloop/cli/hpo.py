"""``hotloop hpo``: search for settings, write the best ones, list and show studies; ``hpo_fast`` searches cheaply."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli import runs
from hotloop.cli.common import INTERRUPTED, DefaultGroup, ProgramCommand, echo_json, echo_result
from hotloop.cli.report import refresh_study
from hotloop.cli.train import Config, Dry, Overrides, Printed, Quiet, echo_outcome
from hotloop.errors import ConfigError
from hotloop.record import SUBMITTED
from hotloop.report import study as study_report
from hotloop.report.runs import SEARCH, find
from hotloop.report.terminal import draw

if TYPE_CHECKING:
    from hotloop.train.settings import Settings

Trials = Annotated[int | None, typer.Option("--n-trials", metavar="N", help="Trials in all: hpo.n_trials.")]
Workers = Annotated[
    str | None,
    typer.Option("--workers", metavar="N", help="Processes that run them: hpo.workers, or auto."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
Named = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[STUDY]",
        help="A study by its folder, or by its search: FILE.py:make, recipe=digits; by default the newest below runs/.",
    ),
]

Fast = Annotated[bool, typer.Option("--fast", help="The study of hotloop hpo --fast.")]


class SearchGroup(DefaultGroup):
    """The commands; all else is the arguments of ``search``."""

    default = "search"


app = typer.Typer(cls=SearchGroup, help="Search for the settings that train best; `hotloop hpo SETTINGS` is `search`.")


@app.command(cls=ProgramCommand)
def search(  # noqa: PLR0913, PLR0917 - options of the command line
    arguments: Overrides = None,
    n_trials: Trials = None,
    workers: Workers = None,
    fast: Annotated[bool, typer.Option("--fast", help="A cheap first pass: the settings of hpo=fast.")] = False,
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
    study: Named = None,
    config: Config = None,
    fast: Fast = False,
    trial: Annotated[
        int | None, typer.Option("--trial", metavar="N", help="The settings of that trial, not of the best one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the best settings of a study, and write them as best.yaml into its folder."""
    _write_best(_folder(study or [], config, fast=fast), trial, as_json=as_json)


@app.command("list")
def list_studies(
    place: Annotated[
        str, typer.Argument(metavar="[FOLDER]", help="Where to look, or whose: FILE.py:make, recipe=digits.")
    ] = "runs",
    as_json: AsJson = False,
) -> None:
    """List the searches below a folder, or of a program or a recipe, the newest first, as hotloop runs list does."""
    folder = Path(place) if _is_folder(place) else _folder([place], None, fast=False).parent
    runs.list_rows(folder, as_json=as_json, kinds=(SEARCH,))


@app.command()
def show(study: Named = None, config: Config = None, fast: Fast = False, as_json: AsJson = False) -> None:
    """Show a study: how many trials are over, the best ones, and which settings mattered."""
    folder = _folder(study or [], config, fast=fast)
    refresh_study(folder)
    view = study_report.build(study_report.SCHEMA.load(folder))
    echo_result(view.to_dict(), draw(view), None, as_json=as_json)


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
        typer.echo(
            f"{ended.status}: {'no trial is complete' if found is None else f'best trial {found}'}, {ended.folder}"
        )
    else:
        _summarize(ended.status, ended.folder, ended.document)
    if ended.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if found is None:
        raise typer.Exit(1)


def _announce(settings: Settings) -> None:
    """Print on stderr what a search varies, and what makes its trials differ from a run."""
    from hotloop.train.search import space  # noqa: PLC0415 - loads the optional packages

    hpo, searched = settings.hpo, space.parse(settings)
    names = ", ".join(setting.name for setting in searched.searched)
    typer.echo(f"Search {hpo.folder}: {hpo.n_trials} trials by {hpo.sampler}, pruner {hpo.pruner}", err=True)
    typer.echo(f"Objective: {hpo.towards} {hpo.metric}. Searched: {names}", err=True)
    changed = [space.override(name, value) for name, value in space.trial_changes(settings).items()]
    if changed:
        typer.echo(f"In trials alone: {' '.join(changed)}", err=True)
    if settings.training.optimization.use_torch_compile is not False:
        for text in searched.warnings(hpo.n_trials):
            typer.echo(text, err=True)


def _summarize(status: str, folder: Path, document: dict[str, object]) -> None:
    """Print how a search ended: its trials by state, the best one, and what is left.

    The commands that go on with it name a folder here; a job on a cluster prints those for the machine of the user.
    """
    from hotloop.train.search.document import BEST  # noqa: PLC0415 - loads the optional packages

    attempts = document.get("trials")
    counts = study_report.counts_of(attempts) if isinstance(attempts, list) else ""
    typer.echo(f"Search {status}: {counts or 'no trial'}")
    if name := os.environ.get(SUBMITTED):
        if document.get("best") is not None:
            typer.echo(f"Best: trial {document['best']}. Its settings are fetched as {BEST}")
        if document.get("left"):
            typer.echo(f"{document['left']} trials are left: hotloop submit resume {name}")
        return
    if document.get("best") is not None:
        typer.echo(f"Best: trial {document['best']}. Its settings: hotloop train --config {folder / BEST}")
    if status != "finished" or document.get("left"):
        typer.echo(f"{document.get('left')} trials are left: the same command goes on")
    typer.echo(f"Report: hotloop report {folder}")


def _folder(arguments: list[str], config: Path | None, *, fast: bool) -> Path:
    """Return the study's folder: the folder that is named, that of the search with these settings, or the newest one.

    Raises:
        ConfigError: several studies are named, or none, and there is none below ``runs/``.
    """
    from hotloop.train import configure  # noqa: PLC0415 - loads the optional packages

    places = [argument for argument in arguments if _is_folder(argument)]
    if len(places) == len(arguments) == 1:
        return Path(places[0])
    if places:
        raise ConfigError(
            "expected the folder of one study, such as runs/criteria/search, or the settings of its search, such as "
            "recipe=digits"
        )
    if arguments or config or fast:
        return Path(configure.load([*arguments, *(["hpo=fast"] if fast else [])], config).hpo.folder)
    found = [row.folder for row in find(Path("runs")) if row.kind == SEARCH]
    if not found:
        raise ConfigError(
            "there is no search below runs/: `hotloop hpo` begins one, and hpo.folder names another place"
        )
    rest = f", the last to begin of {len(found)} searches below runs/" if len(found) > 1 else ""
    typer.echo(f"Of {found[0]}{rest}", err=True)
    return found[0]


def _is_folder(argument: str) -> bool:
    """Say whether an argument names a place, and not a program or a setting."""
    from hotloop.train import configure  # noqa: PLC0415 - as above

    return Path(argument).is_dir() or ("=" not in argument and configure.program_name(argument) is None)


def _write_best(folder: Path, number: int | None, *, as_json: bool) -> None:
    """Print the best settings of a study, or those of a trial of it, and write them into its folder."""
    from hotloop.train import configure  # noqa: PLC0415 - loads the optional packages
    from hotloop.train.search import document  # noqa: PLC0415

    found, note = document.refresh(folder)
    settings, path = document.write_best(folder, found, number)
    number = found["best"] if number is None else number
    if note:
        typer.echo(note, err=True)
    best = next(trial for trial in found["trials"] if (trial["number"], trial["state"]) == (number, "complete"))
    typer.echo(f"Trial {best['number']}: {found['metric']} {best['value']:.4f}. Written: {path}", err=True)
    typer.echo(f"Train with: hotloop train --config {path}", err=True)
    if as_json:
        result = {"trial": best["number"], found["metric"]: best["value"], "values": best["values"], "file": str(path)}
        echo_json({**result, "settings": configure.to_dict(settings)})
    else:
        typer.echo(configure.to_yaml(settings), nl=False)
