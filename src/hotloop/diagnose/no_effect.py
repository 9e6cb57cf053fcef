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
        kind="put_off",
        symptom="a call of one process ran eager, since its compile was put off",
        cause="other processes waited in a collective, which they give up after their timeout, or did not answer: a "
        "compile there takes long",
        cost="these calls run eager; a later one is compiled where all processes come to it alike",
        change="call hotloop.compile in every process, and have all of them compile at the same step: pad batches, and "
        "drop the short last one",
    ),
    Problem(
        rule=RULE,
        kind="offloaded",
        symptom="a part that is offloaded layer by layer is left as it is",
        cause="its layers are loaded and unloaded by hooks between them, which no graph can hold",
        cost=_COST,
        change="offload it as a whole (enable_model_cpu_offload) or by blocks, which are compiled",
    ),
    Problem(
        rule=RULE,
        kind="offloaded_late",
        symptom="a part is offloaded after it was compiled",
        cause="hooks come between its modules, which no graph can hold: each breaks, and is compiled again and again",
        cost=_COST,
        change="turn offloading on first, then call compile of hotloop.integrations.diffusers (again): what is "
        "offloaded as a whole or by blocks is compiled inside of the hooks",
    ),
    Problem(
        rule=RULE,
        kind="offloaded_around",
        symptom="a part that is offloaded is compiled in its repeated blocks alone",
        cause="hooks around its call move it to the device and back, which no graph can hold",
        cost="what it computes outside of these blocks runs operation by operation",
        change="leave offloading out where the part fits on the device: it is compiled whole then",
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
        kind="method",
        symptom="a step method is left eager, and the modules that it calls are compiled",
        cause="it reads what changes from step to step (self.global_step, a metric's count), so torch would compile it "
        "anew again and again",
        cost="what the method computes beside its modules (a loss) runs operation by operation",
        change="put what it computes beside its modules into a module, or read what changes outside of the method",
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
BY_KIND = {problem.kind: problem for problem in PROBLEMS}
CONTAINERS = ("Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a component and reason; containers have a rule of their own."""
    groups: dict[tuple[str | None, str], list[ev.NoEffect]] = {}
    for event in case.of(ev.NoEffect):
        if event.problem in BY_KIND and not container_of(event.reason):  # a later version may know more of them
            groups.setdefault((event.component, event.problem), []).append(event)
    for (component, kind), group in groups.items():
        event = next((one for one in group if one.file), group[0])
        yield BY_KIND[kind].advice(
            event.reason,
            component=component,
            file=event.file,
            line=event.line,
            source=case.source(event.file, event.line),
            times=len(group),
        )
    for component, cause in case.causes():
        if cause.get("stage") == "copy":
            yield BY_KIND["copy"].advice(BY_KIND["copy"].symptom, component=component)


def container_of(reason: str) -> str | None:
    """Give the container that a reason names; None for any other module."""
    words = reason.replace(",", " ").split()
    return next((name for name in CONTAINERS if name in words), None)
