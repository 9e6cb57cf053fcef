"""A preset failed to compile, this machine cannot run it, or its code failed while it ran."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.rule import Advice, Case, Found, Problem, Rule, grouped
from hotloop.diagnose.words import count


class Fallback(Rule):
    problems = (
        Problem(
            rule="fallback",
            kind="failed",
            symptom="a preset failed, and a lower one runs",
            cause="the compiler could not compile the graph; hotloop took the next rung of the component's ladder",
            cost="the speed of the lower rung instead of the preset's",
            change="fix what the reason names, or ask for the preset that runs: then the failing preset costs no "
            "attempt",
        ),
        Problem(
            rule="fallback",
            kind="unavailable",
            symptom="this machine cannot run a preset",
            cause="a part that the preset needs is missing",
            cost="the speed of the lower rung instead of the preset's",
            change="install what is missing, or ask for the preset that runs",
        ),
        Problem(
            rule="fallback",
            kind="run_failed",
            symptom="compiled code failed while it ran, where eager does not",
            cause="a compiler's mistake, or memory: the same operations succeed in eager",
            cost="the run, from that step on",
            change="resume from the last checkpoint with a lower preset (aot_eager, none); a hotloop.Loop undoes such "
            "a step itself",
            remedy="tier",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per failure, however many graphs met it."""
        # A component steps down for the reason that its graphs failed for, so both are one failure.
        failed = grouped(case.of(ev.Fallback), lambda event: (event.component, event.from_preset, event.reason))
        for fallbacks in failed:
            yield self.failed(case, fallbacks)
        missing = grouped(case.of(ev.Unavailable), lambda event: (event.preset, event.missing, event.running))
        for group in missing:
            names = dict.fromkeys(event.component for event in group if event.component)
            yield self.problem("unavailable").advice(
                f"preset {group[0].preset} cannot run here: {group[0].missing}; {self.running(group[0].running)}",
                component=", ".join(names) or None,
                times=len(names) or 1,
            )
        undone = {event.reason for event in case.of(ev.StepUndone)}  # found by the rule `step_undone`
        for event in case.of(ev.RunFailed):
            if event.reason not in undone:
                what = f"compiled code failed in its {event.phase} under preset {event.preset}: {event.reason}"
                yield self.problem("run_failed").advice(what, **case.place(event))

    def failed(self, case: Case, group: list[ev.Fallback]) -> Advice:
        """Return the advice on one failed preset."""
        first = next((event for event in group if event.file), group[0])
        whole = any(event.scope == "component" for event in group)
        what = "all of it" if whole else count(sum(event.scope == "graph" for event in group), "graph")
        problem, hint = self.problem("failed"), first.hint
        return problem.advice(
            f"preset {first.from_preset} failed ({first.stage}) on {what}: {first.reason}; "
            f"{self.running(first.to_preset)}",
            **case.place(first),
            times=len(group),
            change=f"{hint}; or ask for preset {first.to_preset}" if hint else problem.change,
        )

    @staticmethod
    def running(preset: str) -> str:
        """Say what runs instead."""
        return "it runs eager" if preset == "none" else f"preset {preset} runs"
