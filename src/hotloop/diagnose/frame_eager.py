"""A line keeps a whole function eager, since it cannot be traced."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.break_texts import RAISED, cause_of, what_of
from hotloop.diagnose.rule import Advice, Case, Found, Problem, Rule, grouped


class FrameEager(Rule):
    problems = (
        Problem(
            rule="frame_eager",
            symptom="a whole function stays eager",
            cause="tracing stopped where it cannot go on in a new graph: inside try, with, or a loop over a generator",
            cost="everything in that function runs at eager speed; what it calls may still be compiled",
            change="fix the line as for a graph break, or move it out of the try, with or loop",
        ),
        RAISED,
    )
    resumed = "torch_dynamo_resume_in_"  # how torch names the rest of a function behind a graph break

    def find(self, case: Case) -> Found:
        """Yield one advice per line that keeps functions eager."""
        # Nobody can change the rest of a function of torch's own, and no work of the program is in it.
        events = [
            event for event in case.of(ev.FrameEager) if event.file or not event.function.startswith(self.resumed)
        ]
        for group in grouped(
            events, lambda event: (event.component, event.file, event.line, "" if event.file else event.function)
        ):
            yield self.advice(case, group)

    def advice(self, case: Case, group: list[ev.FrameEager]) -> Advice:
        """Return the advice on one line."""
        event, place = group[0], case.place(group[0])
        known, problem = cause_of(event.reason, place["source"]), self.problem()
        function = event.function
        if function.startswith(self.resumed):
            function = f"the rest of {function.removeprefix(self.resumed).rpartition('_at_')[0]}"
        if known is RAISED:
            return RAISED.advice(f"{function} stays eager: it raised exceptions of its own", **place, times=len(group))
        why, change = what_of(known, event.reason), f"{known.change}; or move the line out of the try or with"
        if known.kind == "other":
            why = event.reason
            change = event.hint if event.hint and not event.file else problem.change
        return problem.advice(
            f"{function} stays eager: {why}",
            **place,
            times=len(group),
            milliseconds=case.waited_ms(event.file, event.line),
            cause=problem.cause if "Unsupported" in event.reason else "torch's tracing failed in it",
            change=change,
        )
