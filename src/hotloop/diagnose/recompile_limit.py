"""The recompile limit was reached: what compiles from then on, and what filled it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem
from hotloop.diagnose.recompile import grouped
from hotloop.diagnose.recompile_words import problem_of
from hotloop.diagnose.words import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "recompile_limit"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a function was compiled as often as torch allows",
        cause="torch compiles one function 8 times at most (torch._dynamo.config.recompile_limit), and runs it eager "
        "for anything unseen after that, silently",
        cost="the compiles that filled the limit, and eager speed for what comes after",
        change="mend what recompiles it: see the advice on recompiles. Do not raise the limit: it hides the cause",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a function, with what recompiled it most."""
    groups: dict[tuple[str | None, str], list[ev.RecompileLimit]] = {}
    for event in case.of(ev.RecompileLimit):
        groups.setdefault((event.component, event.function), []).append(event)
    for (component, function), group in groups.items():
        known = [
            (kind, [one for one, _ in found if (one.event.component, one.event.function) == (component, function)])
            for kind, found in grouped(case)
        ]
        kind, most = max(known, key=lambda each: len(each[1]), default=("", []))
        place = most[0].event if most else group[0]
        what = f"{function} was compiled as often as torch allows"
        problem = PROBLEMS[0]
        if most:
            what += f"; {count(len(most), 'recompile')} came from one thing: {problem_of(kind).symptom}"
        yield problem.advice(
            what,
            component=component,
            file=place.file,
            line=place.line,
            source=case.source(place.file, place.line),
            times=len(group),
            change=f"{problem_of(kind).change}. Do not raise the limit: it hides the cause" if most else problem.change,
            remedy=problem_of(kind).remedy if most else None,
        )
