"""Proofs of recordings: a step is warmed up, captured, and run both ways until its recording is known to be right."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.measure import Limits, StepClock, flatten
from hotloop.step.audit.averaged_model import move_counts
from hotloop.step.capture.recording import capture, prepare
from hotloop.step.obstacle import Obstacle
from hotloop.step.prove import proof
from hotloop.step.prove.code_proofs import remedy_of
from hotloop.step.prove.outcomes import STEPS, Verdict, over_steps, verdict
from hotloop.step.state.streams import Streams
from hotloop.step.state.trial_run import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from hotloop.measure import Difference
    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.capture.optimizers import RecordedOptimizers
    from hotloop.step.capture.recording import CapturedStep
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.state.program import Call
    from hotloop.step.tiers import Tier

_APART = (
    "write dropout between layers as modules: nn.LSTM(...), nn.Dropout(p), nn.LSTM(...), each of one layer, instead of "
    "nn.LSTM(..., num_layers=n, dropout=p)"
)
_REPEAT_IT = "draw from torch's own generators, and read clocks and files outside of the step"


def _does_not_repeat(audit: AuditFindings, why: str) -> Obstacle:
    """Return the obstacle of a step that differs from itself; with the line of an RNN's dropout, which may be why."""
    if audit.drops_in_rnn is None:
        return Obstacle(why, _REPEAT_IT)
    reason = f"{why}; an RNN drops between its layers, by a random state of cuDNN's"
    return Obstacle(reason, _APART, *audit.drops_in_rnn)


@dataclasses.dataclass
class CapturePath:
    """The path of code in the step that asks whether a capture is going on.

    Args:
        reports_capturing: the answer that such code gets, in the recording and in its reference. By default False, so
            that a recording follows eager's path; True where eager's path cannot be captured, or compiled code has
            taken the other path.
        streams: the random streams that the step drew from when it last ran on this path; None before that.
    """

    reports_capturing: bool = False
    streams: Streams | None = None

    def watched(self, device: torch.device, run: Callable[[], Any]) -> Any:
        """Run the step, and note which random streams it draws from."""
        self.streams = Streams(device)
        with self.streams.watching():
            return run()


class Noise:
    """How far two runs of one step from one state were apart: the room that proofs of a recording leave.

    Attributes:
        spread: by tensor, the larger of the differences that were measured.
        measured: how often it was measured, at most twice: kernels that are not deterministic differ in some steps and
            not in others, and a step may repeat itself by luck.
    """

    def __init__(self) -> None:
        self.spread: dict[str, Difference] = {}
        self.measured = 0

    def note(self, found: Mapping[str, Difference]) -> None:
        """Add the differences of two runs, by tensor."""
        self.measured += 1
        for name, difference in found.items():
            before = self.spread.get(name, difference)
            furthest = max(before, difference, key=lambda one: one.rms_difference)
            relative = [one.relative for one in (before, difference) if one.relative is not None]
            self.spread[name] = dataclasses.replace(furthest, relative=max(relative, default=None))

    @property
    def noisy(self) -> bool:
        """Whether two runs differed."""
        return any(difference.rms_difference > 0 for difference in self.spread.values())

    @property
    def measurable(self) -> bool:
        """Whether a further measurement may show more noise."""
        return self.measured < 2  # noqa: PLR2004 - see `measured`


@dataclasses.dataclass
class Recorded:
    """A step that may be captured, or is: its audit, noise and recording.

    Args:
        audit: the findings of an eager run of the step.
        noise: how far the step is from itself.
        path: the path that it is captured on.
        recording: the captured step; None before the capture.
    """

    audit: AuditFindings
    noise: Noise
    path: CapturePath
    recording: CapturedStep | None = None

    def drop(self) -> None:
        """Let go of the recording, and of its memory before an eager step takes some."""
        if self.recording is not None:
            self.recording.release()
        self.recording = None

    def keep_gradients(self) -> None:
        """After a step that ran eagerly, copy its gradients to where a replay leaves them."""
        if self.recording is not None:
            self.recording.keep_gradients()


