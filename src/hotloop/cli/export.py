"""``hotloop export`` and ``hotloop predict``: what other programs, and other data, get of a run."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hotloop.cli.common import AsJson, echo_json
from hotloop.errors import ConfigError
from hotloop.files import whole

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
        Literal["safetensors", "pretrained", "torch-export"], typer.Option("--format", help="What is written.")
    ] = "safetensors",
    checkpoint: Checkpoint = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's weights for other programs, with a config.json of how to make the model: docs/how-to/runs.md.

    safetensors runs no code of the program. pretrained writes a model of transformers, diffusers or peft by its
    save_pretrained, torch-export a program for torch.export.load. Both run the program's file, as hotloop eval does.
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


def predict(  # noqa: PLR0913, PLR0917 - arguments and options of the command
    run: Run,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Rows, as a file .csv (with a header) or .jsonl.")],
    changed: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SETTING=VALUE]...", help="Changed settings: run.device=cpu.", show_default=False),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="A .csv or .jsonl to write.", show_default="stdout")
    ] = None,
    checkpoint: Checkpoint = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Rows in one call of the model.")] = 64,
) -> None:
    """Write each row of DATA with the run's prediction behind it: for recipe=criteria, recipe=focus, or a program.

    A program has to offer Workload(predict=f): f takes a list of rows, each a dictionary, and returns a prediction for
    each. The command runs the program's file, as hotloop eval does.
    """
    from hotloop import recipes  # noqa: PLC0415 - loads torch and the optional packages
    from hotloop.train import checkpoint as checkpoints  # noqa: PLC0415
    from hotloop.train import export, predict, start  # noqa: PLC0415

    if out and (out.suffix not in predict.SUFFIXES or out.resolve() == data.resolve()):
        raise ConfigError(
            f"--out {out}: expected another file than DATA, that ends with {' or '.join(predict.SUFFIXES)}"
        )
    document = export.of_run(run, checkpoint)[1]
    # How the file of rows is read is no matter of the run's own data.
    settings = start.settings_to_judge(document, changed or (), also=("data.columns", "data.delimiter"))
    delimiter = getattr(settings.data, "delimiter", ",")  # a program has no settings of data
    rows = predict.read(data, delimiter)
    recipe: Any = recipes.load(settings.recipe.name)
    if not hasattr(recipe, "predictor"):
        raise ConfigError(
            f"recipe={settings.recipe.name} has no predictions: criteria, focus and programs may have some"
        )
    with contextlib.redirect_stdout(sys.stderr):  # what the program prints
        function = recipe.predictor(settings, {**checkpoints.judged(document), **export.weights(document)[0]})
        found = predict.predictions(rows, function, batch_size)
    text = predict.written(found, (out or data).suffix, delimiter)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        with whole(out) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}") from error
    typer.echo(f"{len(found)} rows: {out}")
