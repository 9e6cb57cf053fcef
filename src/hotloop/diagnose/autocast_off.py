"""A step computes in float32 on a card that has bfloat16."""

from __future__ import annotations

from hotloop.diagnose.faster_way import faster
from hotloop.diagnose.rule import Case, Found, Problem, Rule

AUTOCAST = "with autocast"


class AutocastOff(Rule):
    problems = (
        Problem(
            rule="autocast_off",
            symptom="a step computes in float32 where the card has bfloat16",
            cause="tensor cores multiply bfloat16 several times as fast as float32, and half as many bytes are moved",
            cost="the difference at every step",
            change="run the forward and the loss in \"with torch.autocast('cuda', torch.bfloat16):\", and the backward "
            "after it; it changes numerics: what autocast lists is computed with 8 bits of precision, while parameters "
            "and optimizer stay float32",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice where eager steps were measured to be faster under autocast."""
        if advice := faster(case, AUTOCAST, self.problem(), "under bfloat16 autocast"):
            yield advice
