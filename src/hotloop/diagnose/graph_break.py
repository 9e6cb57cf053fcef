"""Graph breaks, by cause: one advice a line, whatever the number of frames that met it."""

from __future__ import annotations

import re

from hotloop import events as ev
from hotloop.diagnose.break_texts import PROBLEMS, cause_of, what_of
from hotloop.diagnose.recompile import count, recompiles, resumed_at
from hotloop.diagnose.rule import Advice, Case, Found, Rule, grouped
from hotloop.diagnose.words import times


class GraphBreak(Rule):
    problems = PROBLEMS

    def find(self, case: Case) -> Found:
        """Yield one advice per place, or per line that leads to a place in an installed package."""
        # `frame_eager` advises on a line that keeps its whole function eager.
        stays_eager = {(event.component, event.file, event.line) for event in case.of(ev.FrameEager) if event.file}
        events = [
            event for event in case.of(ev.GraphBreak) if (event.component, event.file, event.line) not in stays_eager
        ]
        places = grouped(events, lambda event: (event.component, event.file, event.line))
        for group in places:
            if self.is_known_elsewhere(group, [other for other in places if other is not group]):
                continue
            leads = [event for event in group if event.by_file]
            for same_lead in grouped(leads, lambda event: (event.by_file, event.by_line)) or [group]:
                yield self.advice(case, same_lead)

    @staticmethod
    def is_known_elsewhere(group: list[ev.GraphBreak], others: list[list[ev.GraphBreak]]) -> bool:
        """Return whether a break only repeats another break, or torch's own code asks for it (its optimizers do).

        The call of a function that broke breaks again; torch's reason is ``step_unsupported`` then. So does that
        function when torch traces it as a frame of its own: inside a library, no line of the program is known for it.
        """
        first, has_lead = group[0], any(event.by_file for event in group)
        file = first.file or ""
        in_torch = re.search(r"(?:^|[/\\])site-packages[/\\]torch[/\\]", file)
        if not has_lead and in_torch and cause_of(first.reason, first.source).kind == "asked":
            return True
        reasons = {other[0].reason for other in others if other[0].component == first.component}
        if all(event.reason == "step_unsupported" for event in group):
            return bool(reasons - {"step_unsupported"})
        installed = re.search(r"(?:^|[/\\])(?:lib[/\\]python3|Lib[/\\]|site-packages[/\\]|dist-packages[/\\])", file)
        return not has_lead and installed is not None and first.reason in reasons

    @staticmethod
    def advice(case: Case, group: list[ev.GraphBreak]) -> Advice:
        """Return the advice on the breaks at one place."""
        event = next((event for event in group if not event.reason.startswith("generic_jump")), group[0])
        problem = cause_of(event.reason, event.source)
        file, line, source = event.file, event.line, event.source
        what = what_of(problem, event.reason)
        if event.by_file is not None and problem.kind == "self_log":
            # Nobody looks for self.log in Lightning's own file: name the program's line.
            file, line, source = event.by_file, event.by_line, event.by_source
        elif event.by_file is not None:
            what += f" in an installed package, called at {event.by_file}:{event.by_line}: {event.by_source}"
        again = [recompile for recompile in recompiles(case) if recompile.is_caused_by(event)]
        if again:
            what += f"; the code behind it was recompiled {times(len(again))}, since its result changed"
        # The first compiles of the code behind the break, which torch names by the line of the break.
        behind = {(event.component, event.file, event.line), (event.component, event.by_file, event.by_line)}
        first = [
            compiled
            for compiled in case.of(ev.Compiled)
            if compiled.phase == "forward" and compiled.frame.endswith("/0")
        ]
        resumed = [event for event in first if (event.component, event.file, resumed_at(event.function)) in behind]
        return problem.advice(
            what,
            component=event.component,
            file=file,
            line=line,
            source=source,
            times=len(group),
            milliseconds=case.waited_ms(file, line),
            compiles=len(resumed) + count(again),
            seconds=sum(recompile.seconds for recompile in again),
        )
