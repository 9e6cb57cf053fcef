"""Proofs of recordings: a step is warmed up, captured, and run both ways until its recording is known to be right."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop.errors import StepLostError
from hotloop.measure import Limits, StepClock, flatten
from hotloop.step.audit.averaged_model import move_counts
from hotloop.step.capture.recording import capture, prepare, recorded_kernels
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove import proof
from hotloop.step.prove.code_proofs import remedy_of
from hotloop.step.prove.outcomes import verdict
from hotloop.step.prove.rounding_evidence import differs_by_chance, repeats_elsewhere
from hotloop.step.ranks.together import Together
from hotloop.step.ranks.votes import About
from hotloop.step.state.streams import Streams
from hotloop.step.state.trial_run import alone, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from hotloop.measure import Difference
    from hotloop.step.audit.findings import AuditFindings
    from hotloop.step.capture.optimizers import RecordedOptimizers
    from hotloop.step.capture.recording import CapturedStep
    from hotloop.step.context import DecoratedStep
    from hotloop.step.prove.noise import Noise
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.prove.reference_runs import ReferenceRuns
    from hotloop.step.state.program import Call
    from hotloop.step.tiers import Tier

_LEFT_OUT = (
    "That only decides whether to raise, so a recording leaves it out; proofs and the steps that the sentinel checks "
    "do it"
)
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
        reports_capturing: the answer that such code gets. By default False, so that a recording follows eager's path;
            True where eager's path cannot be captured, or compiled code has taken the other path.
        compared: the reference takes the path of the capture too, since other random numbers are drawn there.
        streams: the random streams that the step drew from when it last ran on this path; None before that.
    """

    reports_capturing: bool = False
    compared: bool = False
    streams: Streams | None = None

    def watched(self, device: torch.device, run: Callable[[], Any]) -> Any:
        """Run the step, and note which random streams it draws from."""
        self.streams = Streams(device)
        with self.streams.watching():
            return run()


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

    @property
    def updated(self) -> set[str]:
        """The parameters to judge a recording by with its own gradients, since those differ from run to run."""
        return self.audit.updated if self.noise.noisy else set()

    def drop(self) -> None:
        """Let go of the recording, and of its memory before an eager step takes some."""
        if self.recording is not None:
            self.recording.release()
        self.recording = None

    def keep_gradients(self) -> None:
        """After a step that ran eagerly, copy its gradients to where a replay leaves them."""
        if self.recording is not None:
            self.recording.keep_gradients()


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
        self._ready = alone if step.context.peers is None else Together(step.context.peers)
        self._clock = StepClock(self._program.device)
        self.seconds: float | None = None
        self._replay_seconds: float | None = None
        self._reference_seconds = 0.0
        """The seconds of the replay and of the reference in the last proof step."""

    def warm_up(
        self, audit: AuditFindings, noise: Noise, path: CapturePath, call: Call, earlier: dict[str, Difference] | None
    ) -> tuple[Any, Obstacle | None, bool]:
        """Run a step twice, the first time on the path of the capture and undone; their difference is noise.

        These runs also set up libraries and lazy code, outside of the capture.

        Args:
            audit: the audit of the step.
            noise: the noise measured so far, to which the difference is added.
            path: the path that the step will be captured on.
            call: the step's arguments.
            earlier: the noise that earlier runs of this program measured.

        Returns:
            The step's result; the obstacle to a capture; and whether the noise was measured.

        Raises:
            CandidateFailedError: the first run failed; the state is as before.
        """
        step, began = self._step, time.perf_counter()
        step.doing = "proof"
        # Not with the optimizers' counts, before a capture: what is in the place of what, the loop looks at after this.
        move_counts(self._program.holdings.modules, self._program.device)
        run = functools.partial(step.program.step, *call[0], **call[1])
        watched = functools.partial(path.watched, step.program.device, run)
        on_path = functools.partial(self._runs.on_capture_path, watched, reports_capturing=path.reports_capturing)
        once = functools.partial(self.by_recorded_kernels, audit, on_path)
        again = functools.partial(self.reference, path, run)
        most = self._runs.limits_of_repeats(recorded_kernels=audit.computes_on)
        try:
            result, spread = proof.spread_of(self._program, once, again, most, self._ready)
        except (CandidateFailedError, StepLostError):
            raise
        except Exception:  # the user's own, of the run that stays
            self._all_compare_paths(False)
            raise
        by_chance = False
        if isinstance(spread, proof.Unlike):
            by_chance = audit.random_operations > 0
            spread = spread.spread if repeats_elsewhere(self._runs, spread, once, again, most) else spread.why
        other = path.reports_capturing and not path.compared and by_chance and isinstance(spread, str)
        other = self._all_compare_paths(other) and differs_by_chance(self._runs, call)
        if isinstance(spread, str):
            # On the path of a capture, transformers' masks choose another attention kernel, which draws other dropout
            # masks. Then the reference takes that path too, and the next call has to repeat itself there.
            path.compared = True
            return result, None if other else _does_not_repeat(audit, spread), False
        if path.compared:
            line = f"{step.name}: takes another path while it is captured, and is compared with that one"
            self._context.reports.say_once(line)
        noise.note(spread, earlier)
        self._context.reports.proof_took((time.perf_counter() - began) / 2)
        return result, None, True

    def _all_compare_paths(self, wanted: bool) -> bool:
        """Return whether all processes are to compare the paths of the step, each of which votes on that."""
        peers = self._context.peers
        if peers is None or not peers.made_all():  # else the others wait in a collective, as they would without a loop
            return wanted
        found = peers.lowest(About.PATH, wanted)
        return found is not None and bool(found[0])

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
        reference = functools.partial(self._context.reports.timed_beside, tier.without_graph(), on_side)
        self._step.doing = "capture" if recorded.recording is None else "proof"
        if recorded.recording is None:
            prepare(self._program, recorded.audit, self._optimizers.outside_of(recorded.audit.stepped))
        outcome = proof.prove_step(
            self._program,
            functools.partial(self.candidate, recorded, call),
            functools.partial(self._timed, reference),
            Limits.rounding(),
            spread=recorded.noise.spread,
            updated=recorded.updated,
            ready=self._ready,
        )
        for timing in self._clock.take():
            self._replay_seconds = timing.seconds
        if self._replay_seconds is not None:
            saved = max(0.0, self._reference_seconds - self._replay_seconds)
            self._context.reports.proof_saves(saved * share, tier.without_graph().name)
        recorded.keep_gradients()
        self.seconds = time.perf_counter() - began
        self._context.reports.proof_took(self.seconds, outcome.nbytes)
        return outcome

    def _timed(self, run: proof.Run) -> Any:
        """Run the reference of a proof from an idle device to an idle device."""
        wait_for(self._program.device)
        began = time.perf_counter()
        result = run()
        wait_for(self._program.device)
        self._reference_seconds = time.perf_counter() - began
        return result

    def conclude(self, outcomes: list[Outcome], noise: Noise) -> tuple[Outcome, bool | Obstacle | None]:
        """Judge the proof steps so far, with room for the step's noise.

        Returns:
            the joined outcome; and True if the recording is proven, an obstacle if it is wrong, False if the noise has
            to be measured again, None if more proof steps are needed.
        """
        joined = verdict(outcomes, noise.spread)
        enough = len(outcomes) >= proof.STEPS
        if joined.agrees and enough:
            return joined, True
        if joined.agrees or (noise.noisy and joined.may_be_noise and not enough):
            return joined, None  # noise does not persist, so later steps decide
        if joined.may_be_noise and noise.measurable:
            line = f"{self._step.name}: how far it is from itself is measured again: {joined.why}"
            self._context.reports.decided(line, {})
            return joined, False
        reason = f"a captured step does not agree with the step itself: {joined.why}"
        return joined, Obstacle(reason, remedy_of(joined))

    def reference(self, path: CapturePath, run: Callable[[], Any]) -> Any:
        """Run a step as it is; or on the path of a capture, if other random numbers are drawn there."""
        if path.compared:
            return self._runs.on_capture_path(run, reports_capturing=path.reports_capturing)
        return self._runs.on_capture_stream(run)

    def by_recorded_kernels(self, audit: AuditFindings, run: proof.Run) -> Any:
        """Run a step that computes on with what its optimizers have stepped by the optimizer kernels of a recording.

        These kernels round differently from eager's. What a GAN's second network computes with the first one's new
        parameters differs by that: by rounding, magnified. Nothing but a run shows by how much, so it counts as noise.
        """
        if not audit.computes_on:
            return run()
        with recorded_kernels(self._program, audit, self._optimizers.outside_of(audit.stepped)):
            return run()

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
        if checks := "; ".join(map(str, recorded.audit.checks)):
            self._context.reports.say_once(f"{self._step.name}: {checks}. {_LEFT_OUT}", logging.WARNING)
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
