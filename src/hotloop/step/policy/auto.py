"""Choosing the tier while training goes on: asks `decide` at step boundaries, and does what it says.

A tier that is tried is prepared and proven first, then timed on real steps by turns with the tier in force.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import re
import statistics
import time
from typing import TYPE_CHECKING, Any

from hotloop.decide import (
    EAGER_STEPS,
    Speeds,
    Standing,
    Trial,
    Turn,
    carried_seconds,
    certain_saving_seconds,
    decide,
    remaining,
)
from hotloop.step.policy import history_store
from hotloop.step.policy.background import Background
from hotloop.step.policy.candidates import Offers
from hotloop.step.policy.history import Earlier
from hotloop.step.ranks.threads import WAITS, another_trains
from hotloop.step.tiers import Tier, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.decide import Decision, Option
    from hotloop.measure import Timing
    from hotloop.step.loop.loop import Loop
    from hotloop.step.policy.timed import Ran

_GIVE_UP_STEPS = 64
"""Steps after which a tier that is still not proven is given up: no two calls were alike."""
_POLL_STEPS = 4
"""A child that compiles is looked at every so many steps."""
_WARM_UP = 3
"""First steps of the run, which pay for what libraries set up once."""
_LAUNCHES = (_WARM_UP, _WARM_UP + 1)
"""Steps that begin on an idle device."""
_KNOWN_STEPS = 2
"""Eager steps of a run whose tiers an earlier run of this process has timed: libraries set up what they set up once."""
_RECENT = 100
_NOTHING = contextlib.nullcontext()
_FIGURES = re.compile(r"[\d.,]+")
_FEWEST_RECENT = 20


class Auto:
    """The choice of tier for one loop."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.in_force = Tier(loop.given)
        self.trial: Trial | None = None
        """The trial that the coming step is part of, and `turn` its turn there."""
        self.turn: Turn | None = None
        self.background, self.earlier = Background(loop), Earlier(loop)
        self._speeds = Speeds(loop.given)
        self.offers = Offers(loop, self._speeds, self.earlier, self.background)
        self._recent: collections.deque[float] = collections.deque(maxlen=_RECENT)
        self._trying: Tier | None = None
        self._began = 0
        """The step at which the preparation now going on began, and what its steps have taken beyond plain ones."""
        self._extra = 0.0
        self._step_began: float | None = None
        self._prepared = 0.0
        self._proven: set[str] = {loop.given}
        self._declined: set[str] = set()
        self._paired: str | None = None
        self._ask_at, self._ask_after = EAGER_STEPS, 0.0
        self._first: int | None = None
        """Steps done before the first of this process: a resumed run times and decides anew."""
        self._trial_seconds = self._prepare_seconds = 0.0
        self.saved_seconds = 0.0
        """What the steps so far saved, by the ratios that trials found: a slow spell of the machine is no saving."""
        self._limit: float | None = None
        """Seconds that the preparation now going on may take, as far as it can be given up between two steps."""
        self._more = 0.0
        """How many more where one dear step took it past that."""
        self._lost: float | None = None
        """What it had taken then."""
        self._spent_before = 0.0
        """What it had taken a step ago."""
        self._replay_saves = 0.0
        self._said, self._waits = "", False

    # -- at a step boundary ----------------------------------------------------------------------------------------

    def at_step_boundary(self, step: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Decide what the coming step runs in; mostly that is no question."""
        entered, self._step_began = time.perf_counter(), None
        if self._first is None:
            self._first = self.loop.steps
            self._ask_at = self._first + EAGER_STEPS
            self._recall(step, (args, kwargs))
        if self._trying is not None and self.trial is None:
            name, spent = self._trying.name, self._spent()
            if self.loop.steps - self._began > _GIVE_UP_STEPS:
                never = "no kind of call came back often enough to be captured and proven"
                declined = self.loop.declined_kinds()
                never += f"; declined: {declined[0]}" if declined else ""
                why = WAITS if another_trains(self.loop) else never
                self._decline(name, why)
                self._stop_trying(f"{name} given up: {why}", spent)
            elif self._too_dear():
                self._declined.add(name)  # in this run: a longer one may afford it
                why = f"it took {spent:.2f} s without being proven, and no more may be lost"
                self._stop_trying(f"{name} given up: {why}", spent)
        elif self.trial is None:
            self._look_at_child()
            if self.loop.steps >= self._ask_at or time.monotonic() >= self._ask_after > 0:
                self._ask_or_wait()
        if self.trial is not None:  # one that was begun just now has its first turn in this very step
            self.turn = self.trial.turn()
            self.loop.course.turn(parse(self.turn.tier))
        self._step_began = time.perf_counter()
        if self.preparing and self._began == self.loop.steps:  # a compiler that was imported for it is part of the cost
            self._extra += self._step_began - entered

    def _recall(self, step: Callable[..., Any], inputs: Any) -> None:
        """Start from what is known of the program; what a run of this process has timed need not be timed again."""
        self.earlier.called(step, inputs)
        program = self.earlier.program
        self.background.go_on_from(program)
        if program.eager_seconds is not None:
            self._speeds.recall(program.eager_seconds, program.ratios)
            self._ask_at = self.loop.steps + _KNOWN_STEPS

    def now(self) -> tuple[Trial, Turn] | None:
        """Give the trial that the coming step is part of, and its turn."""
        return (self.trial, self.turn) if self.trial is not None and self.turn is not None else None

    @property
    def undecided(self) -> str:
        """Say of the first steps of a run why they are as the model was given; empty once something was decided."""
        if self._waits:
            return WAITS
        if self._said:
            return ""
        first = self._ask_at - (self._first or 0)
        few = self.loop.total_steps is not None and self.loop.total_steps <= first
        so = f"and this run takes {self.loop.total_steps}" if few else "and then it is decided what others run in"
        return f"the first {first} steps are timed as they are, {so}"

    @property
    def preparing(self) -> bool:
        """Tell whether a tier is on its way to its first proven step."""
        return self._trying is not None and self.trial is None

    @property
    def looks_at_launches(self) -> bool:
        """Tell whether the coming step begins on an idle device, so that its launches hide behind no earlier one's."""
        return self._steps_here() in _LAUNCHES and self._trying is None and self.in_force == Tier(self.loop.given)

    def _too_dear(self) -> bool:
        """Tell whether the preparation going on has to be given up: it has cost what may be lost.

        Once the recording was replayed, what it saves is known, and counts as a timed tier's saving does. Where one
        step alone took more than all was expected to, what that cost is lost already: then it may take a little more.
        """
        spent, before = self._spent(), self._spent_before
        self._spent_before = spent
        saves = certain_saving_seconds(self._replay_saves, 0.0, self._left())
        if self._limit is None or spent <= self._limit + saves:
            return False
        if self._lost is None and spent - before > self._more:
            self._lost = spent
        return self._lost is None or spent > self._lost + self._more

    @property
    def quiet(self) -> bool:
        """Tell whether nothing is under way, so that not every step needs to be timed."""
        busy = self.trial is not None or self._trying is not None or self.background.tier is not None
        decided = self._steps_here() > EAGER_STEPS and self.loop.steps < self._ask_at
        return decided and not busy and self.in_force == Tier(self.loop.given)

    def noting_calls(self) -> contextlib.AbstractContextManager[Any]:
        """Note how the models are called, in one eager step of the run: what a child will compile."""
        as_given = self._trying is None and self.in_force == Tier(self.loop.given)
        recorder = self.background.record() if self._steps_here() == _WARM_UP and as_given else None
        return recorder if recorder is not None else _NOTHING

    def _look_at_child(self) -> None:
        if self.background.tier is None or self.loop.steps % _POLL_STEPS or not self.background.ended():
            return
        self._ask_at = self.loop.steps
        if self.background.failed is not None:
            self._decline(*self.background.failed)

    def _ask_or_wait(self) -> None:
        """Decide, unless another thread trains: nothing can be proven beside it."""
        self._waits = another_trains(self.loop)
        if self._waits:
            self._ask_at = self.loop.steps + _POLL_STEPS
            self.loop.say_once(WAITS, logging.WARNING)
        else:
            self._ask()

    def _ask(self) -> None:
        if self._recent:
            self._speeds.see(self.in_force.name, statistics.median(self._recent))
        known = self._speeds.seconds(self.loop.given) is not None
        decision = decide(self._standing(), self._options() if known else [])
        self._paired = None
        self._ask_at = self.loop.steps + max(1, decision.ask_again_in_steps)
        wait = decision.ask_again_in_seconds
        self._ask_after = time.monotonic() + wait if math.isfinite(wait) else 0.0
        wording = _FIGURES.sub("", decision.reason)  # the same reason with other figures is no news
        if known and (decision.action != "stay" or wording != self._said):
            self._said = wording
            self.loop.decided(decision.reason, {"action": decision.action, "tier": decision.tier, **decision.numbers})
        if decision.action == "switch":
            self._speeds.switch(self.in_force.name, decision.tier, self._left())
            self._go(parse(decision.tier), decision.reason)
        elif decision.action == "prepare":
            expected = decision.numbers["background_seconds"]
            self.background.start(parse(decision.tier), decision.limit_seconds, expected)
        elif decision.action == "try":
            self._try(parse(decision.tier), decision)

    def _go(self, tier: Tier, reason: str) -> None:
        left, self.in_force = self.in_force, tier
        self._recent.clear()
        self.loop.course.aim(tier, reason)
        if left != tier:
            self._release(left)

    def _release(self, tier: Tier) -> None:
        """Give back the memory of recordings that are not replayed any more; they would be proven anew."""
        if tier.graph:
            self._proven.discard(tier.name)
            self.loop.course.release(tier)

    def _try(self, tier: Tier, decision: Decision) -> None:
        self._trying, self._began, self._prepared, self._extra = tier, self.loop.steps, 0.0, 0.0
        by_steps = not tier.compiles and self.loop.total_steps is not None
        self._limit = decision.limit_seconds if by_steps else None
        self._more, self._lost, self._spent_before = decision.more_seconds, None, 0.0
        self._replay_saves = 0.0
        if tier.name in self._proven:
            self._start_trial(tier)
        else:
            self.loop.course.aim(tier, decision.reason)

    def _start_trial(self, tier: Tier) -> None:
        self._recent.clear()
        self.trial = Trial(self.in_force.name, tier.name)

    def _give_up(self, reason: str) -> None:
        """Go back to the tier in force; what the preparation cost is a trial's cost."""
        self._trial_seconds += self._spent()
        self._trying = self.trial = None
        self._ask_at = self.loop.steps
        self._recent.clear()
        self.loop.course.aim(self.in_force, reason)

    def _stop_trying(self, reason: str, spent: float) -> None:
        """Give up what is on its way to its first proven step, and say so."""
        assert self._trying is not None
        tier = self._trying
        self.loop.decided(reason, {"action": "give up", "tier": tier.name, "spent_seconds": spent})
        self.loop.account.gave_up(tier.name, reason.removeprefix(f"{tier.name} "))
        self._release(tier)
        self._give_up(reason)

    def _spent(self) -> float:
        """Give the seconds that the preparation has taken so far beyond what its steps would have taken without it."""
        under_way = time.perf_counter() - self._step_began if self._step_began is not None else 0.0
        return self._extra + self._beyond(under_way)

    def _beyond(self, seconds: float) -> float:
        return max(0.0, seconds - (self._speeds.seconds(self.in_force.name) or 0.0))

    def took(self, kind: str) -> None:
        """A step of a kind is over. A plain one between those of a preparation is none of its cost.

        A length that comes for the first time takes several times as long in eager as well.
        """
        if self._step_began is not None and self._trying is not None and self.trial is None and kind != "run":
            self._extra += self._beyond(time.perf_counter() - self._step_began)
        self._step_began = None

    @property
    def eager_seconds(self) -> float | None:
        """A step of the model as it was given, at the speed that the machine has now."""
        return self._speeds.seconds(self.loop.given)

    # -- what the loop tells ---------------------------------------------------------------------------------------

    def proven(self, tier: Tier) -> None:
        """A tier was proven: if it is the one on trial, time it by turns with the one in force."""
        self._proven.add(tier.name)
        if tier == self._trying and self.trial is None:
            self._prepared = self._spent()
            if tier.name in self.earlier.program.faster:
                self._known_faster(tier)
            else:
                self._start_trial(tier)

    def _known_faster(self, tier: Tier) -> None:
        """A tier that an earlier run of this process timed by turns is proven for this run's own objects: enough."""
        self._trying, self._paired = None, tier.name
        self._prepare_seconds += self._prepared
        self.earlier.again(tier.name, self._prepared)
        self._ask_at = self.loop.steps
        self._recent.clear()
        line = f"{tier.name}: proven in {self._prepared:.2f} s, timed in an earlier run of this process"
        self.loop.decided(line, {"action": "known", "tier": tier.name, "prepare_seconds": self._prepared})
        self.loop.course.turn(self.in_force)  # until `decide` switches, which it need not

    def declined(self, tier: Tier, reason: str) -> None:
        """A tier cannot run; one that was captured runs on without its graph, or as given."""
        self._decline(tier.name, reason)
        if not tier.graph:  # the code itself is wrong or fails, whatever it runs in
            self._declined.add(tier.name + "+graph")
            self.loop.compiled.forget(tier.base)
        if self._trying is not None and self._trying.name in self._declined:
            self._give_up(f"{tier.name} declined")
        elif self.in_force.name in self._declined:
            lower = self.in_force.without_graph()
            usable = lower.name in self._proven and lower.name not in self._declined
            self.trial = self._trying = None
            self._ask_at = self.loop.steps
            self._go(lower if usable else Tier(self.loop.given), f"{tier.name} declined: {reason}")

    def _decline(self, name: str, reason: str) -> None:
        self._declined.add(name)
        self._proven.discard(name)
        self.earlier.declined(name, reason)

    def replay_saves(self, seconds: float) -> None:
        """A recording that is being proven saves so much a step, held against eager in the same proof step."""
        self._replay_saves = seconds

    def timed(self, ran: Ran, timing: Timing) -> None:
        """A step's time became known."""
        tier, trial, clean = ran.tier, ran.turn, ran.kind == "run"
        if trial is not None:
            if trial[0] is self.trial and clean and tier == trial[1].tier:
                self._add(*trial, timing.seconds)
            return
        if clean and tier == self.in_force.name and self._trying is None and self._steps_here() > _WARM_UP:
            self._recent.append(timing.seconds)
            self.saved_seconds += self._speeds.saved(tier, timing.seconds)
            if ran.alone and tier == self.loop.given and timing.seconds > 0:
                self.offers.waiting.append(timing.host_seconds / timing.seconds)

    def _add(self, trial: Trial, turn: Turn, seconds: float) -> None:
        trial.add(turn, seconds)
        verdict = trial.verdict()
        if verdict.outcome == "undecided":
            return
        candidate, faster = trial.candidate, verdict.outcome == "faster"
        self.trial = self._trying = None
        self._speeds.record(trial, self._left())
        self._trial_seconds += trial.extra_seconds + (0.0 if faster else self._prepared)
        self._prepare_seconds += self._prepared if faster else 0.0
        self._paired = candidate if faster else None
        self.loop.decided(f"{candidate} against {trial.in_force}: {verdict}", {"action": "trial", "tier": candidate})
        warm = self.loop.compiled.was_warm()
        self.earlier.timed(candidate, self._speeds, self._prepared, warm=warm, faster=faster)
        self._ask_at = self.loop.steps
        self._recent.clear()
        self.loop.course.turn(self.in_force)
        if not faster:
            self._release(parse(candidate))

    def _steps_here(self) -> int:
        return self.loop.steps - (self._first or 0)

    def _left(self) -> int:
        return remaining(self.loop.steps, self.loop.total_steps).steps

    # -- what `decide` is told -------------------------------------------------------------------------------------

    def _standing(self) -> Standing:
        here, base = self.in_force.name, self.loop.given
        return Standing(
            step=self.loop.steps,
            total_steps=self.loop.total_steps,
            tier=here,
            base=base,
            step_seconds=self._speeds.seconds(here),
            step_high_seconds=self._speeds.high_seconds(here),
            recent_seconds=statistics.median(self._recent) if len(self._recent) >= _FEWEST_RECENT else None,
            eager_seconds=self._speeds.seconds(base),
            eager_low_seconds=self._speeds.base_low_seconds,
            trial_seconds=self._trial_seconds,
            prepare_seconds=self._prepare_seconds,
            saved_seconds=self.saved_seconds,
            preparing=self.background.tier,
            free_memory_bytes=self.offers.free_bytes(),
            runs=self.loop.runs or 1.0,
            carried_seconds=history_store.carried_seconds() if self.loop.runs is not None else 0.0,
        )

    def _options(self) -> list[Option]:
        return self.offers.options(
            self.in_force.name, proven=self._proven, declined=self._declined, paired=self._paired
        )

    def close(self) -> None:
        """Settle with the runs that come after this one: the credit, and the child; without any, stop it."""
        base = self.eager_seconds
        if self.loop.runs is not None and base is not None:
            unfinished = self._spent() if self._trying is not None else 0.0
            history_store.carry(carried_seconds(self._standing(), base) - unfinished)
        if (self.loop.runs or 1.0) > 1.0:
            self.background.leave()
        self.background.stop()
