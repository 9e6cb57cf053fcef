"""Takes the kinds of calls of one step to proven recordings, and runs them: what the states of a kind ask for."""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop._torch.wrappers import why_hooked
from hotloop.compiling.control import between_steps
from hotloop.interrupts import uninterrupted
from hotloop.step.audit.auditor import changes_state
from hotloop.step.calls.call_key import Aliasing, UnstableArguments, key_of
from hotloop.step.capture.invariants import Change, Invariants
from hotloop.step.engine import collector_paused
from hotloop.step.loop.kind_states import REPLACES, Audited, CallKind, Captured, Declined, New, Proven, Warmed
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove.graph_proofs import Noise, Recorded, judge, wrong_recording
from hotloop.step.prove.outcomes import Verdict
from hotloop.step.ranks.threads import WAITS, another_trains
from hotloop.step.ranks.votes import SETTLE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hotloop.measure import Signature
    from hotloop.step.audit.auditor import StepAuditor
    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.capture.optimizers import RecordedOptimizers
    from hotloop.step.capture.recording import CapturedStep
    from hotloop.step.context import DecoratedStep
    from hotloop.step.loop.kind_states import StepCall
    from hotloop.step.prove.check import Check
    from hotloop.step.prove.code_proofs import CodeProofs
    from hotloop.step.prove.graph_proofs import GraphProofs
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.rescue import Rescue
    from hotloop.step.tiers import Tier
    from hotloop.step.watch.stream import Difference

VALUES_EVERY = 4
"""Of so many looks at a step's operations one is followed by a comparison of values."""
KINDS = 8
"""Recordings of one step, at most: each holds memory."""
_COMES_BACK = 4
"""Calls for each known kind after which a kind that has not come again is not waited for."""
_KEYS = 256
"""Keys that are remembered, at most."""
_ALIKE = 3
"""Audited kinds of calls: a line that kept all of them from being captured is taken to do so in every kind."""

_LEFT_OTHERWISE = Obstacle(
    "parameters are sharded (FSDP2), and the step leaves set_requires_gradient_sync(), or another of its settings, "
    "otherwise than it found it, which a replay does not",
    "set it back at the end of the step, or between two calls",
)
_CHANGES = "keep it constant, pass it as a tensor argument, or change it less often"


