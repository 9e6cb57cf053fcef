"""``hotloop hpo`` and ``hotloop hpo_fast`` search for settings; ``hotloop hpo best`` writes the best ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.common import INTERRUPTED, echo_json
from hotloop.cli.train import Config  # noqa: TC001 - Typer reads the annotations of a command when it runs
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from hotloop.train.settings import Settings

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.py:make] [SETTING=VALUE]... | best [STUDY]",
        help="A program of your own, and settings, such as hpo.sampler=gp; or best, to print and write the best "
        "settings of a study, which is named by its folder or by the settings of its search.",
    ),
]
Trials = Annotated[int | None, typer.Option("--n-trials", metavar="N", help="Trials in all: hpo.n_trials.")]
Workers = Annotated[int | None, typer.Option("--workers", metavar="N", help="Processes that run them: hpo.workers.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")]
Trial = Annotated[
    int | None, typer.Option("--trial", metavar="N", help="With best: the settings of that trial, not of the best one.")
]


def hpo(  # noqa: PLR0913, PLR0917 - options of the command line
    arguments: Arguments = None,
    n_trials: Trials = None,
    workers: Workers = None,
    fast: Annotated[bool, typer.Option("--fast", help="A cheap first pass: the settings of hpo=fast.")] = False,
    config: Config = None,
    as_json: AsJson = False,
    trial: Trial = None,
) -> None:
    """Search for the settings that train best, or go on with a search: docs/search.md.

    The same command goes on after a kill or Ctrl-C; trials that are over count. `hotloop hpo best STUDY` prints the
    best settings, and writes them as best.yaml for `hotloop train --config`.
    """
    named = {"hpo": "fast" if fast else None, "hpo.n_trials": n_trials, "hpo.workers": workers}
    options = [f"{name}={value}" for name, value in named.items() if value is not None]
    if arguments and arguments[0] == "best":
        _best(_folder(arguments[1:], options, config), trial, as_json=as_json)
    else:
        _search([*(arguments or []), *options], config, as_json=as_json)


def hpo_fast(
    arguments: Arguments = None,
    n_trials: Trials = None,
    workers: Workers = None,
    config: Config = None,
    as_json: AsJson = False,
) -> None:
    """Search cheaply, to see where a space is good at all: `hotloop hpo --fast`."""
    hpo(arguments, n_trials, workers, True, config, as_json)


def _search(overrides: list[str], config: Path | None, *, as_json: bool) -> None:
    from hotloop.train import configure, live  # noqa: PLC0415 - loads the optional packages
    from hotloop.train.search import supervise, told  # noqa: PLC0415
    from hotloop.train.search.preparing import prepared  # noqa: PLC0415

    settings = prepared(configure.load_search(overrides, config))
    if settings.run.folder or settings.run.resume:
        raise ConfigError(
            "run.folder and run.resume belong to a run: a search has hpo.folder, and the same command resumes it"
        )
    _announce(settings)

    hpo = settings.hpo
    maximize = hpo.towards == "maximize"
    progress = live.Progress(hpo.folder, hpo.metric, hpo.n_trials, hpo.workers, maximize=maximize)
    with live.View(progress) as view:
        ended = supervise.search(settings, lambda event: view.hear(told.to_dict(event), told.line(event)))
    if as_json:
        echo_json({"status": ended.status, "folder": str(ended.folder), **ended.document})
    else:
        _summarize(ended.status, ended.folder, ended.document)
    if ended.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if ended.document.get("best") is None:
        raise typer.Exit(1)


def _announce(settings: Settings) -> None:
    """Print on stderr what a search varies, and what makes its trials differ from a run."""
    from hotloop.train import quantise  # noqa: PLC0415 - loads the optional packages
    from hotloop.train.search import space  # noqa: PLC0415

    hpo, searched = settings.hpo, space.parse(settings)
    names = ", ".join(setting.name for setting in searched.searched)
    typer.echo(f"Search {hpo.folder}: {hpo.n_trials} trials by {hpo.sampler}, pruner {hpo.pruner}", err=True)
    objective = ", ".join(f"{towards} {metric}" for metric, towards in hpo.objectives.items())
    typer.echo(f"Objective: {objective}. Searched: {names}", err=True)
    changed = [space.override(name, value) for name, value in space.trial_changes(settings).items()]
    if changed:
        typer.echo(f"In trials alone: {' '.join(changed)}", err=True)
    if settings.training.optimization.use_torch_compile is not False:
        for text in quantise.warnings(searched.compiled, hpo.n_trials):
            typer.echo(text, err=True)


def _summarize(status: str, folder: Path, document: dict[str, object]) -> None:
    """Print how a search ended: its trials by state, the best one, and what is left."""
    from hotloop.train.search.document import BEST  # noqa: PLC0415 - loads the optional packages

    attempts = document.get("trials")
    states = [attempt["state"] for attempt in attempts] if isinstance(attempts, list) else []
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    typer.echo(f"Search {status}: {counts or 'no trial'}")
    if document.get("best") is not None:
        typer.echo(f"Best: trial {document['best']}. Its settings: hotloop train --config {folder / BEST}")
    if front := document.get("front"):
        names = ", ".join(str(number) for number in front) if isinstance(front, list) else ""
        typer.echo(
            f"Best by one metric or another: trials {names}. Settings of one: hotloop hpo best {folder} --trial N"
        )
    if status != "finished" or document.get("left"):
        typer.echo(f"{document.get('left')} trials are left: the same command goes on")
    typer.echo(f"Report: hotloop report {folder}")


def _folder(arguments: list[str], options: list[str], config: Path | None) -> Path:
    """Return the study's folder: the folder that is named, or that of the search with these settings.

    Raises:
        ConfigError: several studies are named.
    """
    from hotloop.train import configure  # noqa: PLC0415 - loads the optional packages

    places = [argument for argument in arguments if "=" not in argument or Path(argument).is_dir()]
    if not places:
        return Path(configure.load([*arguments, *options], config).hpo.folder)
    if len(arguments) > 1:
        raise ConfigError(
            "hotloop hpo best: expected the folder of one study, such as runs/criteria/search, or the settings of its "
            "search, such as recipe=digits"
        )
    return Path(places[0])


def _best(folder: Path, number: int | None, *, as_json: bool) -> None:
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
