"""``hotloop train`` and ``hotloop eval``: settings by Hydra overrides, a recipe by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli import kfold
from hotloop.cli.kfold import INTERRUPTED, Config, Overrides, Show
from hotloop.errors import ConfigError, StepLostError
from hotloop.report import folds


def register(app: typer.Typer) -> None:
    """Add ``train`` and ``eval`` to the command line."""
    app.command()(train)
    app.command("eval")(evaluate)


def train(
    overrides: Overrides = None,
    config: Config = None,
    show: Show = False,
) -> None:
    """Train a recipe; every setting is described in docs/settings.md.

    recipe=criteria (the default) fine-tunes a cross-encoder on pairs of a phrase and a criterion. Resume an interrupted
    run with run.resume=FOLDER. kfold.n_splits=5 makes it a cross-validation, as hotloop kfold does.
    """
    begin(overrides or [], config, show=show, as_json=False)


def begin(overrides: list[str], config: Path | None, *, show: bool, as_json: bool) -> None:
    """Begin, or go on with, what the settings name: a single run or a cross-validation."""
    from hotloop import recipes  # noqa: PLC0415 - torch and the optional packages are loaded for this command alone
    from hotloop.train import configure, restart, start  # noqa: PLC0415
    from hotloop.train import kfold as studies  # noqa: PLC0415

    if show:
        typer.echo(configure.to_yaml(configure.load(overrides, config)), nl=False)
        return
    study = studies.prepare(overrides, config)
    if study:
        kfold.run(study, overrides, as_json=as_json)
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


def evaluate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="checkpoint=FILE|run=FOLDER|fold=N [SETTING=VALUE]...",
            help="What to judge: a checkpoint, a run by its folder (its best checkpoint), or the folds of a "
            "cross-validation, all or one (fold=N without run= is of the newest in runs/); then changed settings.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Judge a checkpoint on the validation side of its data; of a cross-validation, on the rows its fold held out."""
    from hotloop import recipes  # noqa: PLC0415 - as in train
    from hotloop.train import checkpoint, configure  # noqa: PLC0415

    folder, fold, rest = _study(arguments)
    if folder:
        kfold.judge(folder, fold, rest, as_json=as_json)
        return
    path, overrides = _chosen(arguments)
    document = checkpoint.load(path)
    settings = configure.from_dict(document["settings"], overrides)
    metrics = recipes.load(settings.recipe.name).evaluate(settings, checkpoint.weights(document))
    step = document["position"]["step"]
    if as_json:
        typer.echo(
            json.dumps({"checkpoint": str(path), "step": step, "split": "validation", "metrics": metrics}, indent=2)
        )
        return
    typer.echo(f"{path}, step {step}, on the validation split:")
    for name, value in metrics.items():
        typer.echo(f"  {name:<10} {value:.4f}")


def _study(arguments: list[str]) -> tuple[Path | None, int | None, list[str]]:
    """Give the cross-validation that is meant, which fold of it, and the overrides; no folder where none is meant."""
    runs = [Path(one.removeprefix("run=")) for one in arguments if one.startswith("run=")]
    wanted = [one.removeprefix("fold=") for one in arguments if one.startswith("fold=")]
    if wanted and not any(one.startswith(("run=", "checkpoint=")) for one in arguments):
        runs = _newest_study()
    several = len(runs) == 1 and folds.is_cross_validation(runs[0])
    if wanted and not several:
        raise ConfigError(
            f"fold={wanted[0]} names a fold of a cross-validation: expected run=FOLDER with the folder that hotloop "
            f"kfold wrote {folds.DOCUMENT} into"
        )
    rest = [one for one in arguments if not one.startswith(("run=", "fold="))]
    return (runs[0], kfold.parse_fold(wanted[-1]) if wanted else None, rest) if several else (None, None, rest)


def _newest_study() -> list[Path]:
    """Give the folder of the cross-validation in ``runs/`` that was at work last; none where none is there."""
    found = sorted(Path("runs").glob(f"*/*/{folds.DOCUMENT}"), key=lambda path: path.stat().st_mtime)
    return [path.parent for path in found[-1:]]


def _chosen(arguments: list[str]) -> tuple[Path, list[str]]:
    """Give the checkpoint that is meant, and the overrides among the arguments."""
    from hotloop.train import checkpoint  # noqa: PLC0415 - as in train

    named = [one for one in arguments if one.startswith(("checkpoint=", "run="))]
    if len(named) != 1 or not named[0].partition("=")[2]:
        raise ConfigError(
            f"hotloop eval: expected one of checkpoint=FILE and run=FOLDER, found {' '.join(named) or 'none'}"
        )
    what, _, value = named[0].partition("=")
    path = Path(value) if what == "checkpoint" else checkpoint.find(Path(value), checkpoint.BEST, checkpoint.LAST)
    return path, [one for one in arguments if one is not named[0]]
