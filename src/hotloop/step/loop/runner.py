"""Runs one decorated step, call by call, in the tier that its loop aims at: surveys, proves, replays, undoes."""

from __future__ import annotations

import collections
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop.compiling.control import between_steps
from hotloop.compiling.fallback.causes import describe
from hotloop.measure import flatten
from hotloop.step.audit.auditor import GRADIENTS_OF_ARGUMENTS, Looking
from hotloop.step.calls.aliasing import Aliasing
from hotloop.step.calls.call_kind import Keys, Variant
from hotloop.step.calls.shapes import Shapes
from hotloop.step.calls.unstable_arguments import UnstableArguments
from hotloop.step.capture.invariants import Change
from hotloop.step.loop.rescue import Rescue, is_compiled_codes
from hotloop.step.obstacle import CandidateFailedError, Obstacle
from hotloop.step.policy.lookahead import worth_a_compile
from hotloop.step.prove.code_proofs import CodeProofs
from hotloop.step.prove.graph_proofs import GraphProofs
from hotloop.step.prove.proof import plain_run
from hotloop.step.prove.sentinel import Sentinel
from hotloop.step.ranks.protocol import Together
from hotloop.step.ranks.threads import WAITS, another_trains
from hotloop.step.state.program import Program
from hotloop.step.tiers import Tier

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Hashable

    from hotloop.measure import Signature
    from hotloop.step.capture.recording import CapturedStep
    from hotloop.step.loop.loop import Loop
    from hotloop.step.prove.proof import Run
    from hotloop.step.state.program import Call

VARIANTS = 8
"""Recordings of one step, at most: each holds memory."""
SURVEYS = 2
"""Looks at a step before it is taken for one whose Python must run exactly once."""
_COMES_BACK = 4
"""Calls for each kind there is after which one that has not come again is not waited for."""
_KEYS = 256
"""Keys that are remembered, at most."""
_ALIKE = 3
"""Kinds of calls that one line keeps from being captured, after which it is taken to do so in every kind."""


