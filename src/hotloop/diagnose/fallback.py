"""Something runs on a lower rung than was asked for: a preset failed, or this machine cannot run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.words import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "fallback"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind="failed",
        symptom="a preset failed, and a lower one runs",
        cause="the compiler could not compile the graph; hotloop took the next rung of the component's ladder",
        cost="the speed of the lower rung instead of the preset's",
        change="mend what the reason names, or ask for the preset that runs: the failing one then costs no attempt",
    ),
    Problem(
        rule=RULE,
        kind="unavailable",
        symptom="this machine cannot run a preset",
        cause="a part that the preset needs is missing",
        cost="the speed of the lower rung instead of the preset's",
        change="install what is missing, or ask for the preset that runs",
    ),
    Problem(
        rule=RULE,
        kind="run_failed",
        symptom="compiled code failed while it ran, where eager does not",
        cause="a compiler's mistake, or memory: the same operations succeed in eager",
        cost="the run, from that step on",
        change="go on from the last checkpoint with a lower preset (aot_eager, none); a Loop undoes such a step itself",
        remedy="tier",
    ),
)
_FAILED, _UNAVAILABLE, _RUN_FAILED = PROBLEMS


def find(case: Case) -> Iterator[Advice]:
    """Give one advice for each failure, however many graphs met it."""
    yield from _failed(case)
    missing: dict[tuple[str, str, str], list[ev.Unavailable]] = {}
    for event in case.of(ev.Unavailable):
        missing.setdefault((event.preset, event.missing, event.running), []).append(event)
    for (preset, what, running), group in missing.items():
        names = dict.fromkeys(event.component for event in group if event.component)
        yield _UNAVAILABLE.advice(
            f"preset {preset} cannot run here: {what}; {_running(running)}",
            component=", ".join(names) or None,
            times=len(names) or 1,
        )
    undone = {event.reason for event in case.of(ev.StepUndone)}  # a rule of its own
    for one in case.of(ev.RunFailed):
        if one.reason in undone:
            continue
        yield _RUN_FAILED.advice(
            f"compiled code failed in its {one.phase} under preset {one.preset}: {one.reason}",
            component=one.component,
            file=one.file,
            line=one.line,
            source=case.source(one.file, one.line),
        )


def _failed(case: Case) -> Iterator[Advice]:
    groups: dict[tuple[object, ...], list[ev.Fallback]] = {}
    for event in case.of(ev.Fallback):  # a component steps down for the reason that its graphs failed for
        key = (event.component, event.from_preset, event.reason)
        groups.setdefault(key, []).append(event)
    for group in groups.values():
        first = next((one for one in group if one.file), group[0])
        whole = any(one.scope == "component" for one in group)
        graphs = sum(one.scope == "graph" for one in group)
        what = "all of it" if whole else count(graphs, "graph")
        yield _FAILED.advice(
            f"preset {first.from_preset} failed ({first.stage}) on {what}: {first.reason}; {_running(first.to_preset)}",
            component=first.component,
            file=first.file,
            line=first.line,
            source=case.source(first.file, first.line),
            times=len(group),
            change=f"{first.hint}; or ask for preset {first.to_preset}" if first.hint else _FAILED.change,
        )


def _running(preset: str) -> str:
    return "it runs eager" if preset == "none" else f"preset {preset} runs"
