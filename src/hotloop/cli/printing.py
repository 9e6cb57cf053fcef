"""Where results are printed."""

from __future__ import annotations

import contextlib
import sys

from rich.console import Console

WIDTH = 120
"""Columns of what is printed to a file or a pipe, which has no width of its own."""


def no_result_of_ours() -> contextlib.AbstractContextManager[object]:
    """Have what the user's program prints in the block go to stderr: stdout is for results, which scripts read."""
    return contextlib.redirect_stdout(sys.stderr)


def console() -> Console:
    """Give the console for results: as wide as the terminal, or `WIDTH` columns where there is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
