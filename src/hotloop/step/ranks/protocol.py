"""A step in several processes: each one on the way to compiled code is agreed, and later ones now and then."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.ranks.peers import Vote

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.measure import Signature
    from hotloop.step.loop.runner import Runner
    from hotloop.step.ranks.peers import Peers
    from hotloop.step.tiers import Tier

EVERY = 32
"""Steps between two votes on whether the tier still runs in every process: where it failed in one, all leave it."""
GIVE_UP = 64
"""Votes without a proof after which a tier is given up: no shape came a second time in all processes at once."""
_HINT = "see the log of the process that it failed in"
_PAD = "pad batches to a few sizes (buckets=), and drop a short last one"
_EVEN = (
    "give all processes as many steps each; where a process waits for another's long work, have it wait at a barrier"
)


class Together:
    """Takes one runner's steps to a tier, and through it, at the pace of all processes.

    Args:
        runner: whose step.
        peers: the processes.

    Attributes:
        compiled_anew: the step in which this process has compiled other code while its tier was in force, until all
            processes prove theirs again; 0 where there is none.
    """

    def __init__(self, runner: Runner, peers: Peers) -> None:
        self._runner, self._peers = runner, peers
        self._seen: collections.deque[Signature] = collections.deque(maxlen=GIVE_UP)
        self._unproved = 0
        """Votes since the last proof: as many in all processes."""
        self._proved: set[Signature] = set()
        self._asked_for: Tier | None = None
        self.compiled_anew = 0

    def run(self, run: Callable[[], Any], tier: Tier, inputs: Signature, call: tuple[Any, Any]) -> Any:
        """Run a step. Where compiled code of one process has failed, that process is eager until all of them are."""
        self._asked_for = self._asked_for or (tier if tier.compiles else None)
        if self._asked_for is None:
            return run()
        if self._asked_for.compiles and self._runner.code.proven(self._asked_for.base):
            return self._proven(run, tier, inputs, call)
        return self._towards(run, tier, inputs, call)

    def _towards(self, run: Callable[[], Any], tier: Tier, inputs: Signature, call: tuple[Any, Any]) -> Any:
        """An agreed step: looked at, or run both ways by all processes, or eager in all of them."""
        runner = self._runner
        agreed = self._peers.agree(self._readiness(tier, inputs))
        self._seen.append(inputs)
        self._unproved += 1
        if agreed is Vote.NEVER:
            ours = runner.once or self._too_many_shapes()
            self._leave(tier, ours or Obstacle("another process cannot run it", _HINT))
            return runner.eagerly(run)
        with self._peers.patient():
            if runner.to_be_surveyed:
                return runner.survey(run, inputs, call)
            if agreed is not Vote.YES:
                return runner.eagerly(run)
            self._proved.add(inputs)
            self._unproved = 0
            result = runner.code.prove(run, tier)
            self._settle(tier)
        return result

    def _readiness(self, tier: Tier, inputs: Signature) -> Vote:
        """Say whether this process can run the step both ways: it was looked at, and its shape is no odd one."""
        if self._too_many_shapes() is not None:
            return Vote.NEVER
        if self._runner.to_be_surveyed:
            return Vote.NOT_NOW
        if self._runner.once is not None or not tier.compiles:
            return Vote.NEVER
        return Vote.YES if inputs in self._seen else Vote.NOT_NOW

    def _too_many_shapes(self) -> Obstacle | None:
        if self._unproved < GIVE_UP:
            return None
        return Obstacle(f"in {GIVE_UP} steps no shapes came a second time in all processes at once", _PAD)

    def ready(self, error: Exception | None) -> None:
        """Begin a run of a proof in all processes, or in none: one had no memory for the copies beside it.

        Raises:
            CandidateFailedError: in none.
        """
        if self._peers.agree(Vote.YES if error is None else Vote.NEVER) is Vote.YES:
            return
        cause = error or MemoryError(
            self._peers.unanswered or "another process has no memory for the copies of a proof"
        )
        raise CandidateFailedError(began=False) from cause

    def stays(self, stays: bool) -> bool:
        """Tell whether a rehearsed step stays in any process: then in all, since the others' collectives would wait."""
        return self._peers.agree(Vote.NOT_NOW if stays else Vote.YES) is not Vote.YES

    def _settle(self, tier: Tier) -> None:
        """After a proof step: the tier is proven when it is so in all processes, and left when it is wrong in one."""
        runner = self._runner
        stays = runner.loop.goal == tier
        mine = Vote.YES if runner.code.proven(tier.base) else Vote.NOT_NOW if stays else Vote.NEVER
        agreed = self._peers.agree(mine)
        if agreed is Vote.NEVER:
            self._leave(tier, Obstacle("it does not agree with eager in another process", _HINT))
        elif agreed is Vote.NOT_NOW:
            runner.code.not_proven(tier.base)

    def _proven(self, run: Callable[[], Any], tier: Tier, inputs: Signature, call: tuple[Any, Any]) -> Any:
        runner, asked = self._runner, self._asked_for
        assert asked is not None
        if runner.loop.steps % EVERY == 0:
            mine = Vote.NOT_NOW if self.compiled_anew else Vote.YES
            agreed = self._peers.agree(mine if tier.compiles else Vote.NEVER)
            if agreed is Vote.NEVER:
                self._leave(asked, Obstacle("it failed in another process", _HINT))
                return runner.eagerly(run)
            if agreed is Vote.NOT_NOW:
                return self._again(run, tier, inputs, call)
        if self.compiled_anew:  # what is not proven does not train; the others' code was, and goes on
            return runner.eagerly(run)
        if not tier.compiles or inputs not in self._proved:
            # This process alone: while it compiled for a short batch, the others would wait in a collective.
            if tier.compiles:
                runner.loop.say_once(
                    f"{runner.name}: batches of other shapes than those that {tier.name} was proven with run eager, "
                    f"as the other processes would wait for a compile: {_PAD}"
                )
            return runner.eagerly(run)
        return runner.guarded(run, tier)

    def _again(self, run: Callable[[], Any], tier: Tier, inputs: Signature, call: tuple[Any, Any]) -> Any:
        """Prove the code of all processes again, from this step on, which is the same one in all of them."""
        anew, self.compiled_anew = self.compiled_anew, 0
        here = f"step {anew} has compiled code anew" if anew else "another process has compiled code anew"
        self._runner.code.prove_again(tier.base, here)
        self._proved.clear()
        return self._towards(run, tier, inputs, call)

    def _leave(self, tier: Tier, obstacle: Obstacle) -> None:
        """Leave a tier for good, in this step, which is the same one in all processes that vote."""
        runner = self._runner
        if self._peers.unanswered:
            obstacle = Obstacle(self._peers.unanswered, _EVEN)
        runner.code.not_proven(tier.base)
        if runner.loop.goal.compiles:
            runner.loop.course.failed(tier, obstacle, runner)
        self._asked_for = None
