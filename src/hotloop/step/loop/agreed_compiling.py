"""A step in several processes: each one on the way to compiled code is agreed, and later ones now and then."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

from hotloop.errors import StepLostError
from hotloop.step.obstacle import Obstacle
from hotloop.step.ranks.votes import AS_MANY, About, Vote

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.measure import Signature
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.code_proofs import CodeProofs
    from hotloop.step.ranks.votes import Peers
    from hotloop.step.rescue import Rescue
    from hotloop.step.tiers import Tier

EVERY = 32
"""Calls between two votes on whether the tier still runs in every process: where it failed in one, all leave it."""
GIVE_UP = 64
"""Votes without a proof after which a tier is given up: no shape came a second time in all processes at once."""
HINT = "see the log of the process that it failed in"
_FAILED_HERE = Obstacle("its code failed before", HINT)
PAD = "pad batches to a few sizes (buckets=), and drop a short last one"


class AgreedStep:
    """The way of one step to a tier, and through it, at the pace of all processes.

    Args:
        audit: audits a call of the step.
        to_be_audited: returns whether the step has to be audited before anything else.

    Attributes:
        asked_for: the tier by name that the processes are on the way to, or in; None once all have left it, in one
            call, and where `auto` chooses.
    """

    def __init__(
        self,
        step: DecoratedStep,
        code: CodeProofs,
        rescue: Rescue,
        audit: Callable[[Signature, Any], Any],
        to_be_audited: Callable[[], bool],
    ) -> None:
        peers = step.context.peers
        assert peers is not None
        self._step, self._peers, self._code, self._rescue = step, peers, code, rescue
        self._audit, self._to_be_audited = audit, to_be_audited
        self._seen: collections.deque[Signature] = collections.deque(maxlen=GIVE_UP)
        self._unproved = self._calls = 0
        """Votes since the last proof, and calls: as many in all processes, those that raised included."""
        self._collectives: dict[bool, int] = {}
        """How many an audited call has made, by whether it reduces gradients."""
        self._proved: dict[str, set[Signature]] = collections.defaultdict(set)
        """By base, the shapes that its code was proven with."""
        # What all of them were asked for: a step whose first call comes after the tier failed here votes nevertheless.
        asked = None if peers.chooses else peers.asked_for
        self.asked_for: Tier | None = asked if asked is not None and asked.compiles else None

    def asked(self, tier: Tier) -> Tier | None:
        """Return the tier whose compiled code all processes are on the way to, or in; None where there is none.

        Where `auto` chooses, that is the ``tier`` of the call, which is the same one in all of them.
        """
        return (tier if tier.compiles else None) if self._peers.chooses else self.asked_for

    def left_here(self, tier: Tier) -> bool:
        """Return whether this process runs eager in a tier until all leave it, as its code has failed here."""
        return tier.without_graph().name in self._peers.wishes.by_name

    def run(self, run: Callable[[], Any], tier: Tier, inputs: Signature, call: tuple[Any, Any]) -> Any:
        """Run a step. Where compiled code of one process has failed, that process is eager until all of them are."""
        asked = self.asked(tier)
        if asked is None:
            return run()
        votes, self._calls = self._calls % EVERY == 0, self._calls + 1
        if self._code.proven(asked.base):
            return self._proven(run, tier, inputs, call, votes=votes)
        return self.towards(run, tier, inputs, call)

    def towards(self, run: Callable[[], Any], tier: Tier, inputs: Signature, call: tuple[Any, Any]) -> Any:
        """Run an agreed step: audited, or run both ways by all processes, or eager in all of them."""
        step = self._step
        mine = self._readiness(tier, inputs)
        ours = self._told_why(tier) if mine is Vote.NEVER else None
        agreed = self._peers.agree(mine)
        self._seen.append(inputs)
        self._unproved += 1
        if agreed is Vote.NEVER:
            self._leave(tier, ours or elsewhere(self._peers, "another process cannot run it"))
            return step.eagerly(run)
        with self._peers.patient():
            if self._to_be_audited() and not self._rebuilds():
                self._peers.run_begins()
                result = self._audit(inputs, call)
                self._collectives[step.context.parts.reduces()] = self._peers.made()
                return result
            if agreed is not Vote.YES:
                return step.eagerly(run)
            self._proved[tier.base].add(inputs)
            self._unproved = 0
            step.context.reports.say_once(
                f"{step.name}: all {self._peers.size} processes compile {tier.base} now, in the foreground: this step "
                "takes as long as the slowest compile"
            )
            self._peers.usual = self._collectives.get(step.context.parts.reduces())
            try:
                result = self._code.prove(call, tier)
            except StepLostError:
                raise
            except Exception:  # the user's own, of a step that stays: the others go on, and ask what it has come to
                if self._peers.made_all():
                    self._settle(tier)
                raise
            self._settle(tier)
        return result

    def _readiness(self, tier: Tier, inputs: Signature) -> Vote:
        """Return whether this process can run the step both ways: it was audited, and its shape came before."""
        if self._too_many_shapes() is not None or not self._runs(tier):
            return Vote.NEVER
        if self._to_be_audited() or self._rebuilds():
            return Vote.NOT_NOW
        if self._step.not_repeatable is not None:
            return Vote.NEVER
        return Vote.YES if inputs in self._seen else Vote.NOT_NOW

    def _runs(self, tier: Tier) -> bool:
        """Return whether compiled code of a tier may run here."""
        return tier.compiles and not self.left_here(tier)

    def _told_why(self, tier: Tier) -> Obstacle:
        """Return why this process wants to leave a tier, and tell the others."""
        wish = self._peers.wishes.by_name.get(tier.without_graph().name)
        why = wish or self._step.not_repeatable or self._too_many_shapes() or _FAILED_HERE
        self._peers.tell(str(why))
        return why

    def _rebuilds(self) -> bool:
        parts = self._step.context.parts
        return self._peers.rebuilds(parts.wrappers(), reduces=parts.reduces())

    def _too_many_shapes(self) -> Obstacle | None:
        if self._unproved < GIVE_UP:
            return None
        return Obstacle(f"in {GIVE_UP} steps no shapes came a second time in all processes at once", PAD)

    def _settle(self, tier: Tier) -> None:
        """Agree on a proof step: a tier is proven when it is so in all processes, and left when it is wrong in one."""
        step = self._step
        stays = step.context.progress.tier == tier and not self.left_here(tier)
        mine = Vote.YES if self._code.proven(tier.base) else Vote.NOT_NOW if stays else Vote.NEVER
        ours = self._told_why(tier) if mine is Vote.NEVER else None
        agreed = self._peers.agree(mine, About.OUTCOME)
        if agreed is Vote.NEVER:
            self._leave(tier, ours or elsewhere(self._peers, "it does not agree with eager in another process"))
        elif agreed is Vote.NOT_NOW:
            self._code.not_proven(tier.base)
        else:
            self._code.tell_proven()

    def _proven(
        self, run: Callable[[], Any], tier: Tier, inputs: Signature, call: tuple[Any, Any], *, votes: bool
    ) -> Any:
        step, asked = self._step, self.asked(tier)
        assert asked is not None
        if votes:
            mine = Vote.NOT_NOW if asked.base in self._code.compiled_anew else Vote.YES
            ours = None if self._runs(tier) else self._told_why(asked)
            agreed = self._peers.agree(mine if ours is None else Vote.NEVER)
            if agreed is Vote.NEVER:
                self._leave(asked, ours or elsewhere(self._peers, "it failed in another process"))
                return step.eagerly(run)
            if agreed is Vote.NOT_NOW:
                return self.again(run, tier, inputs, call)
        return self.without_vote(run, tier, inputs)

    def without_vote(self, run: Callable[[], Any], tier: Tier, inputs: Signature) -> Any:
        """Run compiled code that all processes have proven, else eager, each for itself."""
        step = self._step
        # What is not proven does not train: a call without a graph may come amid the proof of its code.
        if tier.base in self._code.compiled_anew or not self._code.proven(tier.base):
            return step.eagerly(run)
        if not self._runs(tier) or inputs not in self._proved[tier.base]:
            # This process alone: while it compiled for a short batch, the others would wait in a collective.
            if self._runs(tier):
                step.context.reports.say_once(
                    f"{step.name}: batches of other shapes than those that {tier.name} was proven with run eager, "
                    f"as the other processes would wait for a compile: {PAD}"
                )
            return step.eagerly(run)
        return self._code.run(run, tier)

    def again(self, run: Callable[[], Any], tier: Tier, inputs: Signature, call: tuple[Any, Any]) -> Any:
        """Prove the code of all processes again, from this step on, which is the same one in all of them."""
        here = self._code.compiled_anew.pop(tier.base, "")
        self._code.prove_again(tier.base, here or "another process has to prove its code again")
        self._proved[tier.base].clear()
        return self.towards(run, tier, inputs, call)

    def _leave(self, tier: Tier, obstacle: Obstacle) -> None:
        """Leave a tier for good, in this step, which is the same one in all processes that vote."""
        step = self._step
        if self._peers.unanswered:
            obstacle = Obstacle(self._peers.unanswered, AS_MANY)
        self._code.not_proven(tier.base)
        self._unproved = 0
        if step.context.progress.tier.compiles:
            with self._peers.wishes.granting():
                step.context.reports.failed(step, tier.without_graph(), obstacle)
        self.asked_for = None


def elsewhere(peers: Peers, what: str) -> Obstacle:
    """Return the obstacle that ``what`` is so of another process, with its reason if that process has told it."""
    told = peers.told()
    return Obstacle(f"{what}{told and f' ({told})'}", HINT)
