"""Whether a recording of a step is the step: it is warmed up, captured, and run both ways until that is known."""

from __future__ import annotations

import dataclasses
import functools
import time
from typing import TYPE_CHECKING, Any

from hotloop import events as ev
from hotloop._torch.deterministic import without_randomness
from hotloop.compiling.fallback.causes import describe
from hotloop.measure import Limits, StepClock, flatten
from hotloop.step.capture.invariants import Invariants
from hotloop.step.capture.recording import capture, own_autocast_cache, prepare
from hotloop.step.engine import collector_paused
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.prove import proof
from hotloop.step.prove.code_proofs import remedy_of
from hotloop.step.prove.outcomes import verdict
from hotloop.step.prove.proof import plain_run, prove_step
from hotloop.step.prove.rounding_evidence import repeats_elsewhere
from hotloop.step.prove.step_outputs import StepOutputs
from hotloop.step.state.trial_run import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from hotloop.step.calls.call_kind import Variant
    from hotloop.step.capture.recording import CapturedStep
    from hotloop.step.loop.runner import Runner
    from hotloop.step.prove.outcomes import Outcome
    from hotloop.step.tiers import Tier

_REPEAT_IT = "draw from torch's own generators, and read clocks and files outside of the step"


class GraphProofs:
    """Captures the calls of one runner's step, and proves each recording against the step that was recorded."""

    def __init__(self, runner: Runner) -> None:
        self._runner, self._loop = runner, runner.loop
        self._program, self._name = runner.program, runner.name
        self._clock = StepClock(self._program.device)
        self._replay_seconds: float | None = None
        self._reference_seconds = 0.0
        """Of the last proof step, what a replay took, and what it was held against."""

    @collector_paused()
    def prove(
        self, variant: Variant, run: Callable[[], Any], tier: Tier, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the step without a graph and captured, and compare."""
        assert variant.seen is not None
        if obstacles := self._runner.looking.moved_outside(args, kwargs):
            self._runner.decline(variant, obstacles[0])
            return self._runner.uncaptured(variant, run, tier)
        if variant.captured is None and not self._runner.looking.is_of_now(variant.seen):
            variant.forget()
            return self._runner.looking.survey(variant, run, args, kwargs)
        engine = self._loop.engine
        assert engine is not None
        began = time.perf_counter()
        self._clock.take()  # of replays that the sentinel has compared
        on_side = functools.partial(self.reference, variant, run)
        reference = functools.partial(self._loop.stepping.beside, tier.without_graph(), on_side)
        obstacle: Obstacle | None = None
        try:
            if variant.spread is None:  # on the way of the capture, so that libraries and lazy code are set up there
                self._runner.kind = "proof"
                return self._warm_up(variant, run)
            if variant.captured is None:
                prepare(self._program, variant.seen, self._loop.recorded.outside_of(variant.seen.stepped))
            candidate = functools.partial(self.candidate, variant, variant.captured, args, kwargs)
            self._runner.kind = "capture" if variant.captured is None else "proof"
            timed = functools.partial(self._timed, reference)
            outcome = prove_step(
                self._program, candidate, timed, Limits.rounding(), spread=variant.spread, updated=variant.updated
            )
        except CandidateFailedError as error:
            obstacle = self._runner.rescue.candidate_failed(error, tier)
        if obstacle is not None:
            return self._runner.instead(variant, run, tier, obstacle)
        for timing in self._clock.take():
            self._replay_seconds = timing.seconds
        if self._replay_seconds is not None:
            saved = max(0.0, self._reference_seconds - self._replay_seconds)
            self._loop.replay_saves(saved * variant.calls / max(1, self._loop.calls))
        if variant.captured is not None:
            variant.captured.keep_gradients()
        self._loop.proof_costs(time.perf_counter() - began, outcome)
        self._judge(variant, outcome)
        return outcome.result

    def _timed(self, run: proof.Run) -> Any:
        """Run the reference of a proof from an idle device to an idle device."""
        wait_for(self._program.device)
        began = time.perf_counter()
        found = run()
        wait_for(self._program.device)
        self._reference_seconds = time.perf_counter() - began
        return found

    def _judge(self, variant: Variant, outcome: Outcome) -> None:
        """Say what a proof step means for the recording."""
        if changed := self._runner.looking.changed_inside():
            self._runner.decline(variant, changed[0])
            return
        # Without its result, whose graph would tie a later capture to the stream of this step.
        variant.outcomes.append(dataclasses.replace(outcome, result=None))
        self._conclude(variant)

    def _conclude(self, variant: Variant) -> None:
        """Say what the proof steps so far mean, by what is known of the step's own spread."""
        assert variant.spread is not None
        joined = verdict(variant.outcomes, variant.spread)
        enough = len(variant.outcomes) >= proof.STEPS
        if joined.agrees and enough:
            self._accept(variant, joined)
        elif joined.agrees or (variant.noisy and joined.may_be_noise and not enough):
            return  # noise does not stay: the steps to come tell
        elif joined.may_be_noise and variant.measure_again():
            self._loop.decided(f"{self._name}: how far it is from itself is measured again: {joined.why}", {})
        else:
            reason = f"a captured step does not agree with the step itself: {joined.why}"
            self._runner.decline_path(variant, Obstacle(reason, remedy_of(joined)))

    def _warm_up(self, variant: Variant, run: Callable[[], Any]) -> Any:
        """Run the step as it is, undo it, and run it on the path of a capture; how far apart the two are is noise."""
        began = time.perf_counter()
        most = self.limits_of_repeats()
        again = functools.partial(self.reference, variant, run)
        once = functools.partial(self._on_path, run, reports_capturing=variant.reports_capturing)
        result, spread = proof.spread_of(self._program, once, again, most)
        by_chance = False
        if isinstance(spread, proof.Unlike):
            assert variant.seen is not None
            by_chance = variant.seen.random_operations > 0
            spread = spread.spread if repeats_elsewhere(self._runner, spread, once, again) else spread.why
        if isinstance(spread, str):
            if not variant.reports_capturing or variant.own_path or not by_chance or not self.differs_by_chance(run):
                self._runner.decline(variant, Obstacle(spread, _REPEAT_IT))
            # transformers' masks choose another attention kernel there, say, with dropout masks of its own. Then the
            # reference is the step on that path: next time it has to repeat itself there.
            variant.own_path = True
            variant.outcomes.clear()
            return result
        if variant.own_path:
            self._loop.say_once(f"{self._name}: takes another path while it is captured, and is compared with that one")
        auto = self._loop.auto
        variant.note_spread(spread, auto.earlier.spread(self._name) if auto is not None else None)
        variant.standing = Invariants(self._program.holdings)
        self._loop.proof_costs((time.perf_counter() - began) / 2)
        assert variant.seen is not None
        self._runner.looking.note(variant.seen)
        if variant.outcomes:
            self._conclude(variant)
        return result

    def limits_of_repeats(self) -> Limits:
        """Give how far a step may be from itself: beyond that it draws on something that nobody put back.

        cuDNN's convolutions are in TF32 by default, whatever matrix products are in; and a kernel that is not
        deterministic makes of one other rounding there as much as an honest compile makes.
        """
        compute = self._loop.surveyed.compute_dtype()
        return Limits.compiled("tf32" if compute == "float32" and self._program.device.type == "cuda" else compute)

    def differs_by_chance(self, run: Callable[[], Any]) -> bool:
        """Tell whether the step on the path of a capture is the same but for the random numbers that it draws."""

        def on_path() -> Any:
            with without_randomness(), self._loop.eager():
                return self._on_path(run, reports_capturing=True)

        def plain() -> Any:
            with without_randomness(), self._loop.eager():
                return self.on_stream_of_recordings(run)

        try:
            made = StepOutputs.of(self._program, plain)
            held = made.compare_run(self._program, on_path, Limits.compiled(self._loop.surveyed.compute_dtype()))
        except CandidateFailedError as error:
            if not error.undone:
                raise
            return False
        except Exception as error:  # noqa: BLE001 - a comparison that fails shows nothing, and ends no run
            self._loop.say_once(f"{self._name}: the two paths of the step could not be compared: {describe(error)}")
            return False
        return all(one.agrees for one in held.values())

    def reference(self, variant: Variant, run: Callable[[], Any]) -> Any:
        """Run a step as it is, on the path of a capture only where it draws other random numbers there."""
        if variant.own_path:
            return self._on_path(run, reports_capturing=variant.reports_capturing)
        return self.on_stream_of_recordings(run)

    def _on_path(self, run: Callable[[], Any], *, reports_capturing: bool) -> Any:
        """Run a step on the path of a recording: code that asks whether it is captured hears the same."""
        engine = self._loop.engine
        assert engine is not None
        on_path = engine.ambience(self._program.device, reports_capturing=reports_capturing)
        with on_path, own_autocast_cache(compiled=self._program.compiled()):
            return plain_run(self._program.holdings, run, as_left=True)

    def on_stream_of_recordings(self, run: Callable[[], Any]) -> tuple[Any, Mapping[str, torch.Tensor]]:
        """Run a step as it is; what lives on of its graph must not tie a later capture to another stream."""
        engine = self._loop.engine
        assert engine is not None
        with engine.reference_stream(self._program.device):
            return plain_run(self._program.holdings, run, as_left=True)

    def candidate(self, variant: Variant, captured: CapturedStep | None, args: Any, kwargs: Any) -> Any:
        """Replay a recording; where there is none, capture the step, whose first replay is the step."""
        began = time.perf_counter()
        if captured is not None:
            mark = self._clock.start(alone=True)  # behind the copies of the state
            try:
                result = captured.replay(flatten((args, kwargs))[0])
            except BaseException:
                self._clock.cancel(mark)
                raise
            self._clock.stop(mark)  # what the replay has made is named while the device is still at it
            return result, captured.gradients_at_step
        engine = self._loop.engine
        assert engine is not None
        assert variant.seen is not None
        outside = self._loop.recorded.outside_of(variant.seen.stepped)
        told = variant.reports_capturing
        captured, result = capture(self._program, engine, variant.seen, outside, (args, kwargs), reports_capturing=told)
        variant.captured = captured
        self._replay_seconds = captured.first_seconds
        self._loop.emit(
            ev.Captured(
                step=self._loop.steps,
                function=self._name,
                seconds=time.perf_counter() - began,
                operations=variant.seen.operations,
                outside=tuple(outside),
            )
        )
        return result, captured.gradients_at_step

    def _accept(self, variant: Variant, outcome: Outcome) -> None:
        assert variant.captured is not None
        variant.proven = True
        variant.outcomes.clear()
        if self._runner.sentinel is None:  # else it compares them
            variant.captured.forget_gradients()
        self._loop.course.accepted(self._runner, outcome)
