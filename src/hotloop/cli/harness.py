"""``hotloop harness``: checks a preset with CUDA graphs on a program that trains and is called between the steps."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from hotloop.cli.common import AsJson, Workload, console, echo_json, users_program


def harness(  # noqa: PLR0913, PLR0917 - the options of the command
    workload: Workload,
    preset: Annotated[str, typer.Option(help="The preset of the training calls, one with CUDA graphs.")] = (
        "reduce-overhead"
    ),
    inference: Annotated[
        str | None, typer.Option(help="The preset of the calls without gradients.", show_default="the same")
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="Training steps, 3 or more.")] = 6,
    calls: Annotated[int, typer.Option(metavar="N", help="Calls without gradients after each, 2 or more.")] = 6,
    as_json: AsJson = False,
) -> None:
    """Train and call your program under CUDA graphs, compare it with eager, and list what it holds too long.

    Exit code 1: the preset is not safe for this program here. 3: your program raised.
    """
    from hotloop.prove.harness.harness import harness as run  # noqa: PLC0415 - loads torch

    with Console(stderr=True).status("training and calling, eager and compiled"), users_program():
        result = run(workload, preset, inference=inference, rounds=rounds, calls=calls)
    if as_json:
        echo_json(result.to_dict())
    else:
        console().print(result)
    if not result.passed:
        raise typer.Exit(1)