def judge(recorded: Recorded, outcomes: Sequence[Outcome]) -> tuple[Outcome, Verdict]:
    """Judge a recording by its proof steps, one or more, with room for the step's noise; return the joined outcome."""
    noise, enough = recorded.noise, len(outcomes) >= STEPS
    joined = over_steps(outcomes) if recorded.audit.computes_on else verdict(outcomes, noise.spread)
    if joined.agrees:
        return joined, Verdict.PROVEN if enough else Verdict.MORE
    if joined.may_be_noise and noise.noisy and not enough:
        return joined, Verdict.MORE  # noise does not persist, so later steps decide
    return joined, Verdict.CLOSER if joined.may_be_noise and noise.measurable else Verdict.WRONG


def wrong_recording(joined: Outcome) -> Obstacle:
    """Return the obstacle that a recording does not agree with what it recorded."""
    return Obstacle(f"a captured step does not agree with the step itself: {joined.why}", remedy_of(joined))


class GraphProofs:
    """The captures of one decorated step, and the proofs of each recording against the step that was recorded.

    Args:
        step: the decorated step.
        runs: its reference runs.
        optimizers: which optimizers run outside of recordings.

    Attributes:
        seconds: what the last proof step took; None where there was none.
    """

    def __init__(self, step: DecoratedStep, runs: ReferenceRuns, optimizers: RecordedOptimizers) -> None:
        self._step, self._context, self._program = step, step.context, step.program
        self._runs, self._optimizers = runs, optimizers
        self._ready = step.context.peers.ready
        self._clock = StepClock(self._program.device)
        self.seconds: float | None = None
        self._replay_seconds: float | None = None
        self._reference_seconds = 0.0
        """The seconds of the replay and of the reference in the last proof step."""

    def warm_up(self, audit: AuditFindings, noise: Noise, path: CapturePath, call: Call) -> tuple[Any, Obstacle | None]:
        """Run a step twice, the first time undone; their difference is noise.

        These runs also set up libraries and lazy code, outside of the capture.

        Args:
            audit: the audit of the step.
            noise: the noise measured so far, to which the difference is added.
            path: the path that the step will be captured on.
            call: the step's arguments.

        Returns:
            The step's result; and the obstacle to a capture.

        Raises:
            CandidateFailedError: the first run failed; the state is as before.
        """
        began = time.perf_counter()
        self._step.doing = "proof"
        # Not with the optimizers' counts, before a capture: what is in the place of what, the loop looks at after this.
        move_counts(self._program.holdings.modules, self._program.device)
        run = functools.partial(self._program.step, *call[0], **call[1])
        watched = functools.partial(path.watched, self._program.device, run)
        once = functools.partial(self._runs.on_capture_path, watched, reports_capturing=path.reports_capturing)
        again = functools.partial(self.reference, path, run)
        result, spread = proof.spread_of(self._program, once, again, self._runs.limits_of_repeats(), self._ready)
        if isinstance(spread, str):
            return result, _does_not_repeat(audit, spread)
        noise.note(spread)
        self._context.reports.proof_took((time.perf_counter() - began) / 2)
        return result, None

    @property
    def replay_seconds(self) -> float | None:
        """The seconds that the last replay of a proof took; None before the first."""
        return self._replay_seconds

    def prove(self, recorded: Recorded, call: Call, tier: Tier, share: float) -> Outcome:
        """Run the step captured and without a graph, and compare; the first time, capture it.

        Args:
            recorded: the step, to which the recording is added.
            call: the step's arguments.
            tier: the captured tier.
            share: the share of all calls of the loop that this recording would replay.

        Returns:
            the outcome of the proof step, with the step's result.

        Raises:
            CandidateFailedError: the capture or the replay failed; the state is as before.
        """
        began = time.perf_counter()
        self._clock.take()  # of replays that the sentinel has compared
        run = functools.partial(self._program.step, *call[0], **call[1])
        on_side = functools.partial(self.reference, recorded.path, run)
        reference = functools.partial(
            self._context.reports.timed_beside, tier.without_graph(), on_side, self._step.call
        )
        self._step.doing = "capture" if recorded.recording is None else "proof"
        if recorded.recording is None:
            prepare(self._program, recorded.audit, self._optimizers.outside_of(recorded.audit.stepped))
        outcome = self.compare(recorded, call, functools.partial(self._timed, reference))
        for timing in self._clock.take():
            self._replay_seconds = timing.seconds
        if self._replay_seconds is not None:
            saved = max(0.0, self._reference_seconds - self._replay_seconds)
            self._context.reports.proof_saves(saved * share, tier.without_graph().name)
        self.seconds = time.perf_counter() - began
        self._context.reports.proof_took(self.seconds, outcome.nbytes)
        return outcome

    def compare(self, recorded: Recorded, call: Call, reference: proof.Run) -> Outcome:
        """Run a recording and what it recorded, and compare; without a recording, the step is captured first.

        Raises:
            CandidateFailedError: the capture or the replay failed; the state is as before.
        """
        audit = recorded.audit

        def own_steps(theirs: proof.Values) -> dict[str, Difference]:
            assert recorded.recording is not None
            inside = [one.optimizer for one in recorded.recording.recorded.values()]
            return proof.beside_own_gradients(self._program, inside, audit.updated, theirs)

        compiled = Limits.compiled(self._context.compute_dtype())
        outcome = proof.prove_step(
            self._program,
            functools.partial(self.candidate, recorded, call),
            reference,
            # The kernels of recorded optimizers round differently, which what computes on with it magnifies.
            compiled if audit.computes_on else Limits.rounding(),
            spread=recorded.noise.spread,
            own_steps=own_steps,
            ready=self._ready,
        )
        recorded.keep_gradients()
        return outcome

    def _timed(self, run: proof.Run) -> Any:
        """Run the reference of a proof from an idle device to an idle device."""
        wait_for(self._program.device)
        began = time.perf_counter()
        result = run()
        wait_for(self._program.device)
        self._reference_seconds = time.perf_counter() - began
        return result

    def reference(self, path: CapturePath, run: Callable[[], Any]) -> Any:
        """Run a step as it is, on the path of its recording."""
        if path.reports_capturing:
            return self._runs.on_capture_path(run, reports_capturing=True)
        return self._runs.on_capture_stream(run)

    def candidate(self, recorded: Recorded, call: Call) -> tuple[Any, Mapping[str, Any]]:
        """Replay a recording; without a recording, capture the step, whose first replay is the step."""
        began = time.perf_counter()
        if recorded.recording is not None:
            mark = self._clock.start(alone=True)  # after the copies of the state
            try:
                result = recorded.recording.replay(flatten(call)[0])
            except BaseException:
                self._clock.cancel(mark)
                raise
            self._clock.stop(mark)  # the proof names the values while the device still computes them
            return result, recorded.recording.read_gradients()
        engine = self._context.engine
        assert engine is not None
        assert recorded.path.streams is not None
        outside = self._optimizers.outside_of(recorded.audit.stepped)
        recording, result = capture(
            self._program,
            engine,
            recorded.audit,
            outside,
            call,
            streams=recorded.path.streams,
            reports_capturing=recorded.path.reports_capturing,
            ready=self._ready,
        )
        recorded.recording = recording
        self._replay_seconds = recording.first_seconds
        self._context.reports.emit(
            ev.Captured(
                step=self._context.progress.steps,
                function=self._step.name,
                seconds=time.perf_counter() - began,
                operations=recorded.audit.operations,
                outside=tuple(outside),
            )
        )
        return result, recording.read_gradients()
