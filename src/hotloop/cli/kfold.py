"""``hotloop kfold``: a cross-validation, each fold a run; ``hotloop train kfold.n_splits=5`` is the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotloop import record
from hotloop.cli.printing import console
from hotloop.errors import ConfigError, StepLostError
from hotloop.report import folds

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.train.kfold import Study

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as shells have it."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SETTING=VALUE]...", help="Settings, such as training.num_epochs=3 or data=csv."),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help="A YAML file of settings, or a folder of setting groups."),
]
Show = Annotated[bool, typer.Option("--show", help="Print the settings as YAML, and train nothing.")]


def register(app: typer.Typer) -> None:
    """Add ``kfold`` to the command line."""
    app.command()(kfold)


def kfold(
    overrides: Overrides = None,
    config: Config = None,
    show: Show = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary of all folds as JSON.")] = False,
) -> None:
    """Cross-validate a recipe: each fold is held out once, by a run of its own.

    kfold.n_splits says how many (5 by default), kfold.fold=2 runs that fold alone, kfold.inner_trials=20 searches
    within each fold first. Go on with an interrupted one by run.resume=FOLDER. Exit code 1: a fold has failed.
    """
    from hotloop.cli import train  # noqa: PLC0415 - torch and the optional packages, for this command alone
    from hotloop.train import kfold as studies  # noqa: PLC0415

    train.begin(studies.with_splits(overrides or [], config), config, show=show, as_json=as_json)


def run(study: Study, overrides: list[str], *, as_json: bool) -> None:
    """Run a cross-validation, print its summary, and exit by how it ended."""
    from hotloop import recipes  # noqa: PLC0415 - as above
    from hotloop.train import kfold as studies  # noqa: PLC0415
    from hotloop.train import restart  # noqa: PLC0415
    from hotloop.train.start import Start  # noqa: PLC0415

    progress = Console(stderr=True, highlight=False) if as_json else None
    try:
        ended = studies.run(study, recipes.load(study.settings.recipe.name), progress)
    except StepLostError as error:
        begun = Start(study.settings, study.folder, study.before)
        restart.one_rung_down(error, begun, overrides, verb="kfold")
    if as_json:
        _echo(ended.document)
    else:
        console().print(folds.draw(folds.build(ended.document)))
    if ended.status != "finished":
        raise typer.Exit(INTERRUPTED if ended.status == "interrupted" else 1)


def judge(folder: Path, fold: int | None, overrides: list[str], *, as_json: bool) -> None:
    """Judge the folds of a cross-validation by their best checkpoints, each on its own held-out rows."""
    from hotloop import recipes  # noqa: PLC0415 - as above
    from hotloop.train import kfold as studies  # noqa: PLC0415
    from hotloop.train import kfold_state  # noqa: PLC0415

    document = folds.load(folder)
    found = studies.judge(folder, fold, recipes.load(document["recipe"]), overrides)
    over = kfold_state.spread([one["metrics"] for one in found])
    left = [one["fold"] for one in document["folds"] if fold is None and one["fold"] not in {o["fold"] for o in found}]
    for one in left:
        sys.stderr.write(f"fold {one} has no checkpoint yet, and is left out\n")
    if as_json:
        _echo({"run": str(folder), "split": "validation", "folds": found, "over_folds": over})
        return
    typer.echo(f"{folder}, each fold's best checkpoint on its held-out rows:")
    console().print(_table(found, over))


def _echo(result: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(json.loads(record.to_json(result)), indent=2))


def _table(found: list[dict[str, Any]], over: dict[str, dict[str, float | None]]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("fold", "step", *over):
        table.add_column(name, justify="left" if name == "fold" else "right")
    for one in found:
        table.add_row(str(one["fold"]), str(one["step"]), *(f"{one['metrics'][name]:.4f}" for name in over))
    if len(found) > 1:
        table.add_row("mean", "", *(Text(f"{each['mean']:.4f}", style="bold") for each in over.values()))
        table.add_row("± std", "", *(f"{each['std']:.4f}" for each in over.values()))
    return table


def parse_fold(text: str) -> int:
    """Read the number behind ``fold=``.

    Raises:
        ConfigError: it is none.
    """
    if not text.isdecimal():
        raise ConfigError(f"fold={text}: expected the number of a fold, counted from 0")
    return int(text)
