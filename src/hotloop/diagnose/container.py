"""A container was compiled, and its call is not what runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.no_effect import container_of
from hotloop.diagnose.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "container"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="a container was compiled, and reaches no graph",
        cause="a ModuleList or ModuleDict has no call of its own, and torch's own module.compile() skips the call of a "
        "Sequential: only what is inside them is called",
        cost="all of it: what is inside runs eager",
        change="compile the modules inside it, each of them or the model around them",
    ),
)


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a container."""
    groups: dict[tuple[str | None, str], list[ev.NoEffect]] = {}
    for event in case.of(ev.NoEffect):
        if found := container_of(event.reason):
            groups.setdefault((event.component, found), []).append(event)
    for (component, name), group in groups.items():
        yield PROBLEMS[0].advice(
            f"{name} was compiled, but its compiled call reached no graph",
            component=component,
            file=group[0].file,
            line=group[0].line,
            source=case.source(group[0].file, group[0].line),
            times=len(group),
        )
