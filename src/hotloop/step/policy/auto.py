"""Choosing the tier while training goes on: asks `decide` between steps, and returns what is to be done.

A tier is prepared and proven first, then timed on real steps by turns with the tier in force.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import statistics
import time
from typing import TYPE_CHECKING, Any

from hotloop.decide import EAGER_STEPS, Speeds, Standing, Trial, decide, remaining
from hotloop.step.policy.background_tiers import Background
from hotloop.step.policy.candidates import Candidates
from hotloop.step.policy.history import History
from hotloop.step.policy.policy import Policy, Release, SetTier, TryTier
from hotloop.step.policy.states import Idle, Preparing, Settled, Trying, Waiting
from hotloop.step.ranks.threads import WAITS, another_trains
from hotloop.step.tiers import Tier, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.decide import Decision, Turn
    from hotloop.measure import Timing
    from hotloop.step.context import Context
    from hotloop.step.obstacle import Obstacle
    from hotloop.step.policy.policy import Action, Ran
    from hotloop.step.policy.states import State

_GIVE_UP_STEPS = 64
"""Steps after which a tier that is still not proven is given up: no two calls were alike."""
_POLL_STEPS = 4
"""A child process, and another thread that trains, are looked at every so many steps."""
_WARM_UP = 3
"""First steps of the run, in which libraries set up what they set up once."""
_LAUNCHES = (_WARM_UP, _WARM_UP + 1)
"""Steps that begin on an idle device."""
_KNOWN_STEPS = 2
"""Steps before the first decision where an earlier run of this process has timed the program's tiers."""
_FIGURES = re.compile(r"[\d.,]+")
_NOTHING = contextlib.nullcontext()


