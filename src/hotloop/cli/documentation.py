"""Makes the site's page of the command line from the commands themselves."""

from __future__ import annotations

import re
import textwrap
import typing
from typing import TYPE_CHECKING, Any

import typer.main

from hotloop.cli import app

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTH = 118

HEAD = """\
# Command line


`python -m hotloop` is the same program. Every command takes `--help`. Settings are written `NAME=VALUE`:
[settings](settings.md) lists them.

| exit code | meaning |
|---|---|
| 0 | success |
| 1 | a check or a run failed |
| 2 | wrong usage: an unknown option, a setting that cannot be used, data or a record that cannot be read |
| 3 | no verdict: `doctor`, `verify`, `bench` or `harness` cannot judge the program, or the program raised |
"""


def render() -> str:
    """Return the page."""
    return "\n".join([HEAD, *_command("hotloop", typer.main.get_command(app), depth=1)]).rstrip() + "\n"


def _command(path: str, command: Any, depth: int) -> Iterator[str]:
    """Yield the lines of a command, then those of the commands in it; hidden ones are left out."""
    if depth > 1:
        yield from (f"{'#' * depth} {path}", "")
        paragraphs = (command.help or "").split("\n\n")
        yield from (_linked("\n\n".join(textwrap.fill(one, WIDTH, break_on_hyphens=False) for one in paragraphs)), "")
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        usage = " ".join([path, *(one.metavar or one.name.upper() for one in arguments), "[OPTIONS]"])
        yield from ("```", usage, "```", "")
        yield from _rows(command.params)
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _command(f"{path} {name}", inner, depth + 1)


def _linked(text: str) -> str:
    """Turn the names of pages (docs/how-to/runs.md) into links of this page."""
    return re.sub(r"docs/((?:how-to|reference|concepts)/[a-z-]+\.md)", r"[\1](../\1)", text)


def _rows(params: list[Any]) -> Iterator[str]:
    """Yield the table of a command's arguments and options, if it has any."""
    rows = [_row(one) for one in params if not getattr(one, "hidden", False) and one.name != "help"]
    if rows:
        yield from ("| argument or option | default | what it does |", "|---|---|---|", *rows, "")


def _row(param: Any) -> str:
    if param.param_type_name == "argument":
        name = param.metavar or param.name.upper()
    else:
        name = ", ".join([*param.opts, *param.secondary_opts]) + ("" if param.is_flag else f" {_takes(param)}")
    default = "" if param.default is None or param.default is False else f"`{param.default}`"
    cells = (f"`{name}`", default, " ".join((param.help or "").split()))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _takes(option: Any) -> str:
    """Return what an option's value is: its placeholder, its choices, or its type."""
    kind = option.type_descriptor.annotation
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return str(option.metavar or "|".join(choices) or {int: "N", float: "NUMBER"}.get(kind, option.name.upper()))
