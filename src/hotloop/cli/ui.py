"""``hotloop ui``: a page for settings and runs in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotloop.errors import missing_extra


def ui(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="The folder with runs.")] = Path("runs"),
    port: Annotated[
        int | None, typer.Option("--port", metavar="N", help="The port.", show_default="8765, else a free one")
    ] = None,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    i_know: Annotated[
        bool, typer.Option("--i-know", help="Listen where other machines reach it, without encryption.")
    ] = False,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Open no browser.")] = False,
) -> None:
    """Show settings and runs in the browser: choose, check, start, watch, stop and resume.

    Prints the address, which holds a token. Runs are processes of their own: they go on when this command ends.
    From another machine: ssh -L 8765:127.0.0.1:8765 MACHINE, then open the printed address here.
    """
    try:
        from hotloop.ui import server  # noqa: PLC0415 - optional packages
    except ImportError as error:
        raise missing_extra("hotloop ui", "ui", error) from error
    server.serve(folder, host, port, i_know, not no_browser, typer.echo)
