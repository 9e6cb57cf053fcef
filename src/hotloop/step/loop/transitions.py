"""The course that a loop takes between tiers: which one it aims at, and what proofs and failures make of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotloop import events as ev
from hotloop.step.prove.proof import STEPS as PROOF_STEPS
from hotloop.step.tiers import Tier

if TYPE_CHECKING:
    from hotloop.step.loop.loop import Loop
    from hotloop.step.loop.runner import Runner
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.prove.outcomes import Outcome


class Course:
    """Sets the tier that the steps of a loop run in.

    Args:
        loop: whose steps.
        goal: the tier that they begin with.
        runners: those of the steps that were decorated so far.
    """

    def __init__(self, loop: Loop, goal: Tier, runners: list[Runner]) -> None:
        self._loop, self.goal, self._runners = loop, goal, runners

    def aim(self, tier: Tier, reason: str) -> None:
        """From the next step on, run in a tier, or on the way to it."""
        before = self.goal
        self.turn(tier)
        if before.graph and not tier.graph:
            self._loop.recorded.return_step_counts()
        if before != tier:
            self._loop.emit(
                ev.TierChanged(step=self._loop.steps, from_tier=before.name, to_tier=tier.name, reason=reason)
            )

    def turn(self, tier: Tier) -> None:
        """Run the next step in a tier, as part of a trial: no more is changed than that."""
        self.goal = tier
        if self._loop.surveyed.looks or not tier.compiles:  # a survey tells whether to compile at all
            self.put_on(tier)

    def put_on(self, tier: Tier) -> None:
        """Have the code of a tier in force; what has to be compiled is so in the steps that follow."""
        self._loop.compiled.install(tier)

    def release(self, tier: Tier) -> None:
        """Give back what the recordings of a tier hold: a whole step's memory each."""
        for runner in self._runners:
            runner.release(tier.base)
        if not self.goal.graph:
            self._loop.recorded.return_step_counts()

    def forget_recordings(self) -> None:
        """Let go of everything that was captured."""
        for runner in self._runners:
            runner.forget_recordings()
        self._loop.recorded.return_step_counts()

    def stay_as_given(self) -> None:
        """Run the models as they were given; nothing that was compiled or captured is kept."""
        self.goal = Tier(self._loop.given)
        self._loop.compiled.remove()
        for runner in self._runners:
            runner.forget_recordings()

    def accepted(self, runner: Runner, outcome: Outcome) -> None:
        """A recording was proven."""
        self._proven(self.goal, runner, outcome)

    def base_accepted(self, tier: Tier, runner: Runner, outcome: Outcome) -> None:
        """Compiled code was proven."""
        self._proven(tier.without_graph(), runner, outcome)

    def _proven(self, tier: Tier, runner: Runner, outcome: Outcome) -> None:
        self._loop.emit(
            ev.TierProven(
                step=self._loop.steps,
                function=runner.name,
                tier=tier.name,
                steps=PROOF_STEPS,
                worst=outcome.worst,
                seconds=self._loop.account.proof_seconds,
                copied_bytes=outcome.nbytes,
                on_host=outcome.on_host,
            )
        )
        if self._loop.auto is not None:
            self._loop.auto.proven(tier)

    def declined(self, tier: Tier, obstacle: Obstacle, runner: Runner) -> None:
        """A kind of call cannot be captured; others may."""
        self._tell_declined(tier, obstacle, runner)
        if any(variant.declined is None for variant in runner.variants.values() if variant.calls > 1):
            return
        if self._loop.auto is not None:
            self._loop.auto.declined(tier, str(obstacle))

    def failed(self, tier: Tier, obstacle: Obstacle, runner: Runner) -> None:
        """A tier's code failed or was wrong: from the next step on, another one runs."""
        self._tell_declined(tier, obstacle, runner)
        if self._loop.auto is not None:
            self._loop.auto.declined(tier, str(obstacle))
        else:
            below = Tier(self._loop.given, graph=self.goal.graph) if tier.compiles else tier.without_graph()
            self.aim(below, str(obstacle))

    def _tell_declined(self, tier: Tier, obstacle: Obstacle, runner: Runner) -> None:
        event = ev.TierDeclined(
            step=self._loop.steps,
            function=runner.name,
            tier=tier.name,
            reason=obstacle.reason,
            hint=obstacle.hint,
            file=obstacle.file,
            line=obstacle.line,
            source=obstacle.source,
        )
        self._loop.emit(event)
