"""Compilation is switched off by HOTLOOP_DISABLE."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop.diagnose.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "disabled"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind=RULE,
        symptom="HOTLOOP_DISABLE is set",
        cause="the variable makes everything eager, to rule hotloop out",
        cost="all that compiling and capturing would have saved",
        change="unset HOTLOOP_DISABLE",
    ),
)
_OFF = ("", "0", "false", "no")


def find(case: Case) -> Iterator[Advice]:
    """Give one advice for the run."""
    held = [(name, str(cause.get("reason"))) for name, cause in case.causes() if cause.get("stage") == "disabled"]
    value = str(case.environment.get("HOTLOOP_DISABLE", "") or "")
    if held:
        names = ", ".join(dict.fromkeys(name for name, _ in held))
        yield PROBLEMS[0].advice(f"{held[0][1]}: everything runs eager", component=names, times=len(held))
    elif value.strip().lower() not in _OFF:
        yield PROBLEMS[0].advice(f"HOTLOOP_DISABLE={value} is set: everything runs eager")
