"""Matrices in float32 are multiplied in full float32 on a card that has TF32."""

from __future__ import annotations

from hotloop.diagnose.faster_way import faster
from hotloop.diagnose.rule import Case, Found, Problem, Rule

TF32 = "with TF32"


class Tf32Off(Rule):
    problems = (
        Problem(
            rule="tf32_off",
            symptom="matrices in float32 are multiplied without TF32",
            cause="a card from Ampere on multiplies float32 on its tensor cores only where TF32 is allowed, and torch "
            "does not allow it by itself",
            cost="the difference at every step",
            change='call torch.set_float32_matmul_precision("high") once, before the first step; it changes numerics: '
            "products keep 10 bits of each factor, where float32 keeps 23",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice where eager steps were measured to be faster with TF32."""
        if advice := faster(case, TF32, self.problem(), "with TF32"):
            yield advice
