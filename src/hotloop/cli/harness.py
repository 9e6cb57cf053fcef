"""``hotloop harness``: is a preset with CUDA graphs safe for a program that trains and is called between the steps?"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from hotloop.cli.printing import console, users_program


def harness(  # noqa: PLR0913, PLR0917 - the options of the command
    workload: Annotated[
        str, typer.Argument(metavar="FILE.py:make", help="A function that gives a hotloop.Workload; or module:make.")
    ],
    preset: Annotated[str, typer.Option(help="The preset of the training calls, one with CUDA graphs.")] = (
        "reduce-overhead"
    ),
    inference: Annotated[
        str | None, typer.Option(help="The preset of the calls without gradients.", show_default="the same")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Training steps.")] = 6,
    calls: Annotated[int, typer.Option(metavar="N", help="Calls without gradients after each.")] = 6,
    strict_lifetime: Annotated[
        bool, typer.Option("--strict-lifetime", help="Outputs that are held past a mark fail instead of being copied.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train and call your program under CUDA graphs, hold it against eager, and list what it holds too long.

    Exit code 1: the preset is not safe for it here. 3: your program raised.
    """
    from hotloop.prove.harness.harness import harness as run  # noqa: PLC0415 - torch, for this command only

    with Console(stderr=True).status("training and calling, eager and compiled"), users_program():
        found = run(workload, preset, inference=inference, rounds=rounds, calls=calls, strict_lifetime=strict_lifetime)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        console().print(found)
    if not found.passed:
        raise typer.Exit(1)