class Runner:
    """One decorated step of a loop."""

    def __init__(self, loop: Loop, step: Callable[..., Any]) -> None:
        self.loop, self.step = loop, step
        self.name = getattr(step, "__name__", type(step).__name__)
        self.program = Program(step, loop.holdings, loop.device, loop.runs_compiled, loop.ignored(self))
        self._variants: dict[str, dict[Hashable, Variant]] = collections.defaultdict(dict)
        """By base, since a recording holds the code that it was made of; then by key."""
        self._keys = Keys(loop.parameters, loop.modules)
        self.rescue, self.looking = Rescue(loop, self), Looking(loop, self, self.program)
        self.code, self.graphs = CodeProofs(self), GraphProofs(self)
        self.shapes = Shapes(step, functools.partial(worth_a_compile, loop))
        self._fresh = UnstableArguments(self.shapes.argument)
        self._surveys = self._calls = 0
        self.sentinel = Sentinel(loop, self, loop.sentinel) if loop.sentinel else None
        self.together = Together(self, loop.peers) if loop.peers is not None else None
        self.once: Obstacle | None = None
        """Why the step's Python must run exactly once: found by a survey or a proof."""
        self.held: weakref.ref[Any] | None = None
        """What the user holds of it: with that, nobody can call the step any more."""
        self.kind, self.ran = "run", loop.given
        """What the last call was (``run``, ``survey``, ``proof``, ``capture``, ``sentinel``, ``undone``); its tier."""

    # -- one call --------------------------------------------------------------------------------------------------

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tier: Tier) -> Any:
        """Run the step once, in a tier or on the way to it; gives the step's result."""
        self.kind, self.ran = "run", tier.name
        self.shapes.mark(args, kwargs)
        run = functools.partial(self.step, *args, **kwargs)
        if self.together is not None:
            return self.together.run(run, tier, self.shapes.note(args, kwargs), (args, kwargs))
        unproven = tier.compiles and not self.code.proven(tier.base)
        if not tier.compiles and not tier.graph:
            return self._guarded(run, tier)
        inputs = self.shapes.note(args, kwargs)
        if not self.shapes.fits(inputs):
            self.loop.compiled.static = False
            self.loop.say_once(f"{self.name} is not called with the batches that were looked at: their shapes count")
        if tier.compiles and inputs.require_gradients():
            self.loop.course.failed(tier.without_graph(), GRADIENTS_OF_ARGUMENTS, self)
            return self.eagerly(run)
        if not tier.graph and not unproven:
            return self._compiled(run, tier, inputs)
        apart = Aliasing.of(leaves := flatten((args, kwargs))[0])
        variant = self._variant(inputs, apart)
        self._calls += 1
        variant.calls, variant.called = variant.calls + 1, self._calls
        if self.loop.may_capture and variant.declined is None:
            obstacle = self._fresh.obstacle(inputs, apart, new=variant.calls == 1)
            if obstacle is not None:
                self.decline(variant, obstacle)
        if unproven:
            return self._towards_base(variant, run, args, kwargs, tier)
        return self._with_graph(variant, run, leaves, tier)

    def _towards_base(
        self, variant: Variant, run: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any], tier: Tier
    ) -> Any:
        """A step on the way to compiled code that is proven: looked at first, then run both ways."""
        if self._waits_for_others():
            return self.eagerly(run)
        if self._surveys < SURVEYS and (not self._surveys or self.once is not None or (tier.graph and self._hindered)):
            # What the first call of all sets up (transformers notes the kind of task in its config, an average begins
            # with a copy) is found once.
            self._surveys, self.once = self._surveys + 1, None
            for one in self.variants.values():
                one.seen = None
            return self.looking.survey(variant, run, args, kwargs)
        if self.once is not None:
            self.loop.course.failed(tier.without_graph(), self.once, self)
            return self.eagerly(run)
        return self.code.prove(run, tier) if self.shapes.may_compile(tier.base, variant.inputs) else self.eagerly(run)

    @property
    def _hindered(self) -> bool:
        """Tell whether something was seen in the step that no capture allows."""
        return any(one.seen is not None and bool(one.seen.obstacles) for one in self.variants.values())

    def _with_graph(self, variant: Variant, run: functools.partial[Any], leaves: list[Any], tier: Tier) -> Any:
        captured = variant.captured
        if captured is not None and (change := _changed(captured)) is not None:
            self._drop(variant, change)
        if captured is None and variant.standing is not None and not variant.standing.holds():
            variant.forget()
        if variant.seen is None and variant.declined is None and (everywhere := self._hindrance()) is not None:
            variant.decline(everywhere)  # told of the kinds before
        not_now = not self._worth(variant) or self._waits(variant)
        not_now = (
            not_now or (not variant.proven and self._waits_for_others()) or self._is_handed_its_own(variant, leaves)
        )
        if variant.declined is not None or not_now:
            return self.uncaptured(variant, run, tier)
        if variant.seen is None or (variant.seen.obstacles and variant.other_path()):
            return self.looking.survey(variant, run, run.args, run.keywords)
        if variant.seen.obstacles:
            self.decline(variant, variant.seen.obstacles[0])
            return self.uncaptured(variant, run, tier)
        if variant.proven and variant.captured is not None:
            if self._check_due():
                return self._checked(variant, run, tier)
            return self._replay(variant, run, leaves, tier)
        return self.graphs.prove(variant, run, tier, run.args, run.keywords)

    def _is_handed_its_own(self, variant: Variant, leaves: list[Any]) -> bool:
        """Tell whether an argument is what the step may change, and was not when the step was captured."""
        place = variant.captured.of_its_own(leaves) if variant.captured is not None else None
        if place is None:
            return False
        name = self.shapes.argument(variant.inputs.names()[place])
        self.loop.say_once(
            f"{self.name}: argument {name} is, or is a part of, a parameter, a buffer, a gradient or optimizer state, "
            "and was not when the step was captured: such calls run without a graph. "
            f"Pass a copy, {name}.clone(), or read it inside the step"
        )
        return True

    def lacks(self, tier: Tier) -> str:
        """Say what is missing before the step runs in the tier that the loop aims at; empty where nothing is."""
        known, then = [one for one in self.variants.values() if one.declined is None], ""
        if tier.compiles and not self.code.proven(tier.base):
            left, which = self.to_be_surveyed + self.code.steps_left(tier.base), "shapes that came before"
            then = ", and then some to capture it" if tier.graph else ""
        elif tier.graph and known and not any(one.proven for one in known):
            left, which = min(one.steps_left for one in known), "the same shapes and other arguments"
        else:
            return ""
        if another_trains(self.loop):
            return f"not proven yet: {WAITS}"
        steps = f"{left} more step{'s' if left > 1 else ''} with {which} to compare it with eager{then}"
        return f"not proven yet: it takes {steps}; eager's outcome counts till then"

    @property
    def variants(self) -> dict[Hashable, Variant]:
        """Give what is known of each kind of call, with the code that is in force."""
        return self._variants[self.loop.goal.base]

    def found_once(self, obstacles: list[Obstacle]) -> None:
        """Take note of what a survey found that keeps the step's Python from running twice."""
        self.once = next((one for one in obstacles if one.not_repeatable), self.once)

    def release(self, base: str) -> None:
        """Let go of what was captured with a base's code; calls are counted on, and what was declined stays so."""
        for variant in self._variants[base].values():
            variant.forget()

    def forget_recordings(self) -> None:
        """Let go of everything that was captured."""
        self._variants.clear()

    def _variant(self, inputs: Signature, apart: Aliasing) -> Variant:
        key, variants = self._keys.of(inputs, apart), self.variants
        found = variants.get(key)
        if found is None:
            if len(variants) >= _KEYS:
                idle = next((key for key, one in variants.items() if one.captured is None), None)
                variants.pop(idle if idle is not None else next(iter(variants)))
            # Code that is compiled has taken the path of code that hears that it is captured.
            found = variants[key] = Variant(key, inputs, reports_capturing=Tier(self.loop.goal.base).compiles)
            for others in self._variants.values():  # what a survey saw is so whatever the code is compiled with
                if (other := others.get(key)) is not None and other.seen is not None and other.declined is None:
                    same_path = not other.seen.asked or other.reports_capturing == found.reports_capturing
                    found.seen = other.seen if same_path else found.seen
        return found

    def _hindrance(self) -> Obstacle | None:
        """Give the line of the step that keeps every kind of call from being captured, once several were looked at."""
        seen = [one.seen for one in self.variants.values() if one.seen is not None]
        if len(seen) < _ALIKE or not all(one.obstacles for one in seen):
            return None
        first = seen[0].obstacles[0]
        places = {(one.obstacles[0].reason, one.obstacles[0].file, one.obstacles[0].line) for one in seen}
        return first if len(places) == 1 and first.file is not None else None

    def _worth(self, variant: Variant) -> bool:
        """A call that comes a second time is worth a recording, as long as there is room for one."""
        if variant.spread is not None or variant.captured is not None:
            return True
        taken = sum(one.spread is not None and one.declined is None for one in self.variants.values())
        if taken >= VARIANTS:
            self.loop.say_once(
                f"{self.name}: {VARIANTS} kinds of calls are captured, the most there may be; further ones run "
                "without a graph. Fewer shapes (buckets=) or fewer argument values would be captured all"
            )
            return False
        return variant.calls > 1

    def _waits(self, variant: Variant) -> bool:
        """Tell whether another kind of call is on its way: until one is proven, nobody knows whether a second pays.

        One that does not come back (a curriculum has moved on) holds nobody up.
        """
        auto = self.loop.auto
        if auto is None or not auto.preparing or variant.begun:
            return False
        recently = self._calls - _COMES_BACK * len(self.variants)
        return any(one.begun and one.declined is None and one.called >= recently for one in self.variants.values())

    def _waits_for_others(self) -> bool:
        """Tell whether nothing may be looked at or proven at present, since another thread trains as well."""
        if not another_trains(self.loop):
            return False
        self.loop.say_once(f"{self.name}: {WAITS}", logging.WARNING)
        return True

    def look_later(self) -> None:
        """A survey has shown nothing."""
        self._surveys = max(0, self._surveys - 1)

    def _drop(self, variant: Variant, change: Change) -> None:
        step, what = self.loop.steps, change.what
        too_often = variant.drop(step, what)
        self.looking.look_again()
        self.rescue.look_again()
        self.loop.emit(ev.CaptureDropped(step=step, function=self.name, reason=what))
        if too_often and change.optimizer is not None:
            # Another kind of call may have moved it out already; this one's recording still held it.
            if change.optimizer not in self.loop.recorded.outside:
                self.loop.recorded.run_outside(change.optimizer, f"{what} changes again and again")
            variant.drops.clear()
        elif too_often:
            found = "; ".join(dict.fromkeys(reason for _, reason in variant.drops))
            hint = "keep it constant, pass it as a tensor, or change it less often"
            self.decline(variant, Obstacle(f"what a recording holds changes again and again: {found}", hint))

    def decline_path(self, variant: Variant, obstacle: Obstacle) -> None:
        """Decline a recording for what was seen of it, unless code of the step has another path for a capture."""
        if not variant.other_path():
            self.decline(variant, obstacle)

    def decline(self, variant: Variant, obstacle: Obstacle) -> None:
        """Never capture calls of this kind."""
        variant.decline(obstacle)
        self.loop.course.declined(Tier(self.loop.goal.base, graph=True), obstacle, self)

    # -- in several processes --------------------------------------------------------------------------------------

    @property
    def to_be_surveyed(self) -> bool:
        """Tell whether the step has to be looked at, a first or, for what a first call sets up, a second time."""
        return not self._surveys or (self.once is not None and self._surveys < SURVEYS)

    def survey(self, run: Callable[[], Any], inputs: Signature, call: tuple[Any, Any]) -> Any:
        """Run the step eagerly, once, and look at it."""
        self._surveys, self.once = self._surveys + 1, None
        return self.looking.survey(self._variant(inputs, Aliasing.of(flatten(call)[0])), run, *call)

    def guarded(self, run: Callable[[], Any], tier: Tier) -> Any:
        """Run the step in a tier without a graph, undone where that is possible."""
        return self._guarded(run, tier)

    @property
    def calls(self) -> int:
        """Give how often the step was called in a tier, or on the way to one."""
        return self._calls

    # -- graphs ----------------------------------------------------------------------------------------------------

    def instead(self, variant: Variant, run: Callable[[], Any], tier: Tier, obstacle: Obstacle) -> Any:
        """Run a step without the graph that failed; what it raises as well is the user's own, and declines nothing."""
        variant.captured = None
        variant.outcomes.clear()
        result = self.uncaptured(variant, run, tier)
        if self.kind != "undone":  # else the compiled code is at fault, and another graph will be made without it
            self.decline_path(variant, obstacle)
        return result

    def _replay(self, variant: Variant, run: Callable[[], Any], leaves: list[Any], tier: Tier) -> Any:
        captured = variant.captured
        assert captured is not None
        assert variant.seen is not None
        try:
            captured.save_others()
            self.rescue.save(gradients=bool(variant.seen.read_gradients), tensors=not captured.atomic)
            result = captured.replay(leaves)
        except Exception as error:  # noqa: BLE001 - whatever it is, the step is undone and eager asked
            failed = error
        else:
            if captured.recorded:
                between_steps()
            return result
        # Out of the except clause, so that what eager raises does not carry our exception along.
        return self.rescue.recover(failed, run, tier, ours=not captured.in_users_code, wrote=captured.wrote)

    # -- compiled code ---------------------------------------------------------------------------------------------

    def _compiled(self, run: Callable[[], Any], tier: Tier, inputs: Signature) -> Any:
        """Run the step as compiled code that has seen its shapes, else eager: one short batch compiles nothing anew."""
        if advice := self.shapes.advice():
            self.loop.say_once(advice)
        seen = self.shapes.compiled(tier.base, inputs)
        if not self.shapes.may_compile(tier.base, inputs):
            return self.eagerly(run)
        # Other shapes are other code; where every step brings some, torch has made one code of them by now.
        if not seen and not self.shapes.one_code:
            return self.eagerly(run) if another_trains(self.loop) else self.code.prove(run, tier)
        if self._check_due():
            return self._checked(None, run, tier)
        return self._guarded(run, tier)

    def uncaptured(self, variant: Variant, run: Callable[[], Any], tier: Tier) -> Any:
        """Run the step in the tier without its graph."""
        if advice := self.shapes.advice():
            self.loop.say_once(advice)
        below = tier.without_graph()
        return self._compiled(run, below, variant.inputs) if tier.compiles else self._guarded(run, below)

    # -- the sentinel ----------------------------------------------------------------------------------------------

    def _check_due(self) -> bool:
        """Tell whether the sentinel is to look at this step: with the process's random streams to itself."""
        return self.sentinel is not None and self.sentinel.due() and not another_trains(self.loop)

    def _checked(self, variant: Variant | None, run: Callable[[], Any], tier: Tier) -> Any:
        """Run the step both ways and compare; where the tier's code fails, it is as in a step of its own."""
        assert self.sentinel is not None
        assert isinstance(run, functools.partial)
        try:
            return self.sentinel.check(variant, (run.args, run.keywords), tier)
        except CandidateFailedError as error:
            failed = error
        no_memory = isinstance(failed.__cause__, torch.OutOfMemoryError)
        obstacle = self.rescue.candidate_failed(failed, tier)
        if no_memory:
            self.sentinel.stop("a step and a copy of its state do not fit in memory together")
            self.kind = "run"
            return self._guarded(run, tier.without_graph())
        if variant is not None:
            return self.instead(variant, run, tier, obstacle)
        return self.rescue.rung_down(run, tier.without_graph(), obstacle)

    def candidate_of(self, variant: Variant | None, call: Call) -> Run:
        """Give what runs a step in the tier in force, for the sentinel to compare."""
        if variant is not None and variant.captured is not None:
            return functools.partial(self.graphs.candidate, variant, variant.captured, *call)
        return functools.partial(plain_run, self.program.holdings, functools.partial(self.step, *call[0], **call[1]))

    def gave_way(self, tier: Tier, obstacle: Obstacle, variant: Variant | None) -> None:
        """The sentinel found a tier wrong: its recordings where one of them is at fault, else its compiled code."""
        if variant is None:
            self.code.forget(tier.base)
            self.loop.course.failed(tier.without_graph(), obstacle, self)
            return
        for one in [one for one in self.variants.values() if one.captured is not None]:
            self.decline(one, obstacle)

    def eagerly(self, run: Callable[[], Any]) -> Any:
        """Run the step with the models as they were given."""
        self.ran = self.loop.given
        with self.loop.eager():
            return run()

    def _guarded(self, run: Callable[[], Any], tier: Tier) -> Any:
        """Run the step; where compiled code fails before a parameter was written, undo it and run it eagerly."""
        self.ran = tier.name
        if not tier.compiles:
            return run()
        try:
            self.rescue.save(gradients=True)
            return run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the step is undone and eager asked
            failed = error
        return self.rescue.recover(failed, run, tier, ours=is_compiled_codes(failed))


def _changed(captured: CapturedStep) -> Change | None:
    """Name what is not as it was captured; where that cannot be found out, that."""
    try:
        return captured.changed()
    except Exception as error:  # noqa: BLE001 - an object of the user's that cannot be looked at
        return Change(f"what the step reads, which cannot be looked at ({describe(error)}),")
