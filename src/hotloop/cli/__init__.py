"""The command line: thin commands that parse, call and print.

Exit codes: 0 on success, 1 on a failed check or a failed run, 2 on wrong usage (an unknown option, a setting that
cannot be used, data or a record that cannot be read), 3 where there is no verdict: the program that doctor, verify,
bench or harness was to judge raised, or cannot be judged.
"""

from __future__ import annotations

import errno
import inspect
import io
import sys
from typing import Annotated, NoReturn

import typer

from hotloop.cli import (
    bench,
    cache,
    doctor,
    evaluate,
    export,
    harness,
    hpo,
    presets,
    report,
    runs,
    settings,
    submit,
    train,
    ui,
    verify,
)
from hotloop.cli.common import WRONG_USAGE, ProgramCommand, raised_by_program, show_raised
from hotloop.errors import HotloopError
from hotloop.files import too_long
from hotloop.version import __version__

app = typer.Typer(
    name="hotloop",
    help="Makes the training step of a PyTorch program fast, and keeps it right.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if not wanted:
        return
    typer.echo(f"hotloop {__version__}")
    raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


# In the order in which `hotloop --help` lists them.
app.command(cls=ProgramCommand)(train.train)
app.command("eval")(evaluate.evaluate)
app.command(cls=ProgramCommand)(train.kfold)
app.add_typer(hpo.app, name="hpo")
app.command("hpo_fast", cls=ProgramCommand, hidden=True)(
    hpo.hpo_fast
)  # the help of hpo search names its option --fast, which does the same
app.command()(doctor.doctor)
app.command()(bench.bench)
app.command()(verify.verify)
app.command()(harness.harness)
app.command()(report.report)
app.command()(export.export)
app.add_typer(runs.app, name="runs", help="List, show, compare and remove runs, cross-validations and searches.")
app.add_typer(submit.app, name="submit")
app.command("ui")(ui.ui)
app.command("presets")(presets.show)
app.command()(settings.settings)
app.add_typer(cache.app, name="cache", help="Show what is kept of compiles, clear what is stale, export and import it.")


def _let_help_flow(commands: typer.Typer) -> None:
    """Join the lines of each paragraph of help, so that it fills a terminal of any width: rich keeps line ends."""
    for command in commands.registered_commands:
        text = inspect.cleandoc(command.help or getattr(command.callback, "__doc__", None) or "")
        command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    for group in commands.registered_groups:
        if group.typer_instance:
            _let_help_flow(group.typer_instance)


_let_help_flow(app)


def main(args: list[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        args: the arguments after the program's name; None takes those of the process.
    """
    # A stream that cannot hold a character prints a question mark: a pipe on Windows is no reason to fail.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app(args, prog_name="hotloop")
    except HotloopError as error:
        typer.echo(f"hotloop: {error}", err=True)
        sys.exit(2 if isinstance(error, WRONG_USAGE) else 1)
    except Exception as error:
        if not raised_by_program(error):
            if not isinstance(error, OSError) or error.errno != errno.ENAMETOOLONG:
                raise
            typer.echo(f"hotloop: {too_long(error)}", err=True)
            sys.exit(2)
        show_raised(error)
        sys.exit(1)
    sys.exit(0)
