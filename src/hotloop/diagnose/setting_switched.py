"""Somebody changed a setting of torch's that changes numerics or speed: a framework that switches TF32 on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.diagnose.problem import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hotloop.diagnose.advice import Advice
    from hotloop.diagnose.case import Case

RULE = "setting_switched"
PROBLEMS = (
    Problem(
        rule=RULE,
        kind="tf32",
        symptom="TF32 was switched on by a framework",
        cause="matrix products in float32 then keep 10 bits of each factor: faster, and 1,000 times less exact",
        cost="numerics that differ from the same code without the framework; none in time",
        change='decide it yourself, before the first step: torch.set_float32_matmul_precision("highest") for float32, '
        '"high" for TF32',
    ),
    Problem(
        rule=RULE,
        kind="other",
        symptom="a setting of torch's was changed by somebody else",
        cause="torch's settings belong to the whole process, and a library that changes one changes it for all code",
        cost="a recompile where code was compiled before, and numerics or speed that nobody asked for",
        change="set it yourself, once, before the first step",
    ),
)
_TF32 = ("tf32", "fp32_precision", "float32_matmul_precision")


def find(case: Case) -> Iterator[Advice]:
    """Give one advice a setting and who changed it."""
    groups: dict[tuple[object, ...], list[ev.SettingSwitched]] = {}
    for event in case.of(ev.SettingSwitched):
        groups.setdefault((event.setting, event.by, event.after), []).append(event)
    for group in groups.values():
        event = group[0]
        problem = PROBLEMS[0] if any(word in event.setting.lower() for word in _TF32) else PROBLEMS[1]
        yield problem.advice(
            f"{event.by} changed {event.setting} from {event.before} to {event.after}",
            component=event.component,
            file=event.file,
            line=event.line,
            source=case.source(event.file, event.line),
            times=len(group),
        )
