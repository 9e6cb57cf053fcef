"""torch.distributions checks its arguments in every step."""

from __future__ import annotations

from hotloop.diagnose.faster_way import faster
from hotloop.diagnose.rule import Case, Found, Problem, Rule

UNCHECKED = "without checks"
OF_DISTRIBUTIONS = "torch/distributions/"
"""Part of an event's reason where such a check reads a value."""


class ArgumentChecks(Rule):
    problems = (
        Problem(
            rule="argument_checks",
            symptom="torch.distributions checks its arguments in every step",
            cause="each check computes whether all values are valid, and waits for the answer on the host",
            cost="the difference at every step; and the step cannot be captured",
            change="once the program is right, pass validate_args=False to the distributions, or call "
            "torch.distributions.Distribution.set_default_validate_args(False) once; numerics stay as they are, and "
            "invalid arguments no longer raise",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice where eager steps were measured to be faster without the checks."""
        if advice := faster(case, UNCHECKED, self.problem(), "without the checks"):
            yield advice
