"""``hotloop eval``: the metrics of a checkpoint, or of the folds of a cross-validation, on held-out rows."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hotloop.cli.common import console, echo_json
from hotloop.errors import ConfigError
from hotloop.report import folds


def evaluate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="checkpoint=FILE|run=FOLDER [fold=N] [SETTING=VALUE]...",
            help="A checkpoint, a run (its best checkpoint), or the folds of a cross-validation, all or one. "
            "Then changed settings.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Judge a checkpoint on the validation side of its data; a fold's checkpoint on the rows that the fold held out."""
    from hotloop import recipes  # noqa: PLC0415 - loads torch and the optional packages
    from hotloop.train import checkpoint, start  # noqa: PLC0415

    folder = _study_folder(arguments)
    if folder is not None:
        _judge_folds(folder, arguments, as_json=as_json)
        return
    path, overrides = _checkpoint(arguments)
    document = checkpoint.load(path)
    settings = start.settings_to_judge(document, overrides)
    with contextlib.redirect_stdout(sys.stderr):  # what the program prints
        metrics = recipes.load(settings.recipe.name).evaluate(settings, checkpoint.judged(document))
    step = document["position"]["step"]
    if as_json:
        echo_json({"checkpoint": str(path), "step": step, "split": "validation", "metrics": metrics})
        return
    typer.echo(f"{path}, step {step}, on the validation split:")
    for name, value in metrics.items():
        typer.echo(f"  {name:<10} {value:.4f}")


def _value(arguments: list[str], name: str) -> str | None:
    """Return the value of the last argument ``NAME=VALUE``."""
    values = [argument.removeprefix(f"{name}=") for argument in arguments if argument.startswith(f"{name}=")]
    return values[-1] if values else None


def _study_folder(arguments: list[str]) -> Path | None:
    """Return the folder of the cross-validation that the arguments name, None where they name a single run.

    Raises:
        ConfigError: ``fold=N`` without a cross-validation.
    """
    run, fold = _value(arguments, "run"), _value(arguments, "fold")
    if run is not None and folds.SCHEMA.is_at(Path(run)):
        return Path(run)
    if fold is not None:
        raise ConfigError(
            f"fold={fold} names a fold of a cross-validation: expected run=FOLDER with the folder that hotloop "
            f"kfold wrote {folds.DOCUMENT} into"
        )
    return None


def _checkpoint(arguments: list[str]) -> tuple[Path, list[str]]:
    """Return the path of the checkpoint that the arguments name, and the overrides beside it.

    Raises:
        ConfigError: the arguments name no checkpoint or several.
    """
    from hotloop.train import checkpoint  # noqa: PLC0415 - loads torch

    named = [argument for argument in arguments if argument.startswith(("checkpoint=", "run="))]
    if len(named) != 1 or not named[0].partition("=")[2]:
        raise ConfigError(
            f"hotloop eval: expected one of checkpoint=FILE and run=FOLDER, found {' '.join(arguments) or 'none'}"
        )
    kind, _, value = named[0].partition("=")
    path = Path(value) if kind == "checkpoint" else checkpoint.find(Path(value), checkpoint.BEST, checkpoint.LAST)
    return path, [argument for argument in arguments if argument is not named[0]]


def _judge_folds(folder: Path, arguments: list[str], *, as_json: bool) -> None:
    """Judge the best checkpoint of each fold, or of the wanted fold, on the rows that it held out.

    Raises:
        ConfigError: the number behind ``fold=`` is no number.
    """
    from hotloop import recipes  # noqa: PLC0415 - loads torch and the optional packages
    from hotloop.train import kfold  # noqa: PLC0415

    wanted = _value(arguments, "fold")
    if wanted is not None and not wanted.isdecimal():
        raise ConfigError(f"fold={wanted}: expected the number of a fold, counted from 0")
    fold = None if wanted is None else int(wanted)
    overrides = [argument for argument in arguments if not argument.startswith(("run=", "fold="))]
    document = folds.load(folder)
    with contextlib.redirect_stdout(sys.stderr):  # what the program prints
        judged = kfold.judge(folder, fold, recipes.load(document["recipe"]), overrides)
    over_folds = kfold.spread([result["metrics"] for result in judged])
    missing = {entry["fold"] for entry in document["folds"]} - {result["fold"] for result in judged}
    for number in sorted(missing) if fold is None else ():
        typer.echo(f"fold {number} has no checkpoint yet, and is left out", err=True)
    if as_json:
        echo_json({"run": str(folder), "split": "validation", "folds": judged, "over_folds": over_folds})
        return
    typer.echo(f"{folder}, each fold's best checkpoint on its held-out rows:")
    console().print(_table(judged, over_folds))


def _table(judged: list[dict[str, Any]], over_folds: dict[str, dict[str, float | None]]) -> Table:
    table = Table("fold", "step", *over_folds, box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for result in judged:
        metrics = (f"{result['metrics'][name]:.4f}" for name in over_folds)
        table.add_row(str(result["fold"]), str(result["step"]), *metrics)
    if len(judged) > 1:
        table.add_row("mean", "", *(f"{metric['mean']:.4f}" for metric in over_folds.values()))
        table.add_row("± std", "", *(f"{metric['std']:.4f}" for metric in over_folds.values()))
    return table
