"""``hotloop export``: the weights of a run for other programs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hotloop.cli.common import AsJson, echo_json
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from hotloop.train.export import Made
    from hotloop.train.settings import Settings

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Checkpoint = Annotated[
    Literal["best", "last"] | None,
    typer.Option("--checkpoint", help="Which checkpoint.", show_default="best, else last"),
]


def export(
    run: Run,
    out: Annotated[
        Path | None, typer.Argument(metavar="[OUT]", help="The folder to make.", show_default="RUN/export")
    ] = None,
    kind: Annotated[
        Literal["safetensors", "pretrained"], typer.Option("--format", help="What is written.")
    ] = "safetensors",
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's weights for other programs, with a config.json of how to make the model: docs/how-to/runs.md.

    safetensors runs no code of the program. pretrained writes a model of transformers, diffusers or peft by its
    save_pretrained; it runs the program's file, as hotloop eval does.
    """
    from hotloop import recipes  # noqa: PLC0415 - loads torch and the optional packages
    from hotloop.train import export as exporting  # noqa: PLC0415

    def make(settings: Settings, weights: dict[str, Any]) -> Made:
        recipe: Any = recipes.load(settings.recipe.name)
        if not hasattr(recipe, "made"):
            raise ConfigError(f"--format {kind}: recipe={settings.recipe.name} has none; use --format safetensors")
        made: Made = recipe.made(settings, weights)
        return made

    out = out or run / "export"
    with contextlib.redirect_stdout(sys.stderr):  # what the program prints
        files = exporting.export(run, out, kind, checkpoint, make, lambda line: typer.echo(line, err=True))
    if as_json:
        echo_json({"folder": str(out), "format": kind, "files": list(map(str, files))})
        return
    for file in files:
        typer.echo(f"{file}  {file.stat().st_size:,} bytes")
