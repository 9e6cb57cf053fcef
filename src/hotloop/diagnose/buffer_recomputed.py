"""A checkpoint recomputes a forward that writes a buffer: eager counts it twice, compiled code once."""

from __future__ import annotations

from hotloop import events as ev
from hotloop.diagnose.rule import Case, Found, Problem, Rule, grouped
from hotloop.diagnose.words import count
from hotloop.remedies import NOT_CHECKPOINTED


class BufferRecomputed(Rule):
    problems = (
        Problem(
            rule="buffer_recomputed",
            symptom="a checkpointed forward writes a buffer: eager writes it twice, compiled code once",
            cause="eager runs the checkpointed forward again in the backward, and its BatchNorms count each batch "
            "twice; the compiler recomputes only what the backward reads",
            cost="other running statistics than eager's in compiled code, in silence: a Loop declines such a tier",
            change=NOT_CHECKPOINTED,
        ),
    )

    def find(self, case: Case) -> Found:
        """Yield one advice for all buffers of a component."""
        for group in grouped(case.of(ev.BufferRecomputed), lambda event: event.component):
            names = sorted({event.buffer for event in group})
            more = f", and {count(len(names) - 1, 'more buffer')}" if len(names) > 1 else ""
            what = f"a checkpoint writes {names[0]}{more} twice in eager, once in compiled code"
            yield self.problem().advice(what, component=group[0].component, times=len(names))
