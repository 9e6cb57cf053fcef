"""Activation checkpointing is around compiled code instead of inside it."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped


class CheckpointOutside(Rule):
    problems = (
        Problem(
            rule="checkpoint_outside",
            symptom="activation checkpointing wraps compiled code from outside",
            cause="the recomputation calls the compiled code a second time as a whole: the compiler cannot choose "
            "what to keep, nor fuse the recomputation into the backward",
            cost="a whole second forward in each backward; inside the compiled part only what is cheap is recomputed",
            change="compile the module that calls torch.utils.checkpoint (use_reentrant=False), not the one inside it",
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice per place."""
        events = case.of(ev.CheckpointOutside)
        for group in grouped(events, lambda event: (event.component, event.file, event.line, event.function)):
            what = f"activation checkpointing wraps {group[0].function} from outside"
            yield self.problem().advice(what, **case.place(group[0]), times=len(group))
