"""Takes the kinds of calls of one step to proven recordings, and replays them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time
import zlib
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop._torch.wrappers import reset_reducer, why_hooked
from hotloop.compiling.control import between_steps
from hotloop.interrupts import uninterrupted
from hotloop.step.audit.auditor import changes_state
from hotloop.step.calls.call_key import Aliasing, UnstableArguments, key_of
from hotloop.step.capture.invariants import Change
from hotloop.step.engine import collector_paused
from hotloop.step.loop.kinds import Audited, CallKind, Captured, Declined, Proven, StepCall, Warmed
from hotloop.step.obstacle import INTO_IT, CandidateFailedError, Obstacle
from hotloop.step.prove.graph_proofs import Noise, Recorded, judge, wrong_recording
from hotloop.step.prove.outcomes import Verdict
from hotloop.step.ranks.peers import SETTLE
from hotloop.step.watch.plain import SCALARS

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator

    from hotloop.measure import Signature
    from hotloop.step.audit.auditor import StepAuditor
    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.capture.optimizers import RecordedOptimizers
    from hotloop.step.capture.recording import CapturedStep
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.code_proofs import CodeProofs
    from hotloop.step.prove.graph_proofs import GraphProofs
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.prove.schedule import Schedule
    from hotloop.step.rescue import Rescue
    from hotloop.step.tiers import Tier
    from hotloop.step.watch.stream import Difference

KINDS = 8
"""Recordings of one step, at most: each holds memory."""
_COMES_BACK = 4
"""Calls for each known kind after which a kind that has not come again is not waited for."""
_KEYS = 256
"""Keys that are remembered, at most."""
_ALIKE = 3
"""Audited kinds of calls: a line that kept all of them from being captured is taken to do so in every kind."""
_ANEW_WITHIN = 128
"""Calls within which several processes may not begin anew with a kind too often."""
_LEFT_OTHERWISE = Obstacle(
    "parameters are sharded (FSDP2), and the step leaves set_requires_gradient_sync(), or another of its settings, "
    "otherwise than it found it, which a replay does not",
    "set it back at the end of the step, or between two calls",
)
_NOT_GIVEN = Obstacle(
    "the step calls a model of several processes (DistributedDataParallel) that the loop was not given",
    "give it to the loop: Loop([model, other], optimizer)",
)


_CHANGES = "keep it constant, pass it as a tensor argument, or change it less often"
_MEMORY = ("._parameters.items", "._buffers.items")
"""What a look names that finds tensors in other memory."""


class Capturing:
    """The kinds of calls of one decorated step, and what happens to them.

    Args:
        auditor: observes eager runs of the step.
        graphs: captures the step and proves its recordings.
        rescue: undoes a step that failed.
        code: the proofs of the compiled code that recordings are made of.
        optimizers: which optimizers run outside of recordings.
        plain: runs a call in a tier without its graph.
        schedule: plans the checks of recordings; None where there are none.

    Attributes:
        calls: how often the step was called in a tier, or on the way to one.
        disagreed: what a check of several processes has found wrong.
    """

    def __init__(  # noqa: PLR0913 - the collaborators of one step, each a room of its own
        self,
        step: DecoratedStep,
        auditor: StepAuditor,
        graphs: GraphProofs,
        rescue: Rescue,
        code: CodeProofs,
        *,
        optimizers: RecordedOptimizers,
        plain: Callable[[CallKind, StepCall, Tier], Any],
        schedule: Schedule | None,
    ) -> None:
        self._step, self._context = step, step.context
        self.auditor, self._graphs, self._rescue, self._code = auditor, graphs, rescue, code
        self.optimizers, self._plain, self._schedule = optimizers, plain, schedule
        self._kinds: dict[str, dict[Hashable, CallKind]] = collections.defaultdict(dict)
        """By base, since a recording holds the code that it was made of; then by key."""
        self._fresh = UnstableArguments(step.argument)
        self._unshared: Obstacle | None = None
        """What a program did with sharded parameters that no recording can follow."""
        self._hooked = next(filter(None, map(why_hooked, self._context.parts.wrappers())), "")
        """A recording would repeat what the hook did in one step; audits do not see what it keeps."""
        self._told: tuple[Tier, Outcome] | None = None
        """What to report once the recording is proven in all processes."""
        self.calls, self.disagreed = 0, ""

    # -- kinds of calls --------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> dict[Hashable, CallKind]:
        """What is known of each kind of call, with the code that is in force."""
        return self._kinds[self._context.progress.tier.base]

    def kind_of(self, call: StepCall) -> CallKind:
        """Return the kind that the coming call is of, and count the call."""
        aliasing = Aliasing.of(call.leaves)
        kind = self._find(call.inputs, key_of(call.inputs, aliasing, self._context.parts))
        self.calls += 1
        self._context.progress.calls += 1
        kind.calls += 1
        kind.latest.append(self.calls)
        self._note_what_shards_keep()
        kind.unstable = self._fresh.obstacle(call.inputs, aliasing, new=kind.calls == 1)
        return kind

    def _note_what_shards_keep(self) -> None:
        """Note what keeps recordings out for good: what one call keeps another finds, of whatever kind it is."""
        self._unshared = self._unshared or self._context.parts.kept()

    def _find(self, signature: Signature, key: Hashable) -> CallKind:
        kinds = self.kinds
        found = kinds.get(key)
        if found is not None:
            return found
        if len(kinds) >= _KEYS:
            # First what nothing is known of. A decline that is forgotten costs another audit, a recording more steps.
            known = {key: (kind.begun, kind.declined is not None, kind.called) for key, kind in kinds.items()}
            kinds.pop(min(known, key=known.__getitem__))
        # Code that is compiled has taken the path of code that is told that it is captured.
        told = self._context.progress.tier.compiles
        number = 0 if self._context.peers.alone else self._number(signature, key)
        found = kinds[key] = CallKind(key, signature, reports_capturing=told, number=number)
        # What an audit saw is so whatever the code is compiled with.
        for other in [kinds[key] for kinds in self._kinds.values() if key in kinds]:
            audit = other.audit if other.declined is None else None
            if audit is not None and (not audit.asked or other.path.reports_capturing == told):
                found.state = Audited(audit)
        return found

    def _number(self, signature: Signature, key: Any) -> int:
        """Return a number that is the same in all processes whose call is of such a kind, and hardly in another one."""
        _, aliasing, *rest = key
        attributes = [(place, name) for place, name, _ in aliasing.attributes]
        called = signature.names(), [*map(_portable, signature.leaves)], aliasing.shared, attributes
        return zlib.crc32(repr((self._step.name, self._context.progress.tier.base, called, rest)).encode())

    def forget_audits(self) -> None:
        """Begin every kind of call anew, with an audit; declined kinds stay declined."""
        for kind in self.kinds.values():
            if kind.declined is None:
                kind.forget()

    @property
    def hindered(self) -> bool:
        """Whether an audit saw something in the step that no capture allows."""
        return any(bool(kind.audit.obstacles) for kind in self.kinds.values() if kind.audit is not None)

    @property
    def proving(self) -> bool:
        """Whether a kind of call is between its first run for a recording and the end of its proof."""
        return any(isinstance(kind.state, Warmed | Captured) for kind in self.kinds.values())

    def release(self, base: str) -> None:
        """Let go of what was captured with a base's code; calls are counted on, and declined kinds stay declined."""
        for kind in self._kinds[base].values():
            if kind.declined is None:
                kind.forget()

    def forget_recordings(self) -> None:
        """Let go of everything that was captured."""
        self._kinds.clear()

    # -- what is asked before a call -------------------------------------------------------------------------------

    def why_not_captured(self, kind: CallKind) -> Obstacle | None:
        """Return what keeps calls of a kind from being captured, whatever its state."""
        if self._hooked:
            return Obstacle(self._hooked, "take the hook out, or train without a graph")
        return self._unshared or kind.unstable or (None if kind.audit is not None else self._common_obstacle())

    def argument_in_state(self, kind: CallKind, recording: CapturedStep, call: StepCall) -> str:
        """Say which argument is part of what the step changes, and was not when it was recorded; empty if none is."""
        if (place := recording.of_its_own(call.leaves)) is None:
            return ""
        name = self._step.argument(kind.signature.names()[place])
        return (
            f"argument {name} is, or is a part of, a parameter, a buffer, a gradient or optimizer state, and was not "
            f"when the step was captured: such calls run without a graph. Pass a copy, {name}.clone(), or read it "
            "inside the step"
        )

    def _common_obstacle(self) -> Obstacle | None:
        """Return the line that keeps every kind of call from being captured, once several kinds were audited."""
        audits = [kind.audit for kind in self.kinds.values() if kind.audit is not None]
        if len(audits) < _ALIKE or not all(audit.obstacles for audit in audits):
            return None
        first = audits[0].obstacles[0]
        places = {(audit.obstacles[0].reason, audit.obstacles[0].file, audit.obstacles[0].line) for audit in audits}
        return first if len(places) == 1 and first.file is not None else None

    def oldest(self, kind: CallKind) -> CallKind | None:
        """Return the recorded kind that has to make room for another one; None while there is room."""
        begun = [other for other in self.kinds.values() if other.begun and other is not kind]
        return min(begun, key=lambda other: other.called) if len(begun) >= KINDS else None

    def why_not_begin(self, kind: CallKind) -> str | None:
        """Return why not to take a kind of call to a recording now, as a line for people or an empty one.

        A call that comes a second time is worth a recording, as long as there is room. While another kind is on its
        way, nobody knows whether a second one pays; a kind that does not come back (a curriculum has moved on) holds
        nobody up.
        """
        oldest = self.oldest(kind)
        if oldest is not None and not kind.outlives(oldest):
            return (
                f"{KINDS} kinds of calls are captured, the most there may be. A further kind runs "
                "without a graph, and takes the place of a captured one that has stopped coming. "
                "Fewer shapes (buckets=) or fewer argument values would be captured all"
            )
        if kind.calls <= 1 or self._settling():
            return ""
        recently = self.calls - _COMES_BACK * len(self.kinds)
        others = (other for other in self.kinds.values() if other is not kind)
        if self._context.progress.preparing and any(other.begun and other.called >= recently for other in others):
            return ""
        return None

    def _settling(self) -> bool:
        """Return whether wrappers are not yet as they stay; a process on its own may have one, too."""
        peers, parts = self._context.peers, self._context.parts
        if peers.alone:
            return self.calls <= SETTLE and bool(parts.wrappers())
        if parts.reduces():
            return peers.reduced[self._step.name] <= SETTLE
        return peers.rebuilds(parts.wrappers(), reduces=False)

    # -- what is done with a call ----------------------------------------------------------------------------------

    def audit(self, kind: CallKind, call: StepCall, *, because: Change | None = None) -> Any:
        """Run the call eagerly and observe it; ``because`` is the change that a recording does not fit any more."""
        if because is not None:
            self._drop(kind, because)
            if kind.declined is not None:
                return self._plain(kind, call, self._context.progress.tier)
        elif kind.audit is None or not kind.audit.obstacles or not kind.take_other_path():
            kind.forget()
        if (oldest := self.oldest(kind)) is not None:
            oldest.forget()
        told, sharding = kind.path.reports_capturing, self._context.parts.sharded()
        found = sharding.settings() if sharding.has_run() else None  # a first forward makes some of the settings
        others: contextlib.AbstractContextManager[list[torch.nn.Module]] = contextlib.nullcontext([])
        if not self._context.peers.alone:
            others = _calls_of_others(self._context.parts.wrappers())
        with others as strangers:
            result, audit = self.auditor.audit(call.run, *call.arguments, reports_capturing=told)
        self._note_what_shards_keep()  # before anything is run twice
        keeps = self._unshared or (_LEFT_OTHERWISE if found not in {None, sharding.settings()} else None)
        keeps = _NOT_GIVEN if strangers else keeps
        if keeps is not None and self._context.progress.may_capture:
            self.decline(kind, keeps)
        elif audit is not None and not audit.stopped:
            kind.state = Audited(audit)
        elif audit is not None and audit.asked and not told:
            kind.path.reports_capturing = True  # its other path is audited next
        elif audit is not None and audit.failed is not None:
            self._decline_survey(kind, audit.failed)
        return result

    @uninterrupted
    def look(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run the call eagerly, and compare its operations with those of its audit: a value may have changed them."""
        audit, step, began = kind.audit, self._step, time.perf_counter()
        if audit is None or audit.watch is None:  # another process looks at its step
            return self.audit(kind, call)
        watch = audit.watch
        changed = watch.changed()
        watch.release()
        step.doing, step.ran = "sentinel", tier.name
        result, stream = self.auditor.run_compared(
            call.run, call.arguments, audit, reports_capturing=kind.path.reports_capturing
        )
        if kind.recording is not None:
            kind.recording.keep_gradients()
        if self._schedule is not None:
            usual = self._context.reports.seconds_of(tier.name)
            self._schedule.checked(max(0.0, time.perf_counter() - began - (usual or 0.0)), usual, recorded=True)
        difference, moved = stream.difference, [name for name in watch.changed() if name not in changed]
        if difference is not None:
            self._drop_stale(kind, difference, changed)
        elif moved:
            self.decline(kind, changes_state(moved[0]))
        else:
            watch.forget_changed()
            if isinstance(kind.state, Proven):
                kind.state.right_at, kind.state.replayed = self._context.progress.steps + 1, False
        return result

    def _drop_stale(self, kind: CallKind, difference: Difference, changed: list[str]) -> None:
        """Drop the recording of a step that does other things now; say so where it was replayed meanwhile."""
        state, done = kind.state, self._context.progress.steps
        if not changed and isinstance(state, Proven) and state.replayed:
            place: dict[str, Any] = {
                "operation": difference.operation,
                "file": difference.file,
                "line": difference.line,
            }
            first = state.right_at + 1
            event = ev.StepsStale(step=done, function=self._step.name, first_step=first, last_step=done, **place)
            self._context.reports.emit(event)
        because = f"{changed[0]} has changed: " if changed else ""
        memory = bool(changed) and changed[0].endswith(_MEMORY)
        self._drop(kind, Change(f"{because}{difference}", hint=INTO_IT if memory else _CHANGES))

    def _decline_survey(self, kind: CallKind, obstacle: Obstacle) -> None:
        """Decline what steps are on the way to: the survey of the step did not come to its end."""
        tier = self._context.progress.tier
        if tier.other_kernels:
            self._context.reports.failed(self._step, tier.without_graph(), obstacle)
        else:
            self.decline(kind, obstacle)

    @uninterrupted
    def warm_up(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run the call twice, to see how far it is from itself; a recording is judged anew by that."""
        state = kind.state
        assert isinstance(state, Audited | Captured)
        audit = state.audit if isinstance(state, Audited) else state.recorded.audit
        noise = Noise() if isinstance(state, Audited) else state.recorded.noise
        was_noisy, unheld = noise.noisy, self.auditor.unheld()
        try:
            with collector_paused():
                result, obstacle = self._graphs.warm_up(audit, noise, kind.path, call.arguments)
        except CandidateFailedError as error:
            failed = self._rescue.candidate_failed(error, tier)
        else:
            if obstacle is None and audit.watch is not None:
                audit.watch.look()  # counts of averages have moved to the device
            if (obstacle := next(iter(self.auditor.written(unheld)), obstacle)) is not None:
                self.decline(kind, obstacle)
            elif isinstance(state, Captured):
                state.measures = False
                if noise.noisy and not was_noisy:  # what was past its limits may be noise
                    state.outcomes.clear()
                elif state.outcomes:
                    self._conclude(kind, state, tier)
            else:
                kind.state = Warmed(Recorded(audit, noise, kind.path))
            return result
        # Out of the except clause, so that what eager raises does not carry our exception along.
        return self.instead(kind, audit, call, tier, failed)

    @uninterrupted
    def prove(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run the call both ways and compare; capture it first where it is not captured."""
        state = kind.state
        assert isinstance(state, Warmed | Captured)
        recorded, share = state.recorded, kind.calls / max(1, self._context.progress.calls)
        unheld = self.auditor.unheld()
        try:
            with collector_paused():
                outcome = self._graphs.prove(recorded, call.arguments, tier, share)
        except CandidateFailedError as error:
            failed = recorded.audit.explained(self._rescue.candidate_failed(error, tier))
            recorded.drop()
        else:
            assert recorded.recording is not None
            if isinstance(state, Warmed):
                state = kind.state = Captured(recorded, recorded.recording)
                if self._schedule is not None:
                    self._schedule.begin()
            if written := self.auditor.written(unheld):
                self.decline(kind, written[0])
            elif changed := recorded.audit.changed():
                self.decline(kind, changes_state(changed[0]))
            else:
                # Without the result, whose graph would tie a later capture to the stream of this step.
                state.outcomes.append(dataclasses.replace(outcome, result=None))
                self._conclude(kind, state, tier)
            return outcome.result
        # Out of the except clause, so that what eager raises does not carry our exception along.
        return self.instead(kind, recorded.audit, call, tier, failed)

    def _conclude(self, kind: CallKind, state: Captured, tier: Tier) -> None:
        """Do what the proof steps so far say of the recording."""
        joined, verdict = judge(state.recorded, state.outcomes)
        if verdict is Verdict.CLOSER:
            state.measures = True
        elif verdict is Verdict.WRONG and kind.checked:
            self._leave_recordings(wrong_recording(joined))
        elif verdict is Verdict.WRONG:
            self._decline_path(kind, wrong_recording(joined))
        elif verdict is Verdict.PROVEN:
            kind.state = Proven(state.recorded, state.recording, self._context.progress.steps + 1)
            self._told = None if kind.checked else (tier, joined)

    def agree(self, kind: CallKind, found: tuple[int, ...], elsewhere: Obstacle) -> None:
        """Bring a kind of call to the state that all processes have: no further than it is in the last one.

        Args:
            kind: the kind.
            found: the lowest `CallKind.place`, its negation, and as `progress_of` gives them.
            elsewhere: the obstacle of another process.
        """
        least, furthest, measures, fewest, most = found
        state, told, self._told = kind.state, self._told, None
        if least == kind.place == -furthest and not isinstance(state, Captured | Proven):
            return
        if least == 0 and kind.checked:
            self._leave_recordings(elsewhere)
        elif least == 0:
            self.decline(kind, elsewhere)
        elif isinstance(state, Proven) and least == kind.place:
            kind.checked = False
            if self._schedule is None:  # else it is compared further on
                state.recording.forget_gradients(self._code.unseen(self._context.progress.tier.base))
            if told is not None:
                tier, joined = told
                self._context.reports.proven(
                    self._step, tier, worst=joined.worst, copied_bytes=joined.nbytes, on_host=joined.on_host
                )
        elif isinstance(state, Captured | Proven) and least >= kind.place - isinstance(state, Proven):
            if isinstance(state, Proven):
                kind.state = state = Captured(state.recorded, state.recording)
            state.measures = bool(measures)
            if least != -furthest or fewest != -most:
                state.outcomes.clear()  # all prove it anew, as often
        else:
            self.begin_anew(kind)

    @staticmethod
    def progress_of(kind: CallKind) -> tuple[int, ...]:
        """Return how far a kind is, for a vote of which the lowest of each number counts."""
        captured = kind.state if isinstance(kind.state, Captured) else None
        count = len(captured.outcomes) if captured is not None else 0
        return kind.place, -kind.place, -(captured is not None and captured.measures), count, -count

    def begin_anew(self, kind: CallKind) -> None:
        """Begin anew with a kind of call that is not at the same place in all processes; at some time no more."""
        kind.anew.append(self._context.peers.calls)
        kind.forget()
        if len(kind.anew) == kind.anew.maxlen and kind.anew[-1] - kind.anew[0] <= _ANEW_WITHIN:
            why = f"the processes began anew with it {len(kind.anew)} times in {_ANEW_WITHIN} calls"
            self.decline(kind, Obstacle(why, "see the log of the other processes"))

    def replay(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run the call by replaying its recording; where that fails, undo it and run it eagerly."""
        state = kind.state
        assert isinstance(state, Proven)
        recording, state.replayed = state.recording, True
        try:
            recording.save_others()
            self._rescue.save(gradients=bool(state.recorded.audit.read_gradients), tensors=not recording.atomic)
            result = recording.replay(call.leaves)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step is undone and eager asked
            failed = error
        else:
            self._rescue.has_run()
            self._step.program.ran.state = (result,)
            if recording.recorded:
                between_steps()
            self._code.replayed(tier.base, recording.gradients_at_step)
            return result
        # Out of the except clause, so that what eager raises does not carry our exception along.
        ours = not recording.in_users_code
        return self._rescue.recover(failed, call.run, tier, ours=ours, wrote=recording.wrote)

    def instead(self, kind: CallKind, audit: AuditFindings, call: StepCall, tier: Tier, obstacle: Obstacle) -> Any:
        """Run a call without the graph that failed; what it raises as well is the user's own, and declines nothing."""
        peers, parts, kind.state = self._context.peers, self._context.parts, Audited(audit)
        if not peers.alone:
            for wrapper in parts.wrappers():  # which may wait for the rest of the step that failed
                reset_reducer(wrapper)
            peers.reduced.clear()  # buckets are rebuilt after the first call that reduces, which may be this one
            peers.reduced[self._step.name] = int(parts.reduces())
            peers.run_begins(peers.usual)
        result = self._plain(kind, call, tier)
        # Not where the compiled code is at fault, and another graph is made without it; nor for another process's
        # failure, which finds out whether it is the user's own error, and says so afterwards.
        if self._step.doing != "undone" and not peers.elsewhere:
            self._decline_path(kind, obstacle)
        return result

    def _leave_recordings(self, obstacle: Obstacle) -> None:
        """Leave all recordings of the step: a check has found one of them wrong, in one process or more."""
        tier, now = self._context.progress.tier.name, self._context.progress.steps + 1
        self.disagreed = self.disagreed or f"step {now} in {tier}: {obstacle}"
        line = f"{self._step.name}: a recording that was proven did not pass a check: {obstacle}"
        self._context.reports.say_once(line, logging.WARNING)
        self.decline_recordings(obstacle)

    def prove_again(self) -> None:
        """Measure the noise of every recorded kind of call anew, and prove its recording: a check found one wrong."""
        for kind in self.kinds.values():
            if isinstance(kind.state, Proven):
                kind.state = kind.state.again()

    def decline_recordings(self, obstacle: Obstacle) -> None:
        """Decline every kind of call that has a recording: a check found one wrong."""
        for kind in [kind for kind in self.kinds.values() if kind.recording is not None]:
            self.decline(kind, obstacle)

    def _decline_path(self, kind: CallKind, obstacle: Obstacle) -> None:
        """Decline a recording for what was seen of it, unless code of the step has another path for a capture."""
        if not kind.take_other_path():
            self.decline(kind, obstacle)

    def decline(self, kind: CallKind, obstacle: Obstacle) -> None:
        """Never capture calls of this kind; the policy is asked once no kind that comes back can be captured."""
        if kind.declined is not None:
            return
        reported = any(other.declined is obstacle for other in self.kinds.values())
        kind.state = Declined(obstacle, kind.audit)
        if reported:  # a line that all kinds have in common
            return
        self._context.peers.tell(str(obstacle))
        tier = dataclasses.replace(self._context.progress.tier, graph=True)
        every = not any(other.declined is None for other in self.kinds.values() if other.calls > 1)
        self._context.reports.kind_declined(self._step, tier, obstacle, every=every)

    def _drop(self, kind: CallKind, change: Change) -> None:
        """Forget a recording that no longer fits the program; decline the kind where that happens too often."""
        step, what, recorded = self._context.progress.steps, change.what, kind.recording is not None
        reasons = kind.drop(step, what)
        self._rescue.look_again()
        self._context.parts.look_again()
        if recorded:
            self._context.reports.emit(ev.CaptureDropped(step=step, function=self._step.name, reason=what))
        if not reasons:
            return
        if change.optimizer is None:
            what = f"what a recording holds changes again and again: {'; '.join(reasons)}"
            self.decline(kind, Obstacle(what, change.hint))
        elif change.optimizer not in self.optimizers.outside:  # else another kind of call has moved it out already
            self.optimizers.run_outside(change.optimizer, f"{what} changes again and again")


@contextlib.contextmanager
def _calls_of_others(known: Any) -> Iterator[list[torch.nn.Module]]:
    """Collect the wrappers of several processes that are called in the block, and that the loop was not given."""
    strangers: list[torch.nn.Module] = []

    def note(module: torch.nn.Module, _arguments: Any) -> None:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel) and module not in known:
            strangers.append(module)

    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield strangers
    finally:
        hook.remove()


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
