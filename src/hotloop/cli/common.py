"""What several commands share: options, exit codes, the console for results, and a guard around the user's program."""

from __future__ import annotations

import contextlib
import json
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
import typer.core
from rich.console import Console

from hotloop import record
from hotloop.errors import ConfigError, DataError, HotloopError, RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Workload = Annotated[
    str, typer.Argument(metavar="FILE.py:make", help="A function that returns a hotloop.Workload; or module:make.")
]

WRONG_USAGE = (ConfigError, DataError, RecordError)
"""What users can mend in what they typed or handed in: exit code 2."""
NO_RESULT = 3
"""The exit code without a verdict: the program under test raised or cannot be judged. A CI job must be able to tell
this from a failed check and from a passed one."""
INTERRUPTED = 130
"""The exit code after Ctrl-C or SIGTERM, as shells have it."""
_HOTLOOP, _STANDARD = Path(__file__).parents[1], sysconfig.get_path("stdlib")


class ProgramCommand(typer.core.TyperCommand):
    """A command whose ``--help`` also lists the settings of the program that its arguments name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the arguments for `format_help`, which is called before they are read."""
        ctx.meta["hotloop.arguments"] = list(args)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, and the settings of a program behind it."""
        super().format_help(ctx, formatter)
        if not any(":" in argument or "recipe=" in argument for argument in ctx.meta["hotloop.arguments"]):
            return
        from hotloop.train import configure, program  # noqa: PLC0415 - loads torch and the optional packages

        names = map(configure.program_name, ctx.meta["hotloop.arguments"])
        for name in filter(None, names):
            typer.echo("\n".join([f" Settings of {name}", *(f"   {line}" for line in program.known(name).about()), ""]))


class DefaultGroup(typer.core.TyperGroup):
    """A group of commands with a default, which gets the arguments that name no command."""

    default: ClassVar[str]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the default before the arguments that name no command."""
        named = args[0] in self.commands or args[0] in ctx.help_option_names if args else ctx.resilient_parsing
        return super().parse_args(ctx, args if named else [self.default, *args])


def raised_by_program(error: BaseException) -> bool:
    """Return whether the user's program raised an error; its traceback then begins in the program, not in ours.

    The program is the first file that is neither hotloop's nor installed beside it.
    """
    at = error.__traceback__
    while at and not _is_users(at.tb_frame.f_code.co_filename):
        at = at.tb_next
    if at is None and not isinstance(error, SyntaxError):  # which names its file itself
        return False
    error.__traceback__ = at
    return True


def _is_users(file: str) -> bool:
    path = Path(file).absolute()
    installed = {"site-packages", "dist-packages"} & set(path.parts) or path.is_relative_to(_STANDARD)
    return not file.startswith("<") and not installed and not path.is_relative_to(_HOTLOOP)


def show_raised(error: BaseException) -> None:
    """Show an exception of the user's as Python shows it."""
    raised_by_program(error)
    sys.excepthook(type(error), error, error.__traceback__)


@contextlib.contextmanager
def users_program() -> Iterator[None]:
    """Run the user's program in the block; its prints go to stderr, since stdout is for our results.

    An exception of the program is shown as Python shows it, and ends the command with `NO_RESULT`. The same goes for
    its ``sys.exit()``, with any code, and for an error of ours that is no wrong usage.

    Raises:
        ConfigError, DataError, RecordError: wrong usage, as it was raised.
        typer.Exit: for everything else.
    """
    with contextlib.redirect_stdout(sys.stderr), ending(NO_RESULT, apart=WRONG_USAGE):
        yield


@contextlib.contextmanager
def ending(code: int, apart: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn whatever goes wrong in the block into an exit code; the program's exception is shown as Python shows it.

    Raises:
        typer.Exit: something went wrong.
    """
    try:
        yield
    except apart:
        raise
    except HotloopError as error:
        typer.echo(f"hotloop: {error}", err=True)
        raise typer.Exit(code) from error
    except (Exception, SystemExit) as error:
        show_raised(error)
        raise typer.Exit(code) from error


@contextlib.contextmanager
def writing_page(path: Path | None) -> Iterator[None]:
    """Turn an ``OSError`` while a page is written into a message that names the option.

    Raises:
        HotloopError: the page cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise HotloopError(
            f"the page {path} cannot be written ({error.strerror or error}): name another file with --html"
        ) from error


def console() -> Console:
    """Return the console for results: as wide as the terminal, or 120 columns for a file or a pipe."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def echo_failure(error: BaseException, folder: Path | None, again: str | None) -> None:
    """Print as JSON that a command failed: why, in which folder, and the command that goes on, where there is one."""
    words = str(error) if isinstance(error, HotloopError) else f"{type(error).__name__}: {error}"
    said = "\n".join([words, *getattr(error, "__notes__", ())])
    echo_json({"status": "failed", "error": said, "folder": folder and str(folder), "go_on": again})


def echo_json(result: Any) -> None:
    """Print a result as indented JSON; NaN and infinity become strings, as in records."""
    typer.echo(json.dumps(json.loads(record.to_json(result)), indent=2))


def echo_result(result: dict[str, Any], drawing: Any, page: Path | None, *, as_json: bool) -> None:
    """Print a result as JSON, or draw it for the terminal; both say where its HTML page was written."""
    if as_json:
        echo_json({**result, "html": str(page) if page else None})
        return
    console().print(drawing)
    if page:
        typer.echo(f"\nReport: {page}")
