"""Compilation is switched off by HOTLOOP_DISABLE."""

from __future__ import annotations

from hotloop.diagnose.rule import Case, Found, Problem, Rule


class Disabled(Rule):
    problems = (
        Problem(
            rule="disabled",
            symptom="HOTLOOP_DISABLE is set",
            cause="the variable makes everything run eager, to rule hotloop out as a cause",
            cost="all that compiling and capturing would have saved",
            change="unset HOTLOOP_DISABLE",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice for the run."""
        causes = [(name, cause) for name, cause in case.causes() if cause.get("stage") == "disabled"]
        value = str(case.environment.get("HOTLOOP_DISABLE", "") or "")
        if causes:
            names = ", ".join(dict.fromkeys(name for name, _ in causes))
            what = f"{causes[0][1].get('reason')}: everything runs eager"
            yield self.problem().advice(what, component=names, times=len(causes))
        elif value.strip().lower() not in ("", "0", "false", "no"):
            yield self.problem().advice(f"HOTLOOP_DISABLE={value} is set: everything runs eager")
