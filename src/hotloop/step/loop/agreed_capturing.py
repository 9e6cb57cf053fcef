"""Captures in several processes: before each call they vote on what to do with it, and all of them do the same.

A captured step holds its collectives, which all processes have to launch, or none. What runs a step twice, or records
it, is done by all in one call; what it has come to is agreed after it. So the states of a kind of call are the same in
all processes. Where they are not (a recording no longer fits in one of them), all begin anew with that kind.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import weakref
import zlib
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.wrappers import reset_reducer, why_not_recorded
from hotloop.errors import StepLostError, describe
from hotloop.step.loop.agreed_compiling import GIVE_UP, HINT, PAD, elsewhere
from hotloop.step.loop.agreed_plan import Doing, Plan
from hotloop.step.loop.capturing import Capturing
from hotloop.step.loop.kind_states import Audited, Captured, Declined, New, Proven, Warmed
from hotloop.step.obstacle import Obstacle
from hotloop.step.ranks.votes import AS_MANY, SETTLE, About
from hotloop.step.tiers import parse
from hotloop.step.watch.plain import SCALARS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.measure import Signature
    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.loop.agreed_compiling import AgreedStep
    from hotloop.step.loop.kind_states import CallKind, StepCall
    from hotloop.step.prove.agreed_sentinel import AgreedSentinel
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.tiers import Tier

ANEW, WITHIN = 3, 128
"""A kind of call that all processes began anew so often within so many calls is not captured."""
_NOT_THE_SAME = Obstacle(
    f"in {GIVE_UP} calls in a row not all processes could capture the same",
    f"{PAD}; leave what differs between processes (a rank, a path) out of the arguments of the step",
)
_NOT_GIVEN = "the step calls a model of several processes (DistributedDataParallel) that the loop was not given"


_STATES = (Declined, New, Audited, Warmed, Captured, Proven)
"""The states of a kind of call, by how far it is."""


@dataclasses.dataclass
class _Known:
    """What the processes share of a kind of call."""

    number: int
    """The same in all processes whose call is of such a kind."""
    collectives: int | None = None
    """How many a run of it makes."""
    anew: collections.deque[int] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=ANEW))
    """The last calls in which all began anew with it."""


class AgreedCapturing(Capturing):
    """The kinds of calls of one step in each of several processes.

    Attributes:
        over: all processes have given up capturing this step, and take no votes on its calls any more.
    """

    over = False
    _why: Obstacle | None = None
    """Why this process wants to leave the tier."""
    _told: tuple[Tier, Outcome] | None = None
    """What is reported once the recording is proven in all processes."""
    _checks: AgreedSentinel | None = None
    _checked: CallKind | None = None
    """The kind whose recording is proven again."""
    _fruitless = 0
    """Votes in a row, as many in all processes, in which not all could do the same."""

    def __init__(self, *args: Any, **collaborators: Any) -> None:
        super().__init__(*args, **collaborators)
        assert self._context.peers is not None
        self._peers = self._context.peers
        self._plan: Any = Plan(self)
        self._known: weakref.WeakKeyDictionary[CallKind, _Known] = weakref.WeakKeyDictionary()

    def follow(self, agreed: AgreedStep, checks: AgreedSentinel | None) -> None:
        """Leave the way to compiled code, and calls that run it without a graph, to what all agree on of it.

        Recordings are proven again when ``checks`` says so; None for never.
        """
        self._step_without_graph, self._checks = agreed, checks

    def run_agreed(self, signature: Signature, call: StepCall, tier: Tier) -> Any:
        """Run a call in a captured tier, on the way to it, or without a graph: the same in all processes."""
        kind: CallKind | None = None
        ours, number, self._why = Doing.LEAVE, 0, None
        try:
            kind = self.kind_of(signature, call.leaves)
            number, ours = self._of(kind).number, self._intent(kind, call, tier)
        except Exception as error:  # noqa: BLE001 - the others wait for this vote, and the step runs as it is
            self._why = Obstacle(f"the call could not be looked at: {describe(error)}", HINT)
        if ours is Doing.LEAVE and self._why is not None:
            self._peers.tell(str(self._why))
        proven = any(one.proven for one in self.kinds.values())
        wished = self._peers.wishes.number()
        found = self._peers.lowest(About.CALL, ours, -ours, number, -number, proven, wished)
        doing = self._agreed(found, kind)
        if kind is None or doing <= Doing.ONCE:
            return self._once(kind, signature, call, tier)
        if doing is Doing.CODE:
            return self._to_code(signature, call, tier)
        if doing is Doing.REPLAY:
            assert isinstance(kind.state, Proven)
            due = self._checks is not None and self._checks.due()
            result = self.replay(kind.state.recorded, call, tier)
            if due and isinstance(kind.state, Proven):
                self._begin_check(kind, kind.state)
            return result
        return self._together(doing, kind, call, tier)

    def _begin_check(self, kind: CallKind, state: Proven) -> None:
        """Prove a recording again, as all processes do from the next such call on."""
        self._checked, kind.state = kind, state.again()

    def _intent(self, kind: CallKind, call: StepCall, tier: Tier) -> Doing:
        """Return what this process would do with a call; nothing of the step runs."""
        why = next(filter(None, map(why_not_recorded, self._context.parts.wrappers())), "")
        wishes = self._peers.wishes
        if not tier.graph or why or wishes.by_name:
            wish = wishes.by_name.get(wishes.named(wishes.number()))
            self._why = Obstacle(why, "take that out, or train without a graph") if why else wish
            return Doing.LEAVE
        if tier.compiles and (not self._code.proven(tier.base) or tier.base in self._code.compiled_anew):
            return Doing.CODE
        doing: Doing = kind.state.run(kind, call, tier, self._plan)
        return doing

    def _agreed(self, found: tuple[int, ...] | None, kind: CallKind | None) -> Doing:
        """Return what all do with a call, by what they have voted."""
        if found is None or found[0] == Doing.LEAVE:
            missing = Obstacle(self._peers.unanswered, AS_MANY) if self._peers.unanswered else None
            wished = self._peers.wishes.named(found[5] if found is not None else 0)
            why = self._peers.wishes.by_name.get(wished) if wished else self._why
            self._leave(missing or why or self._elsewhere(), parse(wished) if wished else None)
            return Doing.LEAVE
        doing, furthest, alike = Doing(found[0]), Doing(-found[1]), found[2] == -found[3]
        if not alike or doing <= Doing.ONCE:
            self._fruitless += 1
            if self._fruitless >= GIVE_UP and not found[4]:
                self._give_up((kind.declined if kind is not None else None) or _NOT_THE_SAME)
                return Doing.ONCE
        else:
            self._fruitless = 0
        if not alike:
            return Doing.ONCE
        assert kind is not None
        if doing is Doing.DECLINED and kind.declined is None:
            super().decline(kind, self._elsewhere())
        if doing <= Doing.LOOK or doing is furthest:
            return doing
        self._anew(kind)
        return Doing.ONCE if kind.declined is not None else Doing.AUDIT

    def _once(self, kind: CallKind | None, signature: Signature, call: StepCall, tier: Tier) -> Any:
        """Run a call without a graph, each process for itself, and count its collectives."""
        self._peers.run_begins()
        result = self._step_without_graph.without_vote(call.run, tier.without_graph(), signature)
        if kind is not None:
            self._of(kind).collectives = self._peers.made()
        return result

    def _to_code(self, signature: Signature, call: StepCall, tier: Tier) -> Any:
        """Run a call on the way to compiled code that all have proven, a first time or again."""
        anew = self._code.proven(tier.base)
        way = self._step_without_graph.again if anew else self._step_without_graph.towards
        return way(call.run, tier, signature, call.arguments)

    def _together(self, doing: Doing, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Do in all processes what each could not do alone, and agree on what it has come to."""
        peers = self._peers
        peers.usual = self._of(kind).collectives
        peers.run_begins()
        if self._checks is not None:
            self._checks.step_begins()
        with peers.patient() if tier.compiles else contextlib.nullcontext():
            try:
                result = self._act(doing, kind, call, tier)
            except StepLostError:
                raise
            except Exception:  # the user's own, of a run that stays
                if peers.made_all():  # else the others wait in a collective, as they would without a loop
                    kind.forget()
                    self._agree_on(kind)
                raise
            self._agree_on(kind)
        return result

    def _act(self, doing: Doing, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        state = kind.state
        if doing is Doing.LOOK and kind.audit is not None:
            return self.look(kind, kind.audit, call, tier)
        if doing in {Doing.AUDIT, Doing.LOOK}:
            kind.forget()
            return self.audit(kind, call)
        if doing is Doing.WARM_UP:
            assert isinstance(state, Audited | Captured)
            return self.warm_up(kind, state, call, tier)
        assert isinstance(state, Warmed | Captured)
        return self.prove(kind, state, call, tier)

    def audit(self, kind: CallKind, call: StepCall) -> Any:
        """Run the call eagerly and observe it; a wrapper that the loop was not given would do what nobody agrees on."""
        known, strangers = self._context.parts.wrappers(), list[torch.nn.Module]()

        def note(module: torch.nn.Module, _arguments: Any) -> None:
            if isinstance(module, torch.nn.parallel.DistributedDataParallel) and module not in known:
                strangers.append(module)

        with contextlib.closing(_Hook(note)):
            result = super().audit(kind, call)
        self._of(kind).collectives = self._peers.made()
        if strangers:
            self.decline(kind, Obstacle(_NOT_GIVEN, "give it to the loop: Loop([model, other], optimizer)"))
        return result

    def _agree_on(self, kind: CallKind) -> None:
        """Bring a kind of call to the same state in all processes: no further than where it is in the last one."""
        state = kind.state
        place, count = _STATES.index(type(state)), len(state.outcomes) if isinstance(state, Captured) else 0
        measures = isinstance(state, Captured) and state.measures
        checked = kind is self._checked
        distance = self._checks.step_ends(checked=checked) if self._checks is not None else 0
        found = self._peers.lowest(About.OUTCOME, place, -place, -measures, count, -count, -distance)
        if found is None:
            return
        self._bring(kind, found)
        if self._checks is not None:
            self._after_check(kind, -found[5], self._checks, checked=checked)

    def _bring(self, kind: CallKind, found: tuple[int, ...]) -> None:
        """Bring a kind of call to the state that was voted on; ``found`` is the outcome of the vote."""
        state, least, furthest = kind.state, _STATES[found[0]], _STATES[-found[1]]
        if least is Declined:
            if kind.declined is None:
                super().decline(kind, self._elsewhere())
        elif least is Captured:
            assert isinstance(state, Captured | Proven)
            if isinstance(state, Proven):
                kind.state = state = Captured(state.recorded, state.recording)
            state.measures = bool(found[2])
            if furthest is not Captured or found[3] != -found[4]:
                state.outcomes.clear()  # all prove it anew, as often
        elif least is not furthest:
            self._anew(kind)
        elif isinstance(state, Proven):
            if self._checks is None:
                state.recording.forget_gradients(self._code.unseen(self._context.progress.tier.base))
            told, self._told = self._told, None
            if told is not None and kind is not self._checked:
                super()._tell_proven(*told)

    def _after_check(self, kind: CallKind, distance: int, checks: AgreedSentinel, *, checked: bool) -> None:
        """Plan the next check, or leave the recordings of the step where this one ended otherwise."""
        if isinstance(kind.state, Captured):
            return
        if checked:
            self._checked = None
        if isinstance(kind.state, Proven):
            checks.proven(distance, checked=checked)
        elif checked and kind.declined is not None:
            checks.disagreed(str(kind.declined))
            self._leave_recordings(kind.declined)

    def _leave_recordings(self, why: Obstacle) -> None:
        """Leave all recordings of the step: a check has found one of them wrong, in one process or more."""
        line = f"{self._step.name}: a recording that was proven did not pass a check: {why}"
        self._context.reports.say_once(line, logging.WARNING)
        for kind in [kind for kind in self.kinds.values() if kind.recording is not None]:
            super().decline(kind, why)

    def _tell_proven(self, tier: Tier, joined: Outcome) -> None:
        """Keep what to report once the recording is proven in all processes."""
        self._told = tier, joined

    def _anew(self, kind: CallKind) -> None:
        """Begin anew with a kind of call, which is not at the same place in all processes; at some time no more."""
        anew, now = self._of(kind).anew, self._peers.calls
        anew.append(now)
        kind.forget()
        if len(anew) == ANEW and now - anew[0] <= WITHIN:
            self.decline(kind, Obstacle(f"the processes began anew with it {ANEW} times in {WITHIN} calls", HINT))

    def _instead(self, kind: CallKind, audit: AuditFindings, call: StepCall, tier: Tier, obstacle: Obstacle) -> Any:
        """Run a call that failed in one process without a graph, in all of them; its wrappers may wait for its rest."""
        for wrapper in self._context.parts.wrappers():
            reset_reducer(wrapper)
        self._peers.reduced.clear()  # buckets are rebuilt after the first call that reduces, which may be this one
        self._peers.reduced[self._step.name] = int(self._context.parts.reduces())
        self._peers.run_begins()
        if self._peers.elsewhere:  # that process finds out whether it is the user's own error, and says so afterwards
            kind.state = Audited(audit)
            return self.uncaptured(kind, call, tier)
        return super()._instead(kind, audit, call, tier, obstacle)

    def _settling(self) -> bool:
        peers, parts = self._peers, self._context.parts
        if parts.reduces():
            return peers.reduced[self._step.name] <= SETTLE
        return peers.rebuilds(parts.wrappers(), reduces=False)

    def why_outside(self, audit: AuditFindings) -> str:
        """Say why an optimizer of a step would run outside of its recording; empty where none would."""
        return self._optimizers.why_outside(audit.stepped)

    def _give_up(self, obstacle: Obstacle) -> None:
        """Capture nothing of this step any more, in all processes; other steps go on in a tier that was asked for."""
        if self._peers.chooses:
            self._leave(obstacle)
            return
        self.over = True
        graph = dataclasses.replace(self._context.progress.tier, graph=True)
        self._context.reports.kind_declined(self._step, graph, obstacle)

    def decline(self, kind: CallKind, obstacle: Obstacle) -> None:
        """Never capture calls of this kind, and tell the other processes why."""
        self._peers.tell(str(obstacle))
        super().decline(kind, obstacle)

    def _elsewhere(self) -> Obstacle:
        """Return the obstacle of another process, with its reason if that process has told it."""
        return elsewhere(self._peers, "another process cannot capture such a call")

    def _leave(self, obstacle: Obstacle, wished: Tier | None = None) -> None:
        """Leave the tier for good, in this call, which is the same one in all processes.

        Where `auto` chooses, others may come after it; what all leave is the tier that one of them ``wished`` to leave.
        """
        tier, peers, self._fruitless = self._context.progress.tier, self._peers, 0
        if peers.chooses:
            with peers.wishes.granting():
                self._context.reports.failed(self._step, wished or tier, obstacle)
            return
        peers.graphs_left = obstacle.reason
        if tier.graph:
            graph = dataclasses.replace(self._context.base_tier, graph=True)
            self._context.reports.failed(self._step, graph, obstacle)

    def _of(self, kind: CallKind) -> _Known:
        known = self._known.get(kind)
        if known is None:
            known = self._known[kind] = _Known(self._number(kind))
        return known

    def _number(self, kind: CallKind) -> int:
        """Return a number that is the same in all processes whose call is of such a kind, and hardly in another one."""
        key: Any = kind.key
        inputs, (_, aliasing, *rest) = kind.signature, key
        attributes = [(place, name) for place, name, _ in aliasing.attributes]
        called = inputs.names(), [*map(_portable, inputs.leaves)], aliasing.shared, attributes
        return zlib.crc32(repr((self._step.name, self._context.progress.tier.base, called, rest)).encode())


def _portable(leaf: Any) -> Any:
    """Return what another process can compare of an argument's part of a call's key."""
    if isinstance(leaf, tuple) and hasattr(leaf, "_asdict"):
        return [
            (name, value.type if isinstance(value, torch.device) else value) for name, value in leaf._asdict().items()
        ]
    if type(leaf) is not tuple:
        return leaf
    kind, value = leaf
    if isinstance(value, torch.device):
        return value.type
    return value if kind in SCALARS else kind.__qualname__


class _Hook:
    """A hook before the forward of every module."""

    def __init__(self, hook: Callable[[torch.nn.Module, Any], None]) -> None:
        self._handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)

    def close(self) -> None:
        """Take it off."""
        self._handle.remove()
