"""Choosing the tier while training goes on: asks `decide` at step boundaries, and does what it says.

A tier that is tried is prepared and proven first, then timed on real steps by turns with the tier in force.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from hotloop.decide import Facts, Option, Standing, Trial, decide, expect, median_interval
from hotloop.step.background import Background
from hotloop.step.earlier import Earlier
from hotloop.step.tiers import NAMED, Tier, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.measure import Timing
    from hotloop.step.loop import Loop
    from hotloop.step.survey import Obstacle

_GIVE_UP_STEPS = 64
"""Steps after which a tier that is being prepared, and still not proven, is given up: no two calls were alike."""
_POLL_STEPS = 4
"""A child that compiles is looked at every so many steps."""


class Auto:
    """The choice of tier for one loop."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._in_force: Tier | None = None
        self._trying: Tier | None = None
        self._since = (0, 0.0)
        self._trial: Trial | None = None
        self._ask_at = 0
        self._declined: set[str] = set()
        self._rejected: dict[str, int] = {}
        self._prepared: dict[str, float] = {}
        self._paired: dict[str, float] = {}
        self._spent_trials = self._spent_preparing = 0.0
        self._busy: list[float] = []
        self._said = ""
        self.background = Background(loop)
        self.earlier = Earlier(loop)

    # -- at a step boundary ----------------------------------------------------------------------------------------

    @property
    def in_force(self) -> Tier:
        """The tier that steps run in, when no other is tried."""
        return self._in_force or Tier(self.loop.given)

    def at_step_boundary(self, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Decide what the coming step runs in; mostly that is no question."""
        self.earlier.called(step, (args, kwargs))
        if self._trial is not None:
            self.loop.goal = self._tier(self._trial.next_tier)
            return
        if self._trying is not None:
            self._look_at_preparation()
            return
        if self.background.tier is not None and self.loop.steps % _POLL_STEPS == 0 and self.background.ended():
            self._ask_at = self.loop.steps
            if self.background.failed:
                self._declined_for(self.background.failed[0], self.background.failed[1])
        if self.loop.steps >= self._ask_at:
            self._ask()

    def _ask(self) -> None:
        standing, options = self._standing(), self._options()
        decision = decide(standing, options)
        self._ask_at = self.loop.steps + max(1, decision.ask_again_in_steps)
        if decision.action != "stay" or decision.reason != self._said:
            self._said = decision.reason
            numbers = {"action": decision.action, "tier": decision.tier, **decision.numbers}
            if decision.numbers.get("eager_seconds") is not None:
                self.loop.account.decided(decision.reason, numbers)
        if decision.action == "switch":
            self._switch(parse(decision.tier) if decision.tier != "as-given" else Tier("as-given"), decision.reason)
        elif decision.action == "prepare":
            self.background.start(parse(decision.tier), decision.limit_seconds)
        elif decision.action == "try":
            self._try(self._tier(decision.tier), decision.reason)

    def _try(self, tier: Tier, reason: str) -> None:
        self._trying, self._since = tier, (self.loop.steps, time.perf_counter())
        self._paired.clear()
        self.loop.aim(tier, reason)
        if tier == Tier(self.loop.given) or tier.name in self._prepared:
            self.proven(tier)

    def _look_at_preparation(self) -> None:
        if self.loop.steps - self._since[0] > _GIVE_UP_STEPS:
            assert self._trying is not None
            self._declined_for(self._trying.name, "no kind of call came back often enough to be captured and proven")
            self._back("not proven")

    def _switch(self, tier: Tier, reason: str) -> None:
        self._in_force = tier
        self._paired.clear()
        self.loop.aim(tier, reason)

    def _back(self, reason: str) -> None:
        """Give up what is being tried."""
        self._spent_trials += max(0.0, time.perf_counter() - self._since[1] - self._usual())
        self._trying, self._trial = None, None
        self._ask_at = self.loop.steps
        self.loop.aim(self.in_force, reason)

    def _usual(self) -> float:
        """Seconds that the steps since a preparation began would have taken without it."""
        step = self.loop.account.tiers[self.in_force.name].seconds or 0.0
        return step * (self.loop.steps - self._since[0])

    # -- what the loop tells ---------------------------------------------------------------------------------------

    def proven(self, tier: Tier) -> None:
        """A tier was proven: if it is the one on trial, time it by turns with the one in force."""
        if self._trying is None or tier != self._trying:
            return
        spent = max(0.0, time.perf_counter() - self._since[1] - self._usual())
        if tier.name not in self._prepared:
            self._prepared[tier.name] = spent
            self._spent_preparing += spent
        self._trial = Trial(self.in_force.name, tier.name)

    def declined(self, tier: Tier, obstacle: Obstacle) -> None:
        """A tier cannot run."""
        self._declined_for(tier.name, str(obstacle))
        if self._trying is not None and self._affected(self._trying, tier):
            self._back(f"{tier.name} declined: {obstacle}")
        elif self._affected(self.in_force, tier):
            self._in_force = Tier(self.loop.given)
            self._ask_at = self.loop.steps
            self.loop.aim(self._in_force, f"{tier.name} declined: {obstacle}")

    @staticmethod
    def _affected(one: Tier, declined: Tier) -> bool:
        return one == declined or (one.base == declined.base and one.graph)

    def _declined_for(self, name: str, reason: str) -> None:
        self._declined.add(name)
        self.earlier.declined(name, reason)

    def timed(self, tier: str, kind: str, timing: Timing) -> None:
        """A step's time became known."""
        if kind == "run" and tier == self.loop.given:
            self._busy.append(timing.host_seconds / timing.seconds if timing.seconds > 0 else 0.0)
        if self._trial is None:
            return
        trial, expected = self._trial, self._trial.next_tier
        if tier != expected or kind != "run":
            return
        trial.add(timing.seconds)
        verdict = trial.verdict()
        if verdict.outcome == "undecided":
            return
        self._trial, candidate = None, self._trying
        self._trying = None
        assert candidate is not None
        self._spent_trials += trial.extra_seconds
        figures = trial.seconds(candidate.name)
        self.loop.account.decided(f"{candidate.name} against {self.in_force.name}: {verdict}", {"tier": candidate.name})
        if figures is not None:
            self.earlier.timed(candidate.name, figures[0], self._prepared.get(candidate.name))
        if verdict.outcome == "faster" and figures is not None:
            self._paired[candidate.name] = figures[0]
        else:
            self._rejected[candidate.name] = self._left()
            self.loop.aim(self.in_force, "no faster")
        self._ask_at = self.loop.steps

    def _left(self) -> int:
        total = self.loop.total_steps
        return max(0, total - self.loop.steps) if total is not None else max(1000, self.loop.steps)

    # -- what `decide` is told -------------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        account = self.loop.account
        base, here = account.tiers[self.loop.given], account.tiers[self.in_force.name]
        eager_low = median_interval(list(base.samples))[0] if base.samples else None
        high = median_interval(list(here.samples)[-50:])[1] if here.samples else None
        return Standing(
            step=self.loop.steps,
            total_steps=self.loop.total_steps,
            tier=self.in_force.name,
            base=self.loop.given,
            step_seconds=here.seconds,
            step_high_seconds=high,
            eager_seconds=base.seconds if len(base.samples) > 2 else None,  # noqa: PLR2004 - the first ones warm up
            eager_low_seconds=eager_low,
            trial_seconds=self._spent_trials,
            prepare_seconds=self._spent_preparing,
            saved_seconds=account.saved,
            preparing=self.background.tier,
        )

    def _options(self) -> list[Option]:
        facts = Facts(
            device=self.loop.device.type,
            eager_seconds=self.loop.account.tiers[self.loop.given].seconds or 0.0,
            launch_bound=self._launch_bound(),
            measured={
                name: one.seconds
                for name, one in self.loop.account.tiers.items()
                if one.seconds is not None and one.proven
            },
        )
        options = []
        for name in self._names():
            if name == self.in_force.name or name in self._declined:
                continue
            options += self._offers(name, facts)
        return options

    def _names(self) -> list[str]:
        """Name the tiers that this program could run in."""
        given = self.loop.given
        bases = [given] if given == "as-given" else list(NAMED)
        names = [given, f"{given}+graph"] if given == "as-given" else bases
        if not self.loop.compiled.in_blocks:
            names = [name for name in names if not name.startswith("regional")]
        return [name for name in names if self.loop.engine is not None or not name.endswith("+graph")]

    def _offers(self, name: str, facts: Facts) -> list[Option]:
        rejected = self._rejected.get(name)
        known = self.loop.account.tiers.get(name, None)
        if name in self._paired:
            return [
                Option(tier=name, step_seconds=self._paired[name], prepare_seconds=0.0, source="measured", paired=True)
            ]
        if known is not None and known.seconds is not None and (known.proven or name == self.loop.given):
            return [
                Option(
                    tier=name, step_seconds=known.seconds, prepare_seconds=0.0, source="measured", rejected_at=rejected
                )
            ]
        if (stored := self.earlier.option(name)) is not None:
            return [stored]
        ready = self.background.ready(name)
        offers = [expect(name, facts, background=ready)]
        if ready and offers[0] is not None:  # the child is done: only the swap is left
            import dataclasses  # noqa: PLC0415

            offers = [dataclasses.replace(offers[0], background_seconds=None)]
        elif self.background.possible(name):
            offers.append(expect(name, facts, background=True))
        return [one for one in offers if one is not None]

    def _launch_bound(self) -> float | None:
        """Give the share of an eager step that the device waits for the host, as far as it can be told.

        A host that is busy for as long as the step takes has launched every kernel late.
        """
        if self.loop.device.type != "cuda" or len(self._busy) < 3:  # noqa: PLR2004 - the first ones warm up
            return None
        busy = statistics.median(self._busy)
        return None if busy >= 0.9 else 0.0  # noqa: PLR2004 - a host that keeps up is done well before the device

    def _tier(self, name: str) -> Tier:
        return Tier("as-given", name.endswith("+graph")) if name.startswith("as-given") else parse(name)

    def close(self) -> None:
        """Stop the child."""
        self.background.stop()
