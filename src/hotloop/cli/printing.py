"""What several commands share: exit codes, the console for results, and a guard around the user's program."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from hotloop import record
from hotloop.errors import ConfigError, DataError, HotloopError, RecordError

if TYPE_CHECKING:
    from collections.abc import Iterator

WRONG_USAGE = (ConfigError, DataError, RecordError)
"""What the user can mend in what they typed or handed in: exit code 2."""
NO_RESULT = 3
"""The exit code where there is no verdict, since the program under test raised or cannot be judged: a CI job must not
take that for a failed check, nor for a passed one."""

INTERRUPTED = 130
"""The exit code after Ctrl-C or SIGTERM, as shells have it."""

WIDTH = 120
"""Columns of what is printed to a file or a pipe, which has no width of its own."""


@contextlib.contextmanager
def users_program() -> Iterator[None]:
    """Run the user's program in the block: what it prints goes to stderr, since stdout is for results of ours.

    What it raises is shown as Python shows it, and ends the command with `NO_RESULT`; so does its ``sys.exit()``, with
    whatever code, and an error of ours that is no wrong usage.

    Raises:
        ConfigError, DataError, RecordError: wrong usage, as it was raised.
        typer.Exit: for everything else.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except WRONG_USAGE:
        raise
    except HotloopError as error:
        typer.echo(f"hotloop: {error}", err=True)
        raise typer.Exit(NO_RESULT) from error
    except (Exception, SystemExit) as error:
        sys.excepthook(type(error), error, error.__traceback__)
        raise typer.Exit(NO_RESULT) from error


def console() -> Console:
    """Give the console for results: as wide as the terminal, or `WIDTH` columns where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def echo_json(result: Any) -> None:
    """Print a result as indented JSON; NaN and infinity become strings, as in records."""
    typer.echo(json.dumps(json.loads(record.to_json(result)), indent=2))
