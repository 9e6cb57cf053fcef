"""``hotloop doctor``: finds what is wrong with this machine, with a program, or with a recorded run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.common import AsJson, console, echo_json, echo_result, users_program, writing_page
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

STEPS = 30
"""Steps for which each way to run is timed, unless --steps says otherwise."""

FailOn = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="NAMES",
        help="Exit with 1 if one of these is found: names of rules, or any; for the machine: problem, warning or any.",
    ),
]


def doctor(  # noqa: PLR0913, PLR0917 - one parameter an option
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[FILE.py:make | RUN]",
            help="A function that returns a hotloop.Workload, or a run's record or folder. Without it: this machine.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="The preset to compile with.",
            show_default="the compile that the program itself makes, else default",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", metavar="N", help="Steps that each way to run is timed for, 4 or more.", show_default=str(STEPS)
        ),
    ] = None,
    total_steps: Annotated[
        int | None, typer.Option("--total-steps", metavar="N", help="Steps that the real run will have.")
    ] = None,
    fail_on: FailOn = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page as well.")] = None,
    as_json: AsJson = False,
    quick: Annotated[bool, typer.Option("--quick", help="For the machine: compile nothing.")] = False,
) -> None:
    """Say what is wrong, where, what it costs, and what to change.

    Without an argument it judges this machine. With a program it runs real steps, eager and compiled. With a run it
    reads the record. Exit code 1: something that ``--fail-on`` names was found. 3: your program raised.
    """
    if target is None:
        _judge_machine(fail_on, as_json=as_json, quick=quick)
    else:
        _judge_run(target, preset, steps, total_steps, fail_on, html, as_json=as_json)


def _wanted(fail_on: str | None, known: Iterable[str]) -> set[str]:
    """Return the names in the comma-separated list of ``--fail-on``; ``any`` stands for all known names.

    Raises:
        ConfigError: a name is not known.
    """
    wanted = [name.strip().lower() for name in fail_on.split(",")] if fail_on is not None else []
    valid = set(known)
    for name in wanted:
        if name != "any" and name not in valid:
            raise ConfigError(
                f"--fail-on {fail_on}: {name!r} does not exist: expected any, or of {', '.join(sorted(valid))}"
            )
    return valid if "any" in wanted else set(wanted)


def _judge_machine(fail_on: str | None, *, as_json: bool, quick: bool) -> None:
    from hotloop.prove.doctor import findings, gathering, judging  # noqa: PLC0415 - loaded for this alone

    wanted = _wanted(fail_on, findings.LEVELS[:2])
    machine = gathering.gather(trials=not quick)
    found = judging.judge(machine)
    if as_json:
        echo_json({"findings": [finding.to_dict() for finding in found], "machine": machine.to_dict()})
    else:
        console().print(findings.draw(found))
    if any(finding.level in wanted for finding in found):
        raise typer.Exit(1)


def _judge_run(  # noqa: PLR0913, PLR0917 - the options of the command
    target: str,
    preset: str | None,
    steps: int | None,
    total_steps: int | None,
    fail_on: str | None,
    html: Path | None,
    *,
    as_json: bool,
) -> None:
    """Judge a workload, or a recorded run, and show the verdict."""
    from hotloop.diagnose import RULES  # noqa: PLC0415 - not for a look at the machine
    from hotloop.report import build  # noqa: PLC0415
    from hotloop.report.page import write_view  # noqa: PLC0415
    from hotloop.report.terminal import draw_diagnosis  # noqa: PLC0415

    wanted = _wanted(fail_on, RULES)
    document = _document(target, preset, steps, total_steps)
    view = build(document)
    with writing_page(html):
        page = write_view(view, html) if html is not None else None
    kept = {key: document[key] for key in ("settings", "environment", "measurements", "components", "advice")}
    echo_result({"verdict": view.diagnosis, **kept}, draw_diagnosis(view), page, as_json=as_json)
    if found := sorted({entry["rule"] for entry in document["advice"]} & wanted):
        typer.echo(f"hotloop doctor: found {', '.join(found)} (--fail-on {fail_on})", err=True)
        raise typer.Exit(1)


def _document(target: str, preset: str | None, steps: int | None, total_steps: int | None) -> dict[str, Any]:
    """Return the document of a run record with its advice: a recorded run, or a run of the workload now.

    Raises:
        ConfigError: the target is a file without a function.
    """
    if not Path(target).exists() and ":" in target:
        from hotloop.prove.doctor.examining import examine  # noqa: PLC0415 - loads torch

        def say(text: str) -> None:
            typer.echo(f"hotloop doctor: {text}", err=True)

        with users_program():
            steps = STEPS if steps is None else steps
            return examine(target, preset=preset, steps=steps, total_steps=total_steps, say=say)
    if Path(target).suffix == ".py":
        raise ConfigError(f"hotloop doctor {target}: expected FILE.py:function, a function that returns a Workload")
    from hotloop import record  # noqa: PLC0415 - not for a look at the machine
    from hotloop.diagnose import diagnose  # noqa: PLC0415

    document = record.load(target)
    if total_steps is not None:
        document["settings"]["total_steps"] = total_steps
    return {**document, "advice": [advice.to_dict() for advice in diagnose(document)]}
