"""``hotloop train`` and ``hotloop kfold``: train a recipe once, or once for each fold of a cross-validation."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hotloop.cli.common import INTERRUPTED, console, echo_failure, echo_json, ending
from hotloop.errors import StepLostError
from hotloop.report import folds
from hotloop.report.terminal import draw

if TYPE_CHECKING:
    from hotloop.train.kfold import Study
    from hotloop.train.outcome import Outcome

Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE.py:make] [SETTING=VALUE]...",
        help="A program of your own, and settings, such as training.num_epochs=3 or program.lr=1e-3.",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="PATH", help="A YAML file of settings."),
]
Show = Annotated[bool, typer.Option("--show", help="Print the settings as YAML, and train nothing.")]


Dry = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check settings, program, data, one batch and folder; train and write nothing. Exit code 0 or 2.",
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the outcome as one JSON document; progress goes to stderr.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors and one last line only.")]


def train(  # noqa: PLR0913, PLR0917 - options of the command line
    overrides: Overrides = None,
    config: Config = None,
    show: Show = False,
    dry_run: Dry = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train a program of your own, FILE.py:make, or a recipe; `hotloop settings` lists every setting.

    make is a function in FILE.py that returns a hotloop.Workload(model, optimizer, step, batches). Its parameters are
    the program's settings, program.NAME=VALUE; FILE.py:make --help lists them. Without a program, recipe=criteria
    fine-tunes a cross-encoder on pairs of a phrase and a criterion. Resume an interrupted run with run.resume=FOLDER.
    kfold.n_splits=5 makes it a cross-validation, as hotloop kfold does.
    """
    _begin(overrides or [], config, Printed(show, dry_run, as_json, quiet))


def kfold(  # noqa: PLR0913, PLR0917 - options of the command line
    overrides: Overrides = None,
    config: Config = None,
    show: Show = False,
    dry_run: Dry = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Cross-validate a recipe: each fold is held out once, by a run of its own.

    kfold.n_splits sets the number of folds (5 by default), kfold.fold=2 runs that fold alone, kfold.inner_trials=20
    searches within each fold first. Resume an interrupted run with run.resume=FOLDER. Exit code 1: a fold has failed.
    """
    from hotloop.train.kfold import with_splits  # noqa: PLC0415 - loads torch and the optional packages

    _begin(with_splits(overrides or [], config), config, Printed(show, dry_run, as_json, quiet))


@dataclasses.dataclass(frozen=True)
class Printed:
    """What a command was asked to do and to print, by its options."""

    show: bool = False
    dry: bool = False
    as_json: bool = False
    quiet: bool = False

    @property
    def console(self) -> Console | None:
        """The console for progress: None is stdout."""
        return Console(stderr=True, quiet=self.quiet, highlight=False) if self.as_json or self.quiet else None

    @property
    def options(self) -> list[str]:
        """The options that a restarted command is given again."""
        return [option for option, given in (("--json", self.as_json), ("--quiet", self.quiet)) if given]

    @contextlib.contextmanager
    def alone(self, folder: Path | None = None, again: str | None = None) -> Any:
        """Keep stdout for the result while the block runs: what else prints, such as the program, goes to stderr.

        An error is a result as well: told with ``folder``, and ``again``, the command that goes on, where it is there.
        """
        apart = contextlib.redirect_stdout(sys.stderr) if self.as_json or self.quiet else contextlib.nullcontext()
        try:
            with apart, ending(2) if self.dry else contextlib.nullcontext():
                yield
        except (Exception, SystemExit) as error:
            if self.as_json and not isinstance(error, StepLostError):  # the command starts again by itself
                cause = error.__cause__ if isinstance(error, typer.Exit) else error
                there = folder is not None and folder.is_dir()
                echo_failure(cause or error, folder if there else None, again if there else None)
            raise


def _begin(overrides: list[str], config: Path | None, asked: Printed) -> None:
    """Start or resume the run that the settings name: a single run or a cross-validation."""
    with asked.alone():
        from hotloop import recipes  # noqa: PLC0415 - loads torch and the optional packages
        from hotloop.train import configure, program, restart, start  # noqa: PLC0415
        from hotloop.train.kfold import prepare  # noqa: PLC0415

        if not asked.show:
            study = prepare(overrides, config)
            if study is None:
                begun = dataclasses.replace(start.prepare(overrides, config), dry=asked.dry)
    if asked.show:
        typer.echo(configure.to_yaml(program.filled(configure.load(overrides, config))), nl=False)
        return
    if study:
        _run_folds(dataclasses.replace(study, dry=asked.dry), overrides, asked)
        return
    try:
        with asked.alone(begun.folder, configure.again(begun.folder)):
            outcome = recipes.load(begun.settings.recipe.name).train(begun, asked.console)
    except StepLostError as error:
        restart.one_rung_down(error, begun, overrides, options=asked.options)
    echo_outcome(outcome, asked)
    if outcome.status == "interrupted":
        raise typer.Exit(INTERRUPTED)


def echo_outcome(outcome: Outcome, asked: Printed) -> None:
    """Print how a run ended, as one document or as one line, where that was asked for."""
    if asked.as_json:
        kept = sorted(str(path) for path in (outcome.folder / "checkpoints").glob("*.pt"))
        found = {name: value for name, value in dataclasses.asdict(outcome).items() if name != "stop"}
        echo_json({**found, "checkpoints": kept})
    elif asked.quiet:
        best = "".join(f", {name} {value:.4f}" for name, value in outcome.best.items())
        typer.echo(f"{outcome.status}: step {outcome.step}{best}, {outcome.folder}")


def _run_folds(study: Study, overrides: list[str], asked: Printed) -> None:
    """Run a cross-validation, print its summary, and exit with the code of its outcome."""
    from hotloop import recipes  # noqa: PLC0415 - loads torch and the optional packages
    from hotloop.train import restart  # noqa: PLC0415
    from hotloop.train.kfold import run  # noqa: PLC0415
    from hotloop.train.start import Start  # noqa: PLC0415

    try:
        with asked.alone(study.folder, study.again):
            ended = run(study, recipes.load(study.settings.recipe.name), asked.console)
    except StepLostError as error:
        begun = Start(study.settings, study.folder, study.before)
        restart.one_rung_down(error, begun, overrides, verb="kfold", options=asked.options)
    if asked.as_json:
        echo_json(ended.document)
    elif asked.quiet:
        typer.echo(f"{ended.status}: {ended.folder}")
    elif not study.dry:
        console().print(draw(folds.build(ended.document)))
    if ended.status == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if ended.status == "failed":
        raise typer.Exit(1)