class Auto(Policy):
    """The choice of tier for one loop. `states` says what may be under way.

    Attributes:
        state: what is under way.
        saved_seconds: what steps saved so far, by the ratios that trials found: a slow spell of the machine saves none.
        trial_seconds: spent on trials, and on preparing tiers that were not chosen.
        prepare_seconds: spent on preparing tiers that were chosen.
    """

    chooses = True

    def __init__(self, context: Context) -> None:
        super().__init__(context, "auto", context.base_tier)
        self.history = History(context)
        self.background = Background(context, self.history)
        self.speeds = Speeds(self.start.name)
        self.candidates = Candidates(context, self.speeds, self.history, self.background)
        self.state: State = Waiting(ask_at=EAGER_STEPS)
        self.trial_seconds = self.prepare_seconds = 0.0
        self._first_step: int | None = None
        """Steps done before the first of this process: a resumed run times and decides anew."""
        self._said = ""
        """The reason of the last decision, without its figures."""

    @property
    def preparing(self) -> bool:
        """Return whether a tier is on its way to its first proven step."""
        return isinstance(self.state, Preparing)

    @property
    def trial(self) -> Trial | None:
        """Return the trial that is going on, if any."""
        return self.state.trial if isinstance(self.state, Trying) else None

    @property
    def busy(self) -> bool:
        """Return whether a tier is prepared, tried, or compiled for by a child process."""
        return not isinstance(self.state, Idle) or self.background.tier is not None

    @property
    def quiet(self) -> bool:
        """Return whether nothing is under way in the models as given, so that not every step needs to be timed."""
        waits = isinstance(self.state, Idle) and self._steps < self.state.ask_at
        return waits and not self.busy and self._steps_here > EAGER_STEPS and self.in_force == self.start

    @property
    def idle_start(self) -> bool:
        """Return whether the coming step begins on an idle device, so that its launches hide behind no earlier step."""
        return self._steps_here in _LAUNCHES and isinstance(self.state, Idle) and self.in_force == self.start

    @property
    def eager_seconds(self) -> float | None:
        """Return the seconds of a step of the models as given, at the machine's present speed."""
        return self.speeds.seconds(self.start.name)

    @property
    def undecided(self) -> str:
        """Say why the first steps run as the models were given; empty once something was decided."""
        if isinstance(self.state, Idle) and self.state.beside_thread:
            return WAITS
        if isinstance(self.state, Waiting):
            return self.state.why(self._first_step or 0, self.context.total_steps)
        return ""

    @property
    def _steps(self) -> int:
        return self.context.progress.steps

    @property
    def _steps_here(self) -> int:  # in this process
        return self._steps - (self._first_step or 0)

    @property
    def _steps_left(self) -> int:
        return remaining(self._steps, self.context.total_steps).steps

    def before_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> list[Action]:
        """Decide what the coming step runs in; mostly that is no question."""
        if self._first_step is None:
            self._begin(step, (args, kwargs))
        actions: list[Action] = []
        if isinstance(self.state, Preparing):
            actions += self._check_preparation(self.state)
        elif isinstance(self.state, Idle):
            if self.background.tier is not None and self._steps % _POLL_STEPS == 0 and self.background.ended():
                self.state.ask_at = self._steps
                if self.background.failed is not None:
                    self.candidates.decline(self.background.failed)
            if self.state.due(self._steps):
                actions += self._ask_or_wait(self.state)
        if isinstance(self.state, Trying):  # a trial that was begun just now has its first turn in this very step
            actions.append(TryTier(self.state.take_turn()))
        return actions

    def _begin(self, step: Callable[..., Any], inputs: Any) -> None:
        """Start from what is known of the program: what a run of this process has timed need not be timed again."""
        self._first_step = self._steps
        self.history.look_up(step, inputs)
        program = self.history.program
        self.state = Waiting(ask_at=self._steps + EAGER_STEPS)
        if program.eager_seconds is not None:
            self.speeds.recall(program.eager_seconds, program.ratios)
            self.state.ask_at = self._steps + _KNOWN_STEPS

    def _check_preparation(self, preparation: Preparing) -> list[Action]:
        """Abandon a preparation that has gone on for too long, or has cost too much."""
        preparation.drop_step()  # its step is over by now: one that raised was not counted
        name, spent, why = preparation.tier.name, preparation.spent, self._why_given_up(preparation)
        if not why:
            return []
        if preparation.steps > _GIVE_UP_STEPS:
            self.candidates.decline(name)
        else:
            self.candidates.declined.add(name)  # in this run alone: a longer one may afford it
        reason = f"{name} given up: {why}"
        self.context.reports.decided(reason, {"action": "give up", "tier": name, "spent_seconds": spent})
        self.context.reports.gave_up(name, f"given up: {why}")
        return [*self._release(preparation.tier), *self._give_up(reason)]

    def _why_given_up(self, preparation: Preparing) -> str:
        """Say why a preparation is abandoned; empty where it goes on."""
        if preparation.steps > _GIVE_UP_STEPS:
            declined = "".join(f"; declined: {why}" for why in self.context.reports.declined_kinds()[:1])
            why = f"no kind of call came back often enough to be captured and proven{declined}"
            return WAITS if another_trains(self.context) else why
        if preparation.too_expensive(self._steps_left):
            return f"it took {preparation.spent:.2f} s without being proven, and no more may be lost"
        return ""

    def turn(self) -> tuple[Trial, Turn] | None:
        """Return the trial that the coming step is part of, and its turn in it."""
        if isinstance(self.state, Trying) and self.state.turn is not None:
            return self.state.trial, self.state.turn
        return None

    def watch_step(self) -> contextlib.AbstractContextManager[Any]:
        """Watch the step that runs in the block: when it begins."""
        if isinstance(self.state, Preparing):
            self.state.begin_step()
        elif isinstance(self.state, Trying):
            self.state.preparation.begin_step()
        return _NOTHING

    def after_step(self, doing: str) -> None:
        """Note that a step is over; ``doing`` as in `DecoratedStep`."""
        if isinstance(self.state, Preparing):
            self.state.end_step(doing)
        elif isinstance(self.state, Trying):
            self.state.preparation.drop_step()

    # -- decisions --------------------------------------------------------------------------------------------------

    def _ask_or_wait(self, state: Idle) -> list[Action]:
        """Decide, unless another thread trains: nothing can be proven beside it."""
        state.beside_thread = another_trains(self.context)
        if not state.beside_thread:
            return self._ask(state)
        state.ask_at = self._steps + _POLL_STEPS
        self.context.reports.say_once(WAITS, logging.WARNING)
        return []

    def _ask(self, state: Idle) -> list[Action]:
        self.background.note_peak()
        if (recent := self._recent(state)) is not None:
            self.speeds.see(self.in_force.name, recent)
        timed = self.eager_seconds is not None
        options = self.candidates.options(self.in_force.name, state.paired) if timed else []
        decision = decide(self._standing(), options)
        ask_at, wait = self._steps + max(1, decision.ask_again_in_steps), decision.ask_again_in_seconds
        ask_after = time.monotonic() + wait if math.isfinite(wait) else 0.0
        self.state = (Settled if timed else Waiting)(ask_at, ask_after, state.recent)
        wording = _FIGURES.sub("", decision.reason)
        if timed and (decision.action != "stay" or wording != self._said):  # new figures to stay are no news
            self._said = wording
            numbers = {"action": decision.action, "tier": decision.tier, **decision.numbers}
            self.context.reports.decided(decision.reason, numbers)
        tier = parse(decision.tier)
        if decision.action == "switch":
            self.speeds.switch(self.in_force.name, decision.tier, self._steps_left)
            state.recent.clear()
            return self._switch(tier, decision.reason)
        if decision.action == "prepare":
            self.background.start(tier, decision.limit_seconds, decision.numbers["background_seconds"])
        if decision.action == "try":
            return self._try(tier, decision)
        return []

    def _recent(self, state: Idle) -> float | None:
        """Return the median seconds of the last steps in the tier in force; None where none was timed."""
        return statistics.median(state.recent) if state.recent else None

    def _switch(self, tier: Tier, reason: str) -> list[Action]:
        left, self.in_force = self.in_force, tier
        return [SetTier(tier, reason), *(self._release(left) if left != tier else ())]

    def _release(self, tier: Tier) -> list[Action]:
        """Free the memory of recordings that are not replayed any more; they would be proven anew."""
        if not tier.graph:
            return []
        self.candidates.proven.discard(tier.name)
        return [Release(tier)]

    def _try(self, tier: Tier, decision: Decision) -> list[Action]:
        """Begin to prepare a tier, or its trial where it is ready."""
        by_steps = not tier.compiles and self.context.total_steps is not None
        preparation = Preparing(
            tier,
            self.speeds.seconds(self.in_force.name) or 0.0,
            limit_seconds=decision.limit_seconds if by_steps else None,
        )
        if tier.name in self.candidates.proven:
            self.state = Trying(Trial(self.in_force.name, tier.name), preparation)
            return []
        self.state = preparation
        return [SetTier(tier, decision.reason)]

    def _give_up(self, reason: str) -> list[Action]:
        """Go back to the tier in force; what the preparation cost is a trial's cost."""
        self.trial_seconds += self.state.spent
        self.state = Settled(ask_at=self._steps)
        return [SetTier(self.in_force, reason)]

    # -- what the loop reports --------------------------------------------------------------------------------------

    def proven(self, tier: Tier) -> list[Action]:
        """Begin the trial of the tier that was prepared; skip it where an earlier run in this process made it."""
        self.candidates.proven.add(tier.name)
        if not isinstance(self.state, Preparing) or tier != self.state.tier:
            return []
        prepared = self.state.spent
        if tier.name not in self.history.program.faster:
            self.state = Trying(Trial(self.in_force.name, tier.name), self.state, prepared)
            return []
        # An earlier run in this process timed the tier, so that no trial is needed. The tier in force runs on until
        # `decide` switches, which it need not.
        self.prepare_seconds += prepared
        self.history.program.again_seconds[tier.name] = prepared
        self.state = Settled(ask_at=self._steps, paired=tier.name)
        line = f"{tier.name}: proven in {prepared:.2f} s, timed in an earlier run of this process"
        self.context.reports.decided(line, {"action": "known", "tier": tier.name, "prepare_seconds": prepared})
        return [TryTier(self.in_force)]

    def declined(self, tier: Tier, obstacle: Obstacle) -> list[Action]:
        """Leave a tier that cannot run: a captured one for its code without a graph, or for the models as given."""
        candidates, reason = self.candidates, str(obstacle)
        candidates.decline(tier.name)
        if not tier.graph:  # the code itself is wrong or fails, captured or not
            candidates.declined.add(tier.name + "+graph")
            self.context.compiled.forget(tier.base)
        if self.in_force.name in candidates.declined:
            lower = self.in_force.without_graph()
            proven = lower.name in candidates.proven and lower.name not in candidates.declined
            usable = proven and self.speeds.ratio(lower.name) is not None  # else a trial finds out whether it is faster
            self.trial_seconds += self.state.spent
            self.state, below = Settled(ask_at=self._steps), lower if usable else self.start
            self.speeds.switch(self.in_force.name, below.name, self._steps_left)
            return self._switch(below, f"{tier.name} declined: {reason}")
        if isinstance(self.state, Preparing | Trying) and self.state.tier.name in candidates.declined:
            return self._give_up(f"{tier.name} declined")
        return []

    def proof_saves(self, seconds: float, against: str) -> None:
        """Note what the tier that is being proven saves a step against another one in the same proof step.

        What the tier in force saves against that one already is no gain. A captured step in another layout is held
        against that layout, which was held against eager: both savings count.
        """
        if isinstance(self.state, Preparing):
            other, now = self.speeds.seconds(against), self.speeds.seconds(self.in_force.name)
            already = 0.0 if other is None or now is None else max(0.0, other - now)
            self.state.savings[against] = seconds - already

    def timed(self, ran: Ran, timing: Timing) -> list[Action]:
        """Note what a step took; times come a few steps late."""
        state, plain = self.state, ran.kind == "run"
        if ran.turn is not None:
            trial, turn = ran.turn
            if isinstance(state, Trying) and trial is state.trial and plain and ran.tier == turn.tier:
                trial.add(turn, timing.seconds)
                return self._conclude(state)
        elif isinstance(state, Idle) and plain and ran.tier == self.in_force.name and self._steps_here > _WARM_UP:
            state.recent.append(timing.seconds)
            self.saved_seconds += self.speeds.saved(ran.tier, timing.seconds)
            if ran.alone and ran.tier == self.start.name and timing.seconds > 0:
                self.candidates.host_shares.append(timing.host_seconds / timing.seconds)
        return []

    def _conclude(self, state: Trying) -> list[Action]:
        """End a trial once its verdict is clear; `decide` then switches to a tier that was faster."""
        trial, prepared, verdict = state.trial, state.prepared_seconds, state.trial.verdict()
        if verdict.outcome == "undecided":
            return []
        candidate, faster = trial.candidate, verdict.outcome == "faster"
        self.state = Settled(ask_at=self._steps, paired=candidate if faster else None)
        self.speeds.record(trial, self._steps_left)
        self.trial_seconds += trial.extra_seconds + (0.0 if faster else prepared)
        self.prepare_seconds += prepared if faster else 0.0
        line = f"{candidate} against {trial.in_force}: {verdict}"
        self.context.reports.decided(line, {"action": "trial", "tier": candidate})
        self.history.note_trial(candidate, self.speeds, prepared, faster=faster)
        return [TryTier(self.in_force), *(() if faster else self._release(parse(candidate)))]

    def _standing(self) -> Standing:
        here, base = self.in_force.name, self.start.name
        return Standing(
            step=self._steps,
            total_steps=self.context.total_steps,
            tier=here,
            base=base,
            step_seconds=self.speeds.seconds(here),
            step_high_seconds=self.speeds.high_seconds(here),
            recent_seconds=self.state.recent_seconds if isinstance(self.state, Idle) else None,
            eager_seconds=self.speeds.seconds(base),
            eager_low_seconds=self.speeds.base_low_seconds,
            trial_seconds=self.trial_seconds,
            prepare_seconds=self.prepare_seconds,
            saved_seconds=self.saved_seconds,
            preparing=self.background.tier,
            free_memory_bytes=self.candidates.free_bytes(),
            runs=self.context.runs or 1.0,
        )

    def close(self) -> None:
        """Leave the child to the runs that come after this one; where there are none, stop it."""
        if (self.context.runs or 1.0) > 1.0:
            self.background.leave()
        else:
            self.background.stop()

    def stop(self) -> None:
        """Stop the child process; nothing is left to other runs."""
        self.background.stop()
