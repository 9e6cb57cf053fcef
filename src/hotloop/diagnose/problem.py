"""A problem of the catalogue: what a rule finds, in the words that its advice uses as well."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop.diagnose.advice import Advice

if TYPE_CHECKING:
    from hotloop.remedies import Remedy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that a rule can find.

    Args:
        rule: the rule's name.
        kind: the problem's name within the rule; the rule's own where it has one only.
        symptom: what is seen, as a sentence without figures.
        cause: why it is so.
        cost: what it costs, in words; figures are the advice's.
        change: what to change, as an order.
        remedy: what hotloop's loop does about it by itself.
    """

    rule: str
    kind: str
    symptom: str
    cause: str
    cost: str
    change: str
    remedy: Remedy | None = None

    def advice(self, what: str, **fields: Any) -> Advice:
        """Give advice in this problem's words; ``fields`` are the figures and the place, and more exact words."""
        words = {"cause": self.cause, "change": self.change, "remedy": self.remedy}
        return Advice(rule=self.rule, kind=self.kind, what=what, **{**words, **fields})
