"""A compile that was asked for and takes no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "no_effect"
_COST = "all of it: the component runs eager"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind="bypassed",
        symptom="the model is trained, but its compiled call is never entered",
        cause="compile routes the call model(x); model.forward(x) and other methods go past it",
        cost=_COST,
        change="call the model itself, model(x), or compile what is called: m.method = hotloop.compile(m.method)",
    ),
    Problem(
        rule=RULE,
        kind="no_graph",
        symptom="no tensor operation of a component reaches a graph",
        cause="its call does no work that torch traces: it hands on to code that is skipped or compiled apart",
        cost=_COST,
        change="compile the module or function that does the work",
    ),
    Problem(
        rule=RULE,
        kind="transform",
        symptom="a compiled model is called under a transform of torch.func",
        cause="torch cannot compile a part of what grad, vmap and the like transform",
        cost="these calls run eager",
        change="compile the function that applies the transform instead",
    ),
    Problem(
        rule=RULE,
        kind="copy",
        symptom="a copy of a compiled model is eager",
        cause="deepcopy and pickling drop the compile, in torch as well",
        cost=_COST,
        change="call hotloop.compile on the copy",
    ),
)
_BY_KIND = {problem.kind: problem for problem in PROBLEMS}
CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a component and reason; containers have a rule of their own."""
    groups: dict[tuple[str | None, str], list[ev.NoEffect]] = {}
    for event in case.of(ev.NoEffect):
        if not container_of(event.reason):
            groups.setdefault((event.component, kind_of(event.reason)), []).append(event)
    for (component, kind), group in groups.items():
        event = next((one for one in group if one.file), group[0])
        problem = _BY_KIND[kind]
        yield problem.advice(
            event.reason,
            component=component,
            file=event.file,
            line=event.line,
            source=case.source(event.file, event.line),
            times=len(group),
        )
    for component, cause in case.causes():
        if cause.get("stage") == "copy":
            yield _BY_KIND["copy"].advice(_BY_KIND["copy"].symptom, component=component)


def kind_of(reason: str) -> str:
    """Give the problem behind a reason."""
    if "never entered" in reason:
        return "bypassed"
    return "transform" if "transform of torch.func" in reason else "no_graph"


def container_of(reason: str) -> str | None:
    """Give the container that a reason names; None for any other module."""
    words = reason.replace(",", " ").split()
    return next((name for name in CONTAINERS if name in words), None)
