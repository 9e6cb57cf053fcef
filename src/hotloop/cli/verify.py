"""``hotloop verify``: holds a program's compiled steps against eager and a float64 reference."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.printing import console, users_program

if TYPE_CHECKING:
    from collections.abc import Iterator


def verify(  # noqa: PLR0913, PLR0917 - one a setting
    workload: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="A function that gives a hotloop.Workload.")
    ],
    preset: Annotated[str, typer.Option("--preset", help="What to compile the program's models with.")] = "inductor",
    steps: Annotated[int, typer.Option("--steps", help="Steps to hold against each other.")] = 3,
    reference: Annotated[
        str, typer.Option("--reference", help="float64, float32 (for steps in fewer bits), eager, or auto.")
    ] = "auto",
    search_seconds: Annotated[
        float, typer.Option("--search-seconds", help="How long the search for the region at fault may take; 0: none.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Is it the same training? Compares a program's compiled steps with eager and float64; exit code 1 if it is not.

    Exit code 3: the program raised, or does not repeat itself, so that nothing can be said.

    The program's own model and batches run: results, gradients, updates of parameters and buffers of each step, tensor
    by tensor. Where they disagree, its modules are compiled one at a time to name the smallest one at fault.
    """
    import hotloop  # noqa: PLC0415 - brings torch, which the other commands do without

    with _told_on_stderr(), users_program():
        verdict = hotloop.verify(
            workload,
            preset,
            steps=steps,
            reference=reference,  # type: ignore[arg-type]  # checked there
            search=search_seconds > 0,
            search_seconds=search_seconds,
        )
    if as_json:
        typer.echo(json.dumps(verdict.to_dict(), indent=2))
    else:
        console().print(verdict)
    if not verdict.passes:
        raise typer.Exit(1)


@contextlib.contextmanager
def _told_on_stderr() -> Iterator[None]:
    """Put the log's lines on stderr while a command runs; dynamo's dozen on a graph break are one of them."""
    from hotloop._torch.settings import quiet_tracing  # noqa: PLC0415 - as above

    log = logging.getLogger("hotloop")
    before, handler = log.level, logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with quiet_tracing():
            yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