class Capturing:
    """The kinds of calls of one decorated step, and what happens to them.

    Args:
        graphs: captures the step and proves its recordings.
        code: the proofs of the compiled code that recordings are made of.
        optimizers: which optimizers run outside of recordings.
        sentinel: checks proven recordings now and then; None where nothing is checked.
        uncaptured: runs a call in a tier without its graph.
        compare: runs a recording and eager and compares, for the sentinel (`StepRunner.compare`).

    Attributes:
        calls: how often the step was called in a tier, or on the way to one.
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
        sentinel: Check | None,
        uncaptured: Callable[[CallKind, StepCall, Tier], Any],
        compare: Callable[..., Any],
    ) -> None:
        self._step, self._context = step, step.context
        self.auditor, self._graphs, self._rescue, self._code = auditor, graphs, rescue, code
        self._optimizers, self._sentinel = optimizers, sentinel
        self.uncaptured, self._compare = uncaptured, compare
        self._kinds: dict[str, dict[Hashable, CallKind]] = collections.defaultdict(dict)
        """By base, since a recording holds the code that it was made of; then by key."""
        self._looks, self._owes_values = 0, False
        self._fresh = UnstableArguments(step.argument)
        self._unshared: Obstacle | None = None
        """What a program did with sharded parameters that no recording can follow."""
        self._hooked = next(filter(None, map(why_hooked, self._context.parts.wrappers())), "")
        """A recording would repeat what the hook did in one step; audits do not see what it keeps."""
        self.calls = 0

    @property
    def kinds(self) -> dict[Hashable, CallKind]:
        """What is known of each kind of call, with the code that is in force."""
        return self._kinds[self._context.progress.tier.base]

    def kind_of(self, signature: Signature, leaves: list[Any]) -> CallKind:
        """Return the kind that the coming call is of, and count the call."""
        self._context.parts.sharded().rest()
        aliasing = Aliasing.of(leaves)
        kind = self._find(signature, key_of(signature, aliasing, self._context.parts))
        self.calls += 1
        self._context.progress.calls += 1
        kind.calls += 1
        kind.latest.append(self.calls)
        self._note_what_shards_keep()
        if self._context.progress.may_capture and kind.declined is None:
            obstacle = self._fresh.obstacle(signature, aliasing, new=kind.calls == 1)
            if self._hooked:
                obstacle = Obstacle(self._hooked, "take the hook out, or train without a graph")
            obstacle = self._unshared or obstacle
            if obstacle is not None:
                self.decline(kind, obstacle)
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
        found = kinds[key] = CallKind(key, signature, reports_capturing=told)
        # What an audit saw is so whatever the code is compiled with.
        for other in [kinds[key] for kinds in self._kinds.values() if key in kinds]:
            audit = other.audit if other.declined is None else None
            if audit is not None and (not audit.asked or other.path.reports_capturing == told):
                found.state = Audited(audit)
        return found

    def run(self, kind: CallKind, call: StepCall, tier: Tier) -> Any:
        """Run a call in a captured tier, or on the way to it."""
        return kind.state.run(kind, call, tier, self)

    def forget_audits(self) -> None:
        """Begin every kind of call anew, with an audit; declined kinds stay declined."""
        for kind in self.kinds.values():
            kind.state = Declined(kind.declined) if kind.declined is not None else New()

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
            if not isinstance(kind.state, Declined):
                kind.forget()

    def forget_recordings(self) -> None:
        """Let go of everything that was captured."""
        self._kinds.clear()

    # -- what a state asks first -----------------------------------------------------------------------------------

    def may_begin(self, kind: CallKind) -> bool:
        """Return whether to take a kind of call to a recording now.

        A call that comes a second time is worth a recording, as long as there is room. While another kind is on its
        way, nobody knows whether a second one pays; a kind that does not come back (a curriculum has moved on) holds
        nobody up.
        """
        kinds, progress = self.kinds.values(), self._context.progress
        begun = [other for other in kinds if other.begun and other is not kind]
        oldest = min(begun, key=lambda other: other.called) if len(begun) >= KINDS else None
        if oldest is not None and not kind.outlives(oldest):
            self._context.reports.say_once(
                f"{self._step.name}: {KINDS} kinds of calls are captured, the most there may be. A further kind runs "
                "without a graph, and takes the place of a captured one that has stopped coming: it must come "
                f"{REPLACES} times while that one never comes. Fewer shapes (buckets=) or fewer argument values would "
                "be captured all"
            )
            return False
        if kind.calls <= 1 or self._settling():
            return False
        recently = self.calls - _COMES_BACK * len(kinds)
        if progress.preparing and any(other.begun and other.called >= recently for other in kinds):
            return False
        if self.must_wait():
            return False
        if oldest is not None:
            oldest.forget()
        return True

    def _settling(self) -> bool:
        """Return whether wrappers are not yet as they stay; a process on its own may have one, too."""
        return self.calls <= SETTLE and bool(self._context.parts.wrappers())

    def must_wait(self) -> bool:
        """Return whether nothing may be audited or proven at present, since another thread trains as well."""
        if not another_trains(self._context):
            return False
        self._context.reports.say_once(f"{self._step.name}: {WAITS}", logging.WARNING)
        return True

    def common_obstacle(self) -> Obstacle | None:
        """Return the line that keeps every kind of call from being captured, once several kinds were audited."""
        audits = [kind.audit for kind in self.kinds.values() if kind.audit is not None]
        if len(audits) < _ALIKE or not all(audit.obstacles for audit in audits):
            return None
        first = audits[0].obstacles[0]
        places = {(audit.obstacles[0].reason, audit.obstacles[0].file, audit.obstacles[0].line) for audit in audits}
        return first if len(places) == 1 and first.file is not None else None

    def argument_in_state(self, kind: CallKind, recording: CapturedStep, call: StepCall) -> bool:
        """Return whether an argument is part of what the step changes, and was not when the step was recorded."""
        place = recording.of_its_own(call.leaves)
        if place is None:
            return False
        name = self._step.argument(kind.signature.names()[place])
        self._context.reports.say_once(
            f"{self._step.name}: argument {name} is, or is a part of, a parameter, a buffer, a gradient or optimizer "
            "state, and was not when the step was captured: such calls run without a graph. "
            f"Pass a copy, {name}.clone(), or read it inside the step"
        )
        return True

    def look_due(self) -> bool:
        """Count a step; return whether to look at its operations in place of a replay.

        Operations say nothing of a kernel that is wrong: then values are compared in the step after it.
        """
        if not self.check_due():
            return False
        self._looks += 1
        self._owes_values = self._context.progress.tier.other_kernels or self._looks % VALUES_EVERY == 0
        return True

    def values_due(self) -> bool:
        """Return whether to compare values, once the operations were compared."""
        owes, self._owes_values = self._owes_values, False
        return owes

    def check_due(self) -> bool:
        """Count a step; return whether the sentinel is to check it, with the random streams to itself."""
        return self._sentinel is not None and self._sentinel.due() and not another_trains(self._context)

    # -- what a state has done -------------------------------------------------------------------------------------

    @uninterrupted
    def look(self, kind: CallKind, audit: AuditFindings, call: StepCall, tier: Tier) -> Any:
        """Run the call eagerly, and compare its operations with those of its audit: a value may have changed them."""
        watch, step, began = audit.watch, self._step, time.perf_counter()
        assert watch is not None
        changed = watch.changed()
        watch.release()
        step.doing, step.ran = "sentinel", tier.name
        result, stream = self.auditor.run_compared(
            call.run, call.arguments, audit, reports_capturing=kind.path.reports_capturing
        )
        if kind.recording is not None:
            kind.recording.keep_gradients()
        self._looked(time.perf_counter() - began, tier)
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

    def _looked(self, seconds: float, tier: Tier) -> None:
        """Plan the next look."""
        usual = self._context.reports.seconds_of(tier.name)
        if self._sentinel is not None:
            self._sentinel.schedule.checked(max(0.0, seconds - (usual or 0.0)), usual, recorded=True)

    def _drop_stale(self, kind: CallKind, difference: Difference, changed: list[str]) -> None:
        """Drop the recording of a step that does other things now; say so where it was replayed meanwhile."""
        state, done, name = kind.state, self._context.progress.steps, self._step.name
        if not changed and isinstance(state, Proven) and state.replayed:
            place = {"operation": difference.operation, "file": difference.file, "line": difference.line}
            event = ev.StepsStale(
                step=done,
                function=name,
                first_step=state.right_at + 1,
                last_step=done,
                **place,  # type: ignore[arg-type]
            )
            self._context.reports.emit(event)
        because = f"{changed[0]} has changed: " if changed else ""
        self.drop(kind, Change(f"{because}{difference}", hint=_CHANGES))

    def audit(self, kind: CallKind, call: StepCall) -> Any:
        """Run the call eagerly and observe it."""
        told = kind.path.reports_capturing
        sharding = self._context.parts.sharded()
        found = sharding.settings() if sharding.has_run() else None  # a first forward makes some of the settings
        result, audit = self.auditor.audit(call.run, *call.arguments, reports_capturing=told)
        self._note_what_shards_keep()  # before anything is run twice
        keeps = self._unshared or (_LEFT_OTHERWISE if found not in {None, sharding.settings()} else None)
        if keeps is not None and self._context.progress.may_capture:
            self.decline(kind, keeps)
        elif audit is not None and not audit.stopped:
            kind.state = Audited(audit)
        elif audit is not None and audit.asked and not told:
            kind.path.reports_capturing = True  # its other path is audited next
        elif audit is not None and audit.failed is not None:
            self._decline_survey(kind, audit.failed)
        return result

    def _decline_survey(self, kind: CallKind, obstacle: Obstacle) -> None:
        """Decline what steps are on the way to: the survey of the step did not come to its end."""
        tier = self._context.progress.tier
        if tier.other_kernels:
            self._context.reports.failed(self._step, tier.without_graph(), obstacle)
        else:
            self.decline(kind, obstacle)

    @uninterrupted
    def warm_up(self, kind: CallKind, state: Audited | Captured, call: StepCall, tier: Tier) -> Any:
        """Run the call twice, to see how far it is from itself; a recording is judged anew by that."""
        audit = state.audit if isinstance(state, Audited) else state.recorded.audit
        noise = Noise() if isinstance(state, Audited) else state.recorded.noise
        was_noisy = noise.noisy
        try:
            with collector_paused():
                result, obstacle = self._graphs.warm_up(audit, noise, kind.path, call.arguments)
        except CandidateFailedError as error:
            failed = self._rescue.candidate_failed(error, tier)
        else:
            if obstacle is None and audit.watch is not None:
                audit.watch.look()  # counts of averages have moved to the device
            if obstacle is not None:
                self.decline(kind, obstacle)
            elif isinstance(state, Captured):
                state.measures = False
                if noise.noisy and not was_noisy:  # what was past its limits may be noise
                    state.outcomes.clear()
                elif state.outcomes:
                    self._conclude(kind, state, tier)
            else:
                kind.state = Warmed(Recorded(audit, noise, kind.path), Invariants(self._context.holdings))
            return result
        # Out of the except clause, so that what eager raises does not carry our exception along.
        return self._instead(kind, audit, call, tier, failed)

    @uninterrupted
    def prove(self, kind: CallKind, state: Warmed | Captured, call: StepCall, tier: Tier) -> Any:
        """Run the call both ways and compare; capture it first where it is not captured."""
        recorded, share = state.recorded, kind.calls / max(1, self._context.progress.calls)
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
                if self._sentinel is not None:
                    self._sentinel.schedule.begin()
            if changed := recorded.audit.changed():
                self.decline(kind, changes_state(changed[0]))
            else:
                # Without the result, whose graph would tie a later capture to the stream of this step.
                state.outcomes.append(dataclasses.replace(outcome, result=None))
                self._conclude(kind, state, tier)
            return outcome.result
        # Out of the except clause, so that what eager raises does not carry our exception along.
        return self._instead(kind, recorded.audit, call, tier, failed)

    def _conclude(self, kind: CallKind, state: Captured, tier: Tier) -> None:
        """Do what the proof steps so far say of the recording."""
        joined, verdict = judge(state.recorded, state.outcomes)
        if verdict is Verdict.CLOSER:
            state.measures = True
        elif verdict is Verdict.WRONG:
            self._decline_path(kind, wrong_recording(joined))
        elif verdict is Verdict.PROVEN:
            kind.state = Proven(state.recorded, state.recording, self._context.progress.steps + 1)
            if self._sentinel is None and self._context.peers is None:  # else they are compared further on
                state.recording.forget_gradients(self._code.unseen(tier.base))
            self._tell_proven(tier, joined)

    def _tell_proven(self, tier: Tier, joined: Outcome) -> None:
        """Report that a recording agreed in enough steps."""
        self._context.reports.proven(
            self._step, tier, worst=joined.worst, copied_bytes=joined.nbytes, on_host=joined.on_host
        )

    def replay(self, recorded: Recorded, call: StepCall, tier: Tier) -> Any:
        """Run the call by replaying its recording; where that fails, undo it and run it eagerly."""
        recording = recorded.recording
        assert recording is not None
        try:
            recording.save_others()
            self._rescue.save(gradients=bool(recorded.audit.read_gradients), tensors=not recording.atomic)
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

    def check(self, kind: CallKind, recorded: Recorded, call: StepCall, tier: Tier) -> Any:
        """Run the call both ways and compare, for the sentinel; where there is no memory for that, only replay it."""
        return self._compare(
            recorded,
            call,
            tier,
            unchecked=lambda: self.replay(recorded, call, tier),
            failed=lambda obstacle: self._instead(kind, recorded.audit, call, tier, obstacle),
        )

    def _instead(self, kind: CallKind, audit: AuditFindings, call: StepCall, tier: Tier, obstacle: Obstacle) -> Any:
        """Run a call without the graph that failed; what it raises as well is the user's own, and declines nothing."""
        kind.state = Audited(audit)
        result = self.uncaptured(kind, call, tier)
        if self._step.doing != "undone":  # else the compiled code is at fault, and another graph is made without it
            self._decline_path(kind, obstacle)
        return result

    def prove_again(self) -> None:
        """Measure the noise of every recorded kind of call anew, and prove its recording: a check found one wrong."""
        for kind in self.kinds.values():
            if isinstance(kind.state, Proven):
                kind.state = kind.state.again()

    def decline_recordings(self, obstacle: Obstacle) -> None:
        """Decline every kind of call that has a recording: the sentinel found one wrong."""
        for kind in [kind for kind in self.kinds.values() if kind.recording is not None]:
            self.decline(kind, obstacle)

    def _decline_path(self, kind: CallKind, obstacle: Obstacle) -> None:
        """Decline a recording for what was seen of it, unless code of the step has another path for a capture."""
        if not kind.takes_other_path():
            self.decline(kind, obstacle)

    def decline(self, kind: CallKind, obstacle: Obstacle) -> None:
        """Never capture calls of this kind."""
        kind.state = Declined(obstacle, kind.audit)
        self._context.reports.kind_declined(
            self._step, dataclasses.replace(self._context.progress.tier, graph=True), obstacle
        )

    def drop(self, kind: CallKind, change: Change) -> None:
        """Forget a recording that no longer fits the program; decline the kind where that happens too often."""
        step, what, recorded = self._context.progress.steps, change.what, kind.recording is not None
        reasons = kind.drop(step, what)
        self._rescue.look_again()
        if recorded:
            self._context.reports.emit(ev.CaptureDropped(step=step, function=self._step.name, reason=what))
        if not reasons:
            return
        if change.optimizer is None:
            what = f"what a recording holds changes again and again: {'; '.join(reasons)}"
            self.decline(kind, Obstacle(what, change.hint))
        elif change.optimizer not in self._optimizers.outside:  # else another kind of call has moved it out already
            self._optimizers.run_outside(change.optimizer, f"{what} changes again and again")
