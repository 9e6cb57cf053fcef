"""``hotloop.harness``: is a preset with CUDA graphs safe for a program that trains and is called between the steps?

The program runs twice in lockstep, eager and compiled: each training step from the same state, then many calls without
gradients on the same modules. Outputs are held, as an allocator or a sampler holds its best, and checked again after
later calls and the next step. A third program lists the outputs that it holds at each mark.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from hotloop import presets
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import status
from hotloop.compiling.fallback import emulation
from hotloop.compiling.fallback.step_marks import steps
from hotloop.errors import ConfigError, describe
from hotloop.measure import Limits
from hotloop.measure.limits import compute_dtype
from hotloop.prove.harness.held_outputs import HeldOutputs
from hotloop.prove.harness.lockstep import Lockstep
from hotloop.prove.harness.result import Finding, Harness
from hotloop.prove.harness.subject import Subject, noting_calls
from hotloop.prove.workloads import same_random_numbers, seeded, source_of, survey_training
from hotloop.step.compiled import Compiled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from hotloop.compiling.control import ComponentStatus
    from hotloop.presets import Preset
    from hotloop.prove.harness.subject import Calls
    from hotloop.step import Workload

ROUNDS = 6
"""Training steps: torch warms up in the first, records in the second and replays from the third on."""
CALLS = 6
"""Calls without gradients after each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the models are compiled with, as `hotloop.compile` takes it.

    Args:
        chosen: the presets of each model in training and without gradients; other models stay as written.
        more: further arguments of `hotloop.compile`.
    """

    chosen: Mapping[str, tuple[Preset, Preset]]
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def cudagraphs(self) -> bool:
        """Whether any of the presets has CUDA graphs."""
        return any(preset.cudagraphs for both in self.chosen.values() for preset in both)

    def install(self, models: Mapping[str, torch.nn.Module]) -> None:
        """Compile models in place."""
        compile_in_place(
            {name: models[name] for name in self.chosen},
            {name: training for name, (training, _) in self.chosen.items()},
            inference={name: inference for name, (_, inference) in self.chosen.items()},
            **self.more,
        )

    def names(self, place: int) -> str:
        """Name the presets of training (0) or of inference (1)."""
        return ", ".join(dict.fromkeys(both[place].name for both in self.chosen.values()))


def harness(  # noqa: PLR0913 - the public settings
    workload: Workload | Callable[[], Workload] | str,
    preset: str | Preset = "reduce-overhead",
    *,
    inference: str | Preset | None = None,
    rounds: int = ROUNDS,
    calls: int = CALLS,
    look: bool = True,
) -> Harness:
    """Compare a program under a preset with CUDA graphs with eager: its training step, and its calls between the steps.

    Without a GPU the emulation of CUDA graphs runs it with eager's kernels: it finds outputs that would be overwritten.

    Args:
        workload: a function that makes a `hotloop.Workload`, or its name as ``file.py:make``; or a Workload whose step
            can be copied with its model. Its ``infer`` is called between the steps. Without ``infer`` each model is
            called as the training step called it, in evaluation mode.
        preset: of the training calls.
        inference: of the calls without gradients; None takes ``preset``'s.
        rounds: training steps, 3 or more.
        calls: calls without gradients after each, 2 or more.
        look: run a third program to list the outputs that are held.

    Raises:
        ConfigError: an argument does not fit, neither preset has CUDA graphs, or a model is compiled already.
        Exception: the program's own, raised in eager.
    """
    for name, value, least in (("rounds", rounds, 3), ("calls", calls, 2)):
        if type(value) is not int or value < least:
            raise ConfigError(f"{name} {value!r}: expected a whole number of {least} or more")
    source = source_of(workload)
    with seeded():
        written = source.make().models()
    if Compiled(written).given:
        raise ConfigError(
            "a model is compiled already: expected it as it was before torch.compile or hotloop.compile; the harness "
            "compiles it, and holds it against eager"
        )
    both = presets.get(preset), presets.get(preset if inference is None else inference)
    settings = Settings(chosen=dict.fromkeys(written, both))
    if not settings.cudagraphs:
        named = ", ".join(known.name for known in presets.PRESETS.values() if known.cudagraphs)
        raise ConfigError(f"preset {settings.names(0)!r}: it has no CUDA graphs; expected one that has: {named}")
    return rehearse(source.make, settings, rounds, calls, look=look)


def rehearse(
    make: Callable[[], Workload],
    settings: Settings,
    rounds: int = ROUNDS,
    calls: int = CALLS,
    *,
    look: bool = False,
) -> Harness:
    """Run a harness with settings by model, for a program that is about to train; see `harness`."""
    with seeded(), same_random_numbers():
        return _Run(make, settings, rounds, calls).result(look=look)


class _Run:
    """The programs of one harness, and the findings about them."""

    def __init__(self, make: Callable[[], Workload], settings: Settings, rounds: int, calls: int) -> None:
        self._new, self._settings, self._rounds, self._calls = make, settings, rounds, calls
        self._findings: list[Finding] = []
        self._components: dict[str, dict[str, Any]] = {}

    def result(self, *, look: bool) -> Harness:
        """Run all programs, and sum up."""
        eager = self._make()
        emulated = eager.device.type != "cuda" or emulation.running() is not None
        start_emulation = emulated and emulation.running() is None
        limits = self._first_step(eager)
        lookout = HeldOutputs()
        with emulation.cudagraph_emulation() if start_emulation else contextlib.nullcontext():
            limits = Limits.rounding() if emulated else limits
            nearest = self._in_lockstep(eager, limits)
            del eager
            if look:
                self._look_for_held(lookout)
        return Harness(
            preset=self._settings.names(0),
            inference=self._settings.names(1),
            emulated=emulated,
            rounds=self._rounds,
            calls=self._calls,
            findings=tuple(dict.fromkeys(self._findings)),
            held=tuple(lookout.held()),
            components=self._components,
            nearest=nearest,
        )

    def _make(self) -> Subject:
        with seeded():
            return Subject(self._new())

    def _first_step(self, eager: Subject) -> Limits:
        """Run eager's first step, which sets libraries up; return the limits for the dtype that it computes in."""
        batch = next(eager.workload.endless())

        def step() -> Any:
            return eager.step(batch)

        with seeded():
            seen = survey_training(eager.holdings, eager.device, [], step, step)
        return Limits.compiled(compute_dtype(seen.matrix_dtypes, eager.device))

    def _in_lockstep(self, eager: Subject, limits: Limits) -> str:
        """Run eager and a compiled program in lockstep; return the value nearest to its limit."""
        compiled = self._make()
        with seeded():
            compiled.step(next(compiled.workload.endless()))  # still eager, as the first step of the other was
        self._settings.install(compiled.models)
        lockstep = Lockstep(eager, compiled, limits)
        lockstep.run(self._rounds, self._calls)
        self._findings += lockstep.findings
        for name, part in status(dict(compiled.models)).components.items():
            if name in self._settings.chosen:
                self._components[name] = part.to_dict()
                self._check_component(name, part, complete=not lockstep.ended)
        return lockstep.nearest or "everything equals eager's"

    def _check_component(self, name: str, part: ComponentStatus, *, complete: bool) -> None:
        """Compare what ran with what was asked for: presets, captures, calls.

        Args:
            name: of the component.
            part: its status.
            complete: all steps and calls were made, so that a mode without a call is a finding.
        """
        causes = "; ".join(dict.fromkeys(cause.reason for cause in part.causes)) or "no cause is known"
        called = any(counts.get("calls") for counts in part.modes.values())
        if part.state not in {"compiled", "pending"} and called:
            what = f"{name} was asked for {part.requested} and is {part.state}, running {part.running}: {causes}"
            self._findings.append(Finding(kind="stepped down", what=what))
        for reason in part.cudagraphs_skipped:
            self._findings.append(Finding(kind="skipped", what=f"{name}: no CUDA graph was captured: {reason}"))
        for mode, preset in zip(("training", "inference"), self._settings.chosen[name], strict=True):
            if complete and preset.backend != "eager" and not part.modes.get(mode, {}).get("calls"):
                what = f"{name} was never called in {mode}"
                hint = "call the module itself, model(x), not its forward() or another method"
                self._findings.append(Finding(kind="not called", what=what, remedy=hint, fails=preset.cudagraphs))

    def _look_for_held(self, lookout: HeldOutputs) -> None:
        """Run a program whose outputs the harness itself does not hold, and note those that it holds at each mark."""
        subject = self._make()
        batches = subject.workload.endless()
        calls: Calls = {}
        with seeded(), noting_calls(subject.models, calls):
            subject.step(next(batches))
        self._settings.install(subject.models)
        try:
            with steps.looking(lookout):
                for batch in itertools.islice(batches, self._rounds):
                    subject.step(batch)
                    for number in range(self._calls):
                        collections.deque(subject.infer(batch, calls, number), maxlen=0)
        except Exception as error:  # noqa: BLE001 - the lockstep has reported the fault already
            what = f"the list of held outputs ends early: {describe(error)}"
            self._findings.append(Finding(kind="held", what=what, fails=False))
