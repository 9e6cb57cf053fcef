"""Looks at a step before it is captured: the survey of one real step, and the Python state that it reaches."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hotloop._torch.fake import version_of
from hotloop.fallback.causes import describe
from hotloop.measure import flatten
from hotloop.step import python_state
from hotloop.step.engines import collector_paused
from hotloop.step.holdings import RandomState
from hotloop.step.optimizers import frozen
from hotloop.step.proof import CandidateFailedError, undone_if_it_fails
from hotloop.step.survey import Obstacle, Survey, survey
from hotloop.step.tiers import Tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from hotloop.step.captured import Program
    from hotloop.step.loop import Loop
    from hotloop.step.runner import Runner
    from hotloop.step.variant import Variant

_NAME_IT = "name it, and its model: Loop([model, other], [optimizer, its_optimizer])"
_SCHEDULE_OUTSIDE = "call scheduler.step() outside the step"
_BACKWARD = "call loss.backward() inside the step"
_RETURN_IT = "return what has to be noted, and note it outside the step: a replay runs no Python"
_KEEP_LESS = "keep it where the step does not reach it, and hand the step what it needs of it as a tensor"


class Looking:
    """What one runner has seen of its step."""

    def __init__(self, loop: Loop, runner: Runner, program: Program) -> None:
        self._loop, self._runner, self._program = loop, runner, program
        self._python: Mapping[str, Any] | None = None
        self._watch: python_state.Watch | None = None
        self._objects: list[Any] = []
        self._moving: dict[str, int] = {}

    def look_again(self) -> None:
        """Something changed between two steps: what is reached from now on is compared with itself."""
        self._python = None

    @collector_paused()
    def survey(self, variant: Variant, run: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """Run the step eagerly and look at it: a real step."""
        self._runner.kind = "survey"
        self._loop.look_again()
        self._find_buffers(args, kwargs)
        obstacles = self.moved_outside(args, kwargs)
        inputs = [one for one in flatten((args, kwargs))[0] if isinstance(one, torch.Tensor)]
        random = RandomState([self._program.device])
        settings, gradients = self._settings(), self._gradients()
        engine = self._loop.engine
        asked: list[bool] = []
        # On the way of the capture: code that looks for one (masks in transformers) must not be judged by another path.
        ambience: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if engine is not None:
            ambience = engine.ambience(
                self._program.device, told_capturing=variant.told_capturing, asked=lambda: asked.append(True)
            )
        failed: Obstacle | None = None
        strangers: list[str] = []
        try:
            with self._loop.eager(), ambience, self._noting_strangers(strangers):
                looked = functools.partial(survey, self._program.holdings, self._program.device, inputs, run)
                (result, seen), _ = undone_if_it_fails(self._program, looked)
        except CandidateFailedError as error:
            failed = self._runner.rescue.candidate_failed(error, Tier(self._loop.given))
        if failed is not None:
            result = self._runner.eagerly(run)  # what it raises as well is the user's own
            variant.seen = Survey(obstacles=[failed])
            self._loop.decided(f"{self._runner.name} could not be looked at, so it is not captured: {failed}", {})
            return result
        if settings != self._settings():
            obstacles.append(Obstacle("the step changes its optimizer's settings", _SCHEDULE_OUTSIDE, once=True))
        obstacles += self.changed_inside()
        moved = RandomState([self._program.device]).moved_since(random)
        hosts = ("Python's random", "numpy.random") + (
            ("torch's CPU generator",) if self._loop.device.type != "cpu" else ()
        )
        obstacles += [
            Obstacle(
                f"the step draws from {name}", "draw on the device (torch.rand(..., device=...)), or outside the step"
            )
            for name in moved
            if name in hosts
        ]
        obstacles += [
            Obstacle(f"an optimizer that the loop does not know steps: {name}", _NAME_IT, once=True)
            for name in strangers
        ]
        leaves = flatten(result)[0]
        waits = any(isinstance(one, torch.Tensor) and one.grad_fn is not None for one in leaves)
        if waits and not seen.stepped and gradients == self._gradients():
            obstacles.append(Obstacle("the step returns a loss and leaves its backward to the caller", _BACKWARD))
        if any(one.requires_grad for one in inputs):
            obstacles.append(Obstacle("an argument requires gradients", "set requires_grad inside the step, on a copy"))
        if any(isinstance(one, float | complex) for one in leaves):
            obstacles.append(
                Obstacle("the step returns a Python number, which a replay would repeat", "return a tensor instead")
            )
        if seen.written_found:
            self._program.holdings.found += seen.written_found
            self._runner.rescue.look_again()
        variant.seen = seen
        seen.asked = bool(asked)
        seen.obstacles += obstacles
        self._runner.found_once(obstacles)
        self._loop.surveyed(seen)
        return result

    @contextlib.contextmanager
    def _noting_strangers(self, found: list[str]) -> Iterator[None]:
        """Note optimizers that step in the block and were not given to the loop: their settings would be frozen."""
        known = {id(one) for one in self._program.holdings.optimizers.values()}

        def note(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if id(optimizer) not in known:
                found.append(type(optimizer).__name__)

        handle = register_optimizer_step_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def _gradients(self) -> list[tuple[int, int]]:
        """Tell which gradients there are, and how often each was written."""
        found = (parameter.grad for parameter in self._program.holdings.parameters().values())
        return [(id(one), version_of(one)) if one is not None else (0, 0) for one in found]

    def _settings(self) -> list[Any]:
        optimizers = self._program.holdings.optimizers.values()
        return [(frozen(one), [float(group["lr"]) for group in one.param_groups]) for one in optimizers]

    def _find_buffers(self, *call: Any) -> None:
        """Name the buffers of modules that nobody named, so that a proof undoes what a step does to them."""
        program, objects = self._program, python_state.objects_in(flatten(call)[0])
        with contextlib.suppress(Exception):  # an object of the user's that cannot be looked at: told by the next look
            found = python_state.strange_buffers(program.step, program.holdings, program.ignore, objects)
            if found:
                program.holdings.found += found
                self._runner.rescue.look_again()

    def _reachable(self) -> Mapping[str, Any]:
        try:
            program = self._program
            if self._watch is None:
                self._watch = python_state.Watch(program.step, program.holdings, program.ignore, self._objects)
            return self._watch.now()
        except Exception as error:  # noqa: BLE001 - an object of the user's that cannot be looked at
            return {f"Python state that cannot be looked at ({describe(error)})": self._loop.steps}

    def moved_outside(self, *call: Any) -> list[Obstacle]:
        """Note what the step reads in Python and somebody changed since the last look; twice is too often.

        Args:
            call: the arguments of the coming call, where objects among them are looked into.
        """
        objects = python_state.objects_in(flatten(call)[0])
        if list(map(id, objects)) != list(map(id, self._objects)):
            self._python = self._watch = None  # another kind of call: what it reaches is not compared with this one's
        self._objects = objects
        before, self._python = self._python, self._reachable()
        obstacles = [
            Obstacle(f"there is too much Python state to watch: {name}", _KEEP_LESS)
            for name in python_state.unwatchable(self._python)[:1]
        ]
        for name in python_state.differences(before, self._python) if before is not None else ():
            self._moving[name] = self._moving.get(name, 0) + 1
            if self._moving[name] > 1:
                obstacles.append(
                    Obstacle(f"the step reads {name}, which changes from step to step", "pass it as a tensor argument")
                )
        return obstacles

    def note(self) -> None:
        """Take the Python state as it is now for what the next step finds."""
        self._python = self._reachable()

    def changed_inside(self) -> list[Obstacle]:
        """Give what Python state the step that has just run changed, since `moved_outside` was asked before it."""
        before, self._python = self._python, self._reachable()
        assert before is not None
        modules = self._program.holdings.modules.items()
        buffers = {f"{root}.{path}" for root, module in modules for path, _ in module.named_buffers()}
        found = []
        for name in python_state.differences(before, self._python)[:3]:
            schedule = isinstance(now := self._python.get(name), tuple) and now[:1] == ("schedule",)
            hint = _SCHEDULE_OUTSIDE if schedule else _RETURN_IT
            # A buffer that the step puts in place of another goes back with the rest of the module's.
            found.append(Obstacle(f"the step changes Python state: {name}", hint, once=name not in buffers))
        return found
