"""``hotloop doctor``: what is wrong with this machine, with a program, or with a run that is on record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.printing import console, users_program
from hotloop.errors import ConfigError, HotloopError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

ANY, STEPS = "any", 30

Target = Annotated[
    str | None,
    typer.Argument(
        metavar="[FILE.py:make | RUN]",
        help="A function that gives a hotloop.Workload, or a run's record or folder. Without: the machine.",
    ),
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page as well.")]
FailOn = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="NAMES",
        help="Exit with 1 when one of these is found: rules, or any; for the machine problem or warning, or any.",
    ),
]


def doctor(  # noqa: PLR0913, PLR0917 - one parameter an option
    target: Target = None,
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
        typer.Option("--steps", metavar="N", help="Steps that each way to run is timed for.", show_default=str(STEPS)),
    ] = None,
    total_steps: Annotated[
        int | None, typer.Option("--total-steps", metavar="N", help="Steps that the real run will have.")
    ] = None,
    fail_on: FailOn = None,
    html: Html = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Of the machine: try no compile, only look.")] = False,
) -> None:
    """Say what is wrong, where, what it costs, and what to change.

    Alone it judges the machine. With a workload it runs real steps, eager and compiled; with a run's record it reads.
    Exit code 1: what ``--fail-on`` names was found. 3: your program raised.
    """
    if target is None:
        of_others = {"--preset": preset, "--steps": steps, "--total-steps": total_steps, "--html": html}
        _refuse(of_others, "a look at the machine (hotloop doctor --json gives all of it)")
        _machine(fail_on, as_json=as_json, trials=not quick)
        return
    _refuse({"--quick": quick or None}, "a workload or a run")
    wanted = _chosen_rules(fail_on)
    document = _document(target, preset, steps, total_steps)
    _show(document, html, as_json=as_json)
    if found := sorted({entry["rule"] for entry in document["advice"]} & wanted):
        typer.echo(f"hotloop doctor: found {', '.join(found)} (--fail-on {fail_on})", err=True)
        raise typer.Exit(1)


def _refuse(options: Mapping[str, Any], what: str) -> None:
    """Refuse options that would change nothing.

    Raises:
        ConfigError: one was given.
    """
    if given := [f"{name} {value}" for name, value in options.items() if value is not None]:
        raise ConfigError(f"hotloop doctor {' '.join(given)}: not an option of {what}")


def _machine(fail_on: str | None, *, as_json: bool, trials: bool) -> None:
    from hotloop.prove.doctor import findings, gathering, judging  # noqa: PLC0415 - loaded for this alone

    serious = findings.LEVELS[:2]
    wanted = _chosen("--fail-on", fail_on, serious)
    machine = gathering.gather(trials=trials)
    found = judging.judge(machine)
    if as_json:
        data = {"findings": [one.to_dict() for one in found], "machine": machine.to_dict()}
        typer.echo(json.dumps(data, indent=2))
    else:
        console().print(findings.draw(found))
    if wanted & {one.level for one in found}:
        raise typer.Exit(1)


def _chosen_rules(names: str | None) -> set[str]:
    from hotloop.diagnose import RULES  # noqa: PLC0415 - as above

    return _chosen("--fail-on", names, RULES)


def _chosen(option: str, names: str | None, known: Iterable[str]) -> set[str]:
    """Give the names of a list with commas; ``any`` is all of them.

    Raises:
        ConfigError: one is not known.
    """
    wanted = [name.strip().lower() for name in names.split(",")] if names is not None else []
    valid = set(known)
    for name in wanted:
        if name != ANY and name not in valid:
            raise ConfigError(
                f"{option} {names}: {name!r} does not exist: expected any, or of {', '.join(sorted(valid))}"
            )
    return valid if ANY in wanted else set(wanted)


def _document(target: str, preset: str | None, steps: int | None, total_steps: int | None) -> dict[str, Any]:
    """Give the record's document of a run that is on record, or of one made now, with its advice."""
    from hotloop import record  # noqa: PLC0415 - as above

    if not Path(target).exists() and ":" in target:
        from hotloop.prove.doctor.examining import examine  # noqa: PLC0415 - torch is loaded for this alone

        with users_program():
            return examine(
                target, preset=preset, steps=STEPS if steps is None else steps, total_steps=total_steps, say=_say
            )
    if Path(target).suffix == ".py":
        raise ConfigError(f"hotloop doctor {target}: expected FILE.py:function, a function that gives a Workload")
    _refuse({"--preset": preset, "--steps": steps}, "a run that is on record")
    from hotloop.diagnose import diagnose  # noqa: PLC0415 - as above

    document = record.load(target)
    if total_steps is not None:
        document["settings"]["total_steps"] = total_steps
    return {**document, "advice": [advice.to_dict() for advice in diagnose(document)]}


def _say(text: str) -> None:
    typer.echo(f"hotloop doctor: {text}", err=True)


def _show(document: Mapping[str, Any], html: Path | None, *, as_json: bool) -> None:
    from hotloop.report import build  # noqa: PLC0415 - as above
    from hotloop.report.page import write_view  # noqa: PLC0415
    from hotloop.report.terminal import draw_diagnosis  # noqa: PLC0415

    view = build(document)
    try:
        page = write_view(view, html) if html is not None else None
    except OSError as error:
        raise HotloopError(f"the page {html} cannot be written ({error.strerror or error}): name another") from error
    if as_json:
        kept = {key: document[key] for key in ("settings", "environment", "measurements", "components", "advice")}
        typer.echo(json.dumps({"verdict": view.diagnosis, **kept, "html": str(page) if page else None}, indent=2))
        return
    console().print(draw_diagnosis(view))
    if page:
        typer.echo(f"\nReport: {page}")
