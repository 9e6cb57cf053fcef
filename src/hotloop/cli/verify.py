"""``hotloop verify``: compares a program's compiled steps with eager and a float64 reference."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hotloop.cli.common import console, echo_json, users_program

if TYPE_CHECKING:
    from collections.abc import Iterator


def verify(  # noqa: PLR0913, PLR0917 - one a setting
    workload: Annotated[
        str, typer.Argument(metavar="FILE.py:FUNCTION", help="A function that returns a hotloop.Workload.")
    ],
    preset: Annotated[str, typer.Option("--preset", help="What to compile the program's models with.")] = "inductor",
    steps: Annotated[int, typer.Option("--steps", help="Steps to compare, 1 or more.")] = 3,
    reference: Annotated[
        str, typer.Option("--reference", help="float64, float32 (for steps in fewer bits), eager, or auto.")
    ] = "auto",
    search_seconds: Annotated[
        float, typer.Option("--search-seconds", help="How long the search for the region at fault may take; 0: none.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Is it the same training? Compare a program's compiled steps with eager and float64; exit code 1 if it is not.

    It runs the program's own model and batches. It compares results, gradients, updates of parameters and buffers,
    tensor by tensor. If they disagree, it compiles parts of the model alone, to name the smallest module at fault.

    Exit code 3: the program raised, or does not repeat itself, so there is no verdict.
    """
    import hotloop  # noqa: PLC0415 - loads torch

    with _log_on_stderr(), users_program():
        verdict = hotloop.verify(
            workload,
            preset,
            steps=steps,
            reference=reference,  # type: ignore[arg-type]  # verify checks it
            search=search_seconds > 0,
            search_seconds=search_seconds,
        )
    if as_json:
        echo_json(verdict.to_dict())
    else:
        console().print(verdict)
    if not verdict.passes:
        raise typer.Exit(1)


@contextlib.contextmanager
def _log_on_stderr() -> Iterator[None]:
    """Print our log on stderr while the block runs; dynamo's dozen lines on a graph break become one."""
    from hotloop._torch.settings import quiet_tracing  # noqa: PLC0415 - loads torch

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
