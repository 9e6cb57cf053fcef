"""``hotloop train`` and ``hotloop kfold``: train a recipe once, or once for each fold of a cross-validation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hotloop.cli.common import INTERRUPTED, console, echo_json
from hotloop.errors import ConfigError, StepLostError
from hotloop.report import folds
from hotloop.report.terminal import draw

if TYPE_CHECKING:
    from hotloop.train.kfold import Study

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.py:make] [SETTING=VALUE]...",
        help="A program of your own, and settings, such as training.num_epochs=3 or program.lr=1e-3.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help="A YAML file of settings, or a folder of setting groups."),
]
Show = Annotated[bool, typer.Option("--show", help="Print the settings as YAML, and train nothing.")]


def train(
    overrides: Overrides = None,
    config: Config = None,
    show: Show = False,
) -> None:
    """Train a program of your own, FILE.py:make, or a recipe; every setting is described in docs/settings.md.

    The parameters of make are the program's settings, program.NAME=VALUE; FILE.py:make --help lists them. Without a
    program, recipe=criteria fine-tunes a cross-encoder on pairs of a phrase and a criterion. Resume an interrupted run
    with run.resume=FOLDER. kfold.n_splits=5 makes it a cross-validation, as hotloop kfold does.
    """
    _begin(overrides or [], config, show=show, as_json=False)


def kfold(
    overrides: Overrides = None,
    config: Config = None,
    show: Show = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary of all folds as JSON.")] = False,
) -> None:
    """Cross-validate a recipe: each fold is held out once, by a run of its own.

    kfold.n_splits sets the number of folds (5 by default), kfold.fold=2 runs that fold alone, kfold.inner_trials=20
    searches within each fold first. Resume an interrupted run with run.resume=FOLDER. Exit code 1: a fold has failed.
    """
    from hotloop.train.kfold import with_splits  # noqa: PLC0415 - loads torch and the optional packages

    _begin(with_splits(overrides or [], config), config, show=show, as_json=as_json)


def _begin(overrides: list[str], config: Path | None, *, show: bool, as_json: bool) -> None:
    """Start or resume the run that the settings name: a single run or a cross-validation."""
    from hotloop import recipes  # noqa: PLC0415 - loads torch and the optional packages
    from hotloop.train import configure, program, restart, start  # noqa: PLC0415
    from hotloop.train.kfold import prepare  # noqa: PLC0415

    if show:
        typer.echo(configure.to_yaml(program.filled(configure.load(overrides, config))), nl=False)
        return
    study = prepare(overrides, config)
    if study:
        _run_folds(study, overrides, as_json=as_json)
        return
    if as_json:
        raise ConfigError("--json prints the summary of several folds; a single run has its own in record.json")
    begun = start.prepare(overrides, config)
    try:
        outcome = recipes.load(begun.settings.recipe.name).train(begun)
    except StepLostError as error:
        restart.one_rung_down(error, begun, overrides)
    if outcome.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _run_folds(study: Study, overrides: list[str], *, as_json: bool) -> None:
    """Run a cross-validation, print its summary, and exit with the code of its outcome."""
    from hotloop import recipes  # noqa: PLC0415 - loads torch and the optional packages
    from hotloop.train import restart  # noqa: PLC0415
    from hotloop.train.kfold import run  # noqa: PLC0415
    from hotloop.train.start import Start  # noqa: PLC0415

    progress = Console(stderr=True, highlight=False) if as_json else None
    try:
        ended = run(study, recipes.load(study.settings.recipe.name), progress)
    except StepLostError as error:
        begun = Start(study.settings, study.folder, study.before)
        restart.one_rung_down(error, begun, overrides, verb="kfold")
    if as_json:
        echo_json(ended.document)
    else:
        console().print(draw(folds.build(ended.document)))
    if ended.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if ended.status != "finished":
        raise typer.Exit(1)
