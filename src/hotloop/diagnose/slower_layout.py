"""Convolutions compute in another layout than the one that tensors have."""

from __future__ import annotations

from hotloop.diagnose.faster_way import faster
from hotloop.diagnose.rule import Case, Found, Problem, Rule

LAID_OUT = "channels_last"


class SlowerLayout(Rule):
    problems = (
        Problem(
            rule="slower_layout",
            symptom="the layout that convolutions compute in makes a step slower",
            cause="on a GPU convolutions in half precision compute channels last, and transpose what goes in and what "
            "comes out",
            cost="the difference at every step",
            change="lay the model out once, model.to(memory_format=torch.channels_last), before the optimizer is made, "
            "and pictures alike, x.to(memory_format=torch.channels_last)",
            remedy="tier",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice where the layout was measured to be faster than eager and the preset that was asked for."""
        if advice := faster(case, LAID_OUT, self.problem(), "channels last", beside_asked=True):
            yield advice
