"""``hotloop settings``: every setting of a recipe or of a program of one's own, as a table or as JSON Schema."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from hotloop.cli.common import console, echo_json
from hotloop.cli.train import Config, Overrides  # noqa: TC001 - typer reads the types of the parameters

Schema = Annotated[
    bool,
    typer.Option("--schema", help="Print JSON Schema of a file for --config, by which editors complete and check."),
]


def settings(overrides: Overrides = None, config: Config = None, schema: Schema = False) -> None:
    """List the settings of a recipe (recipe=NAME) or of a program, FILE.py:make: value, what it may be, what it is for.

    Without either, list those of recipe=criteria. The table shows the values of settings that you add.
    """
    from hotloop.train import configure, documentation, program  # noqa: PLC0415 - loads the optional packages

    found = configure.load(overrides or [], config)
    if schema:
        echo_json(documentation.json_schema(found))
        return
    table = Table("setting", "what it is for", expand=True)
    for name, value, takes, about in documentation.rows(found):
        table.add_row(f"{escape(f'{name}={value}')}\n[dim]{escape(takes)}[/dim]", escape(about))
    out = console()
    out.print(table)
    if ":" in found.recipe.name:
        out.print("\n".join(program.known(found.recipe.name).about()), markup=False)
