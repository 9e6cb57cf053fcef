"""A container was compiled, but its own call is never entered."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.no_effect import container_of
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped


class Container(Rule):
    problems = (
        Problem(
            rule="container",
            symptom="a container was compiled, and reaches no graph",
            cause="a ModuleList or ModuleDict has no call of its own, and torch's own module.compile() skips the call "
            "of a Sequential: only what is inside them is called",
            cost="all of it: what is inside runs eager",
            change="compile the modules inside it, each of them or the model around them",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per container."""
        events = [event for event in case.of(ev.NoEffect) if container_of(event.reason)]
        for group in grouped(events, lambda event: (event.component, container_of(event.reason))):
            what = f"{container_of(group[0].reason)} was compiled, but its compiled call reached no graph"
            yield self.problem().advice(what, **case.place(group[0]), times=len(group))
