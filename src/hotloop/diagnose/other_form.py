"""What a layer would save in another form that was timed beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hotloop.diagnose.rule import Case, number

if TYPE_CHECKING:
    from collections.abc import Mapping

WORTH_IT = 0.01
"""Share of a step that has to be saved."""


class Gain(NamedTuple):
    """The ms of a call as it is and in the other form, and how many such calls a step has."""

    took: float
    other: float
    calls: int

    @property
    def milliseconds(self) -> float:
        """What the other form saves a step."""
        return (self.took - self.other) * self.calls


def gain(case: Case, figures: Mapping[str, Any], prefix: str) -> Gain | None:
    """Return what the other form of a part of the step saves; None where it is not known to, or saves next to nothing.

    Args:
        case: the run.
        figures: ``step_ms`` and ``step_ms_low`` of the part, the other form's ``step_ms`` and ``step_ms_high`` after
            the prefix, and ``calls``, 1 by default.
        prefix: of the other form's figures.
    """
    names = ("step_ms_low", "step_ms", f"{prefix}step_ms", f"{prefix}step_ms_high")
    low, took, other, high = (number(figures.get(name)) for name in names)
    calls = figures.get("calls", 1)
    if low is None or took is None or other is None or high is None or type(calls) is not int or high >= low:
        return None
    found = Gain(took, other, calls)
    step = number(case.way("eager").get("step_ms")) or 0.0
    return found if found.milliseconds >= WORTH_IT * step else None
