"""``hotloop train`` and ``hotloop eval``: settings by Hydra overrides, a recipe by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hotloop.errors import ConfigError, StepLostError

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as shells have it."""

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SETTING=VALUE]...", help="Settings, such as training.num_epochs=3 or data=csv."),
]


def register(app: typer.Typer) -> None:
    """Add ``train`` and ``eval`` to the command line."""
    app.command()(train)
    app.command("eval")(evaluate)


def train(
    overrides: Overrides = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", metavar="PATH", help="A YAML file of settings, or a folder of setting groups."),
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the settings as YAML, and train nothing.")] = False,
) -> None:
    """Train a recipe; every setting is described in docs/settings.md.

    recipe=criteria (the default) fine-tunes a cross-encoder on pairs of a phrase and a criterion. Resume an interrupted
    run with run.resume=FOLDER.
    """
    from hotloop import recipes  # noqa: PLC0415 - torch and the optional packages are loaded for this command alone
    from hotloop.train import configure, restart, start  # noqa: PLC0415

    if show:
        typer.echo(configure.to_yaml(configure.load(overrides or [], config)), nl=False)
        return
    begun = start.prepare(overrides or [], config)
    try:
        outcome = recipes.load(begun.settings.recipe.name).train(begun)
    except StepLostError as error:
        restart.one_rung_down(error, begun, overrides or [])
    if outcome.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def evaluate(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="checkpoint=FILE|run=FOLDER [SETTING=VALUE]...",
            help="What to judge: a checkpoint, or a run by its folder (its best checkpoint); then changed settings.",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Judge a checkpoint on the validation side of its data."""
    from hotloop import recipes  # noqa: PLC0415 - as in train
    from hotloop.train import checkpoint, configure  # noqa: PLC0415

    path, overrides = _chosen(arguments)
    document = checkpoint.load(path)
    settings = configure.from_dict(document["settings"], overrides)
    metrics = recipes.load(settings.recipe.name).evaluate(settings, document["model"])
    step = document["position"]["step"]
    if as_json:
        typer.echo(
            json.dumps({"checkpoint": str(path), "step": step, "split": "validation", "metrics": metrics}, indent=2)
        )
        return
    typer.echo(f"{path}, step {step}, on the validation split:")
    for name, value in metrics.items():
        typer.echo(f"  {name:<10} {value:.4f}")


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
