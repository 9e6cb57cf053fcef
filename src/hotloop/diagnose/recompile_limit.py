"""A function reached the recompile limit: torch does not compile it any more."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.recompile import Recompile
from hotloop.diagnose.recompile_words import problem_of
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped
from hotloop.diagnose.words import count


class RecompileLimit(Rule):
    problems = (
        Problem(
            rule="recompile_limit",
            symptom="a function was compiled as often as torch allows",
            cause="torch compiles one function 8 times at most (torch._dynamo.config.recompile_limit), and runs it "
            "eager for anything unseen after that, silently",
            cost="the compiles that filled the limit, and eager speed for what comes after",
            change="fix what recompiles it: see the advice on recompiles. Do not raise the limit: it hides the cause",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per function, with what recompiled it most."""
        for group in grouped(case.of(ev.RecompileLimit), lambda event: (event.component, event.function)):
            limited = group[0]
            kind, events = self.main_cause(case, limited)
            what = f"{limited.function} was compiled as often as torch allows"
            if not events:
                yield self.problem().advice(what, **case.place(limited), times=len(group))
                continue
            cause = problem_of(kind)
            yield self.problem().advice(
                f"{what}; {count(len(events), 'recompile')} came from one thing: {cause.symptom}",
                **case.place(events[0]),
                times=len(group),
                change=f"{cause.change}. Do not raise the limit: it hides the cause",
                remedy=cause.remedy,
            )

    @staticmethod
    def main_cause(case: Case, limited: ev.RecompileLimit) -> tuple[str, list[ev.Recompiled]]:
        """Return the kind of change that recompiled a function most, with its recompiles; none if none is known."""
        most: tuple[str, list[ev.Recompiled]] = "", []
        for kind, group in Recompile().groups(case):
            events = [frame.event for frame, _ in group]
            here = [
                event for event in events if (event.component, event.function) == (limited.component, limited.function)
            ]
            if len(here) > len(most[1]):
                most = kind, here
        return most
