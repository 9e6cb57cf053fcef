"""`auto` in several processes of DDP: each decides on figures that all of them have agreed on, so all decide the same.

Every process runs this policy. What enters a decision is voted on first, and the slowest process counts. Steps are
counted by calls, as one process may catch an exception of a step that the others end. What a process finds out on its
own (a decline, a failure, a preparation that became too dear) is a veto in its reports: the next vote on a call takes
it to all, and all of them leave the tier. Code is compiled in the foreground here, by all in the same steps, where
`decide` finds that it pays and that the run can afford it. A compile in the background, or what earlier runs of one
process have stored, is not agreed on.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from hotloop._torch.wrappers import joins
from hotloop.decide import EAGER_STEPS
from hotloop.step.obstacle import Obstacle
from hotloop.step.policy.auto import Auto
from hotloop.step.policy.candidates import Candidates
from hotloop.step.policy.policy import Release, SetTier, TryTier
from hotloop.step.policy.states import Idle, Preparing, Settled, Trying, Waiting
from hotloop.step.ranks.peers import AS_MANY, MOST, About
from hotloop.step.ranks.threads import WAITS, another_trains
from hotloop.step.tiers import NAMED, parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.decide import Standing, Turn
    from hotloop.measure import Timing
    from hotloop.step.context import Context
    from hotloop.step.policy.policy import Action, Ran
    from hotloop.step.tiers import Tier

_GIB = float(2**30)
_ASK_BESIDE_THREAD = 4
"""Calls after which a question is asked again that waits for another thread."""
_LATE = 2
"""Turns after which the time of a turn is voted on. By then the turn after it has begun on an idle device, so that
every process knows the time."""
_RUN_LONGER = "tell the loop of a longer run (total_steps=), or name the tier: run='{name}'"
_JOINED = "within Join([...]) processes call their steps as often as they have batches"
_BASES = "eager", "regional", "full"
_CAPTURED = "eager+graph"


class AgreedCandidates(Candidates):
    """Compiled code, captured steps and the models as given, with the sizes that all processes have agreed on.

    Attributes:
        free, needed, state: GiB that are free, that a recording takes, and that a proof copies.
    """

    free: float | None = None
    needed: float | None = None
    state = 0.0

    def names(self) -> list[str]:
        """Name the tiers that all processes can agree on; none with a graph once the captured step was declined."""
        context = self._context
        graphs = _CAPTURED not in self.declined
        tiers = [tier for tier in map(parse, NAMED) if tier.base in _BASES and (graphs or not tier.graph)]
        if not context.compiled.in_blocks:
            tiers = [tier for tier in tiers if tier.base != "regional"]
        if context.engine is not None and not context.engine.kernels:
            tiers = [tier for tier in tiers if not (tier.graph and tier.makes_kernels)]
        return [tier.name for tier in tiers]

    def sizes(self) -> tuple[float | None, float | None, float]:
        """Return what this process alone has, in GiB: free memory, what a recording takes, and the state."""
        free, needed = super().free_bytes(), super().graph_bytes()
        return (
            None if free is None else free / _GIB,
            None if needed is None else needed / _GIB,
            super().state_bytes() / _GIB,
        )

    def free_bytes(self) -> int | None:
        """Return the memory that is free in each process."""
        return None if self.free is None else int(self.free * _GIB)

    def graph_bytes(self) -> int | None:
        """Return the bytes that a recording takes in no process more than."""
        return None if self.needed is None else int(self.needed * _GIB)

    def state_bytes(self) -> int:
        """Return the bytes of parameters and optimizer state, where there are the most."""
        return int(self.state * _GIB)


class AgreedAuto(Auto):
    """The choice of tier in one of several processes, which is the same in all of them."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._peers: Any = context.peers
        self.background.unavailable = "several processes compile in the foreground, all at once"
        self._agreed_candidates = AgreedCandidates(context, self.speeds, self.history, self.background)
        self.candidates = self._agreed_candidates
        self._calls = 0
        self._costs: dict[str, float | None] = {}
        """By field of `Standing`: the most that a process has spent, and the least that it has saved."""
        self._recent_seconds: float | None = None
        """Seconds of the last steps, in the slowest process."""
        self._slow_seconds: float | None = None
        """The same, once they are enough to say that the tier in force became slower."""
        self._turns: collections.deque[Turn] = collections.deque()
        """The turns of the trial whose times were not voted on yet."""
        self._times: dict[int, float] = {}
        """By number of the turn: what it took in this process."""

    @property
    def quiet(self) -> bool:
        """Return that every call comes through `before_step`: calls are what all processes count alike."""
        return False

    @property
    def _steps(self) -> int:  # those that a process has caught an exception of included
        return (self._first_step or 0) + max(0, self._calls - 1)

    # -- before a call ----------------------------------------------------------------------------------------------

    def before_step(self, step: Callable[..., Any], args: Any, kwargs: Any) -> list[Action]:  # noqa: ARG002 - as auto's
        """Decide what the coming step runs in, as all other processes do in this call."""
        actions: list[Action] = []
        self._calls += 1
        if self._first_step is None:
            actions += self._agree_on_length()
        if not self._peers.unanswered:
            actions += self._decide()
        return actions

    def _agree_on_length(self) -> list[Action]:
        """Agree on how long the run is, and on what a resumed run has done: the shortest counts."""
        total, done = self.context.total_steps, self.context.progress.steps
        found = self._peers.lowest(About.FIGURES, MOST if total is None else min(total, MOST - 1), min(done, MOST))
        self._first_step = done if found is None else found[1]
        self.state = Waiting(ask_at=self._first_step + EAGER_STEPS)
        if found is None:
            return self._end()
        self.context = dataclasses.replace(self.context, total_steps=None if found[0] == MOST else found[0])
        return []

    def _decide(self) -> list[Action]:
        actions: list[Action] = []
        if isinstance(self.state, Preparing):
            self._check_cost(self.state)
        elif isinstance(self.state, Trying):
            actions += self._hear_of_turn(self.state)
        if isinstance(self.state, Idle) and self._steps >= self.state.ask_at and not self._peers.unanswered:
            actions += self._ask_or_wait(self.state)
        if isinstance(self.state, Trying):
            actions += self._next_turn(self.state)
        return actions

    def _check_cost(self, preparation: Preparing) -> None:
        """Ask all processes to leave a tier whose preparation goes on for too long here, or has cost too much."""
        preparation.drop_step()
        why = self._why_given_up(preparation)
        if why:
            name = preparation.tier.name
            self._wish(name, Obstacle(f"given up: {why}", _RUN_LONGER.format(name=name)))

    # -- decisions --------------------------------------------------------------------------------------------------

    def _ask_or_wait(self, state: Idle) -> list[Action]:
        """Agree on the figures of all processes, and decide by these."""
        shares, candidates = self.candidates.host_shares, self._agreed_candidates
        free, needed, size = candidates.sizes()
        found = self._peers.slowest(
            About.FIGURES,
            super()._recent(state),
            state.recent_seconds,
            min(shares, default=1.0),
            max(shares, default=1.0),
            None if free is None else -free,
            needed,
            size,
            -self.saved_seconds,
            self.trial_seconds,
            self.prepare_seconds,
            float(another_trains(self.context)),
            float(any(map(joins, self.context.parts.wrappers()))),
        )
        if found is not None and found[-1]:
            self._peers.unanswered = _JOINED
        if found is None or found[-1]:
            return self._end()
        self._recent_seconds, self._slow_seconds, low, high, less, most, greatest, minus, tried, prepared, thread, _ = (
            found
        )
        state.beside_thread = bool(thread)
        if state.beside_thread:
            state.ask_at = self._steps + _ASK_BESIDE_THREAD
            self.context.reports.say_once(WAITS, logging.WARNING)
            return []
        if self._recent_seconds is not None:
            shares[:] = [low or 0.0, high or 0.0]
        candidates.free, candidates.needed, candidates.state = None if less is None else -less, most, greatest or 0.0
        self._costs = {"saved_seconds": -(minus or 0.0), "trial_seconds": tried, "prepare_seconds": prepared}
        return self._ask(state)

    def _recent(self, state: Idle) -> float | None:  # noqa: ARG002 - as auto's
        return self._recent_seconds

    def _standing(self) -> Standing:
        ours: Any = {"recent_seconds": self._slow_seconds, "runs": 1.0, **self._costs}
        return dataclasses.replace(super()._standing(), **ours)

    def _next_turn(self, state: Trying) -> list[Action]:
        tier = state.take_turn()
        assert state.turn is not None
        self._turns.append(state.turn)
        return [TryTier(tier)]

    def _hear_of_turn(self, state: Trying) -> list[Action]:
        """Add what an earlier turn took in the slowest process, and end the trial once it has a verdict."""
        turn = self._turns.popleft() if len(self._turns) >= _LATE else None
        found = self._peers.slowest(About.TURN, None if turn is None else self._times.pop(turn.number, None))
        if found is None:
            return self._end()
        if turn is not None and found[0] is not None:
            state.trial.add(turn, found[0])
        concluded = self._conclude(state)
        if concluded:
            self._forget_turns()
        return concluded

    def _forget_turns(self) -> None:
        self._turns.clear()
        self._times.clear()

    def _end(self) -> list[Action]:
        """Go on with the models as given, as all processes do: one of them has not taken part in a vote."""
        why = self._peers.unanswered
        line = f"{self.start.name} from now on: {why}; {AS_MANY}"
        self.context.reports.decided(line, {"action": "give up"}, logging.WARNING)
        others = [tier for name in self.candidates.names() if (tier := parse(name)) != self.start]
        self.state, self.in_force = Settled(ask_at=self._steps), self.start
        return [SetTier(self.start, why), *map(Release, others)]

    # -- what the loop reports --------------------------------------------------------------------------------------

    def timed(self, ran: Ran, timing: Timing) -> list[Action]:
        """Note what a step took here: a turn's time is voted on, other times are when `decide` is asked."""
        if ran.turn is None:
            return super().timed(ran, timing)
        trial, turn = ran.turn
        if isinstance(self.state, Trying) and trial is self.state.trial and (ran.kind, ran.tier) == ("run", turn.tier):
            self._times[turn.number] = timing.seconds
        return []

    def declined(self, tier: Tier, obstacle: Obstacle) -> list[Action]:
        """Ask all processes to leave a tier that cannot run here; leave it in the call in which all of them do."""
        if self._peers.unanswered:
            return self._end()
        self._forget_turns()
        return [*super().declined(tier, obstacle), Release(tier)]

    def _wish(self, name: str, obstacle: Obstacle) -> None:
        """Note why this process wants to leave a tier, and tell the others."""
        self.context.reports.vetoes.setdefault(name, obstacle)

    def watch_step(self) -> contextlib.AbstractContextManager[Any]:
        """Watch what a preparation or a turn costs; nothing is noted for a compile in the background."""
        return contextlib.nullcontext() if isinstance(self.state, Idle) else super().watch_step()

    def close(self) -> None:
        """Leave nothing to runs that come after this one: each process would leave something else."""
        self.stop()
