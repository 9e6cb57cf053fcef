"""A compile was asked for, but the component runs eager, as a whole or in part."""

from __future__ import annotations

import functools

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped

_no_effect = functools.partial(Problem, rule="no_effect", cost="all of it: the component runs eager")


class NoEffect(Rule):
    problems = (
        _no_effect(
            kind="bypassed",
            symptom="the model is trained, but its compiled call is never entered",
            cause="hotloop.compile replaces the call model(x); model.forward(x) and other methods bypass it",
            change="call the model itself, model(x), or compile what is called: m.method = hotloop.compile(m.method)",
        ),
        _no_effect(
            kind="offloaded",
            symptom="a part that is offloaded stays eager",
            cause="hooks move it to the device and back, which no graph can hold",
            change="do not offload the part if it fits on the device: then it is compiled whole",
        ),
        _no_effect(
            kind="no_graph",
            symptom="no tensor operation of a component reaches a graph",
            cause="its call does no work that torch traces: it calls code that is skipped, or compiled separately",
            change="compile the module or function that does the work",
        ),
        _no_effect(
            kind="transform",
            symptom="a compiled model is called under a transform of torch.func",
            cause="torch cannot compile a part of a function that grad, vmap or the like transform",
            cost="these calls run eager",
            change="compile the function that applies the transform instead",
        ),
        _no_effect(
            kind="method",
            symptom="a step method is left eager, and the modules that it calls are compiled",
            cause="it reads values that change from step to step (self.global_step, a metric's count), so torch would "
            "recompile it again and again",
            cost="what the method computes beside its modules (a loss) runs operation by operation",
            change="move what it computes beside its modules into a module, or read the changing values outside of "
            "the method",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per component and reason; rule `container` advises on containers."""
        known = {problem.kind for problem in self.problems}  # a record of a later version may hold others
        events = [event for event in case.of(ev.NoEffect) if event.problem in known and not container_of(event.reason)]
        for group in grouped(events, lambda event: (event.component, event.problem)):
            event = next((event for event in group if event.file), group[0])
            yield self.problem(event.problem).advice(event.reason, **case.place(event), times=len(group))


def container_of(reason: str) -> str | None:
    """Return the name of the container class that a reason names; None if it names another module."""
    words = reason.replace(",", " ").split()
    containers = ("Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict")
    return next((name for name in containers if name in words), None)
