"""Makes the site's page of the command line from the commands themselves."""

from __future__ import annotations

import re

import typer.cli
import typer.main

from hotloop.cli import app

HEAD = """\
# Command line

`python -m hotloop` is the same program. Settings are written `NAME=VALUE`: [settings](settings.md) lists them.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | a check or a run failed |
| 2 | wrong usage: an unknown option, a setting that cannot be used, data or a record that cannot be read |
| 3 | no verdict: `doctor`, `verify`, `bench` or `harness` cannot judge the program, or the program raised |
"""


def render() -> str:
    """Return the page; names of pages in a help (docs/how-to/runs.md) become links."""
    command = typer.main.get_command(app)
    made = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="hotloop"), name="hotloop")
    commands = made[made.index("## ") :]
    headings = re.sub(r"^(#+) `(.+)`$", r"\1 \2", commands, flags=re.MULTILINE)
    return f"{HEAD}\n" + re.sub(r"docs/((?:how-to|reference|concepts)/[a-z-]+\.md)", r"[\1](../\1)", headings)
