"""``hotloop.harness``: is a preset with CUDA graphs safe for a program that trains and is called between the steps?

The program runs twice in lockstep, eager and compiled as its settings say: each training step from the same state, then
many calls without gradients on the same modules. Outputs are held, as an allocator or a sampler holds its best, and
looked at again after later calls and the next step. Where nothing but numbers disagrees, that may be rounding, of which
eager has its own: then all of it is run once more, and both are held against the same in more bits besides. Of a third
program it is noted at each mark what it holds of what the graphs handed out, and who.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hotloop import presets
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import status
from hotloop.compiling.fallback import emulation
from hotloop.compiling.fallback.causes import describe
from hotloop.compiling.fallback.lifetime import steps
from hotloop.errors import ConfigError
from hotloop.measure import Limits
from hotloop.presets import Preset
from hotloop.prove.bench.source import source_of
from hotloop.prove.bench.way import seeded
from hotloop.prove.harness.held import HeldOutputs
from hotloop.prove.harness.lockstep import Lockstep
from hotloop.prove.harness.program import Subject, noting_calls
from hotloop.prove.harness.result import REMEDY, Finding, Harness
from hotloop.prove.idle import noting_backward, refuse_idle
from hotloop.prove.verify.verify import same_random_numbers
from hotloop.step.audit.op_trace import survey
from hotloop.step.compiled import Compiled
from hotloop.step.state.ambient import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hotloop.compiling.control import ComponentStatus
    from hotloop.config import Regions
    from hotloop.prove.harness.program import Calls
    from hotloop.step import Workload

_log = logging.getLogger("hotloop")
ROUNDS = 6
"""Training steps: torch warms up in the first, records in the second and replays from the third on."""
CALLS = 6
"""Calls without gradients after each."""


Presets = str | Preset | Mapping[str, str | Preset]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the models are compiled with, as `hotloop.compile` takes it.

    Args:
        chosen: by model, its preset in training and without gradients; a model that is not named stays as written.
        more: further arguments of `hotloop.compile`.
    """

    chosen: Mapping[str, tuple[Preset, Preset]]
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def cudagraphs(self) -> bool:
        """Whether any of the presets has CUDA graphs."""
        return any(one.cudagraphs for both in self.chosen.values() for one in both)

    def put_on(self, models: Mapping[str, torch.nn.Module], *, strict_lifetime: bool) -> None:
        """Compile models in place."""
        compile_in_place(
            {name: models[name] for name in self.chosen},
            {name: training for name, (training, _) in self.chosen.items()},
            inference={name: inference for name, (_, inference) in self.chosen.items()},
            strict_lifetime=strict_lifetime,
            **self.more,
        )

    def names(self, place: int) -> str:
        """Name the presets of training (0) or of inference (1)."""
        return ", ".join(dict.fromkeys(both[place].name for both in self.chosen.values()))


def harness(  # noqa: PLR0913 - the public settings
    workload: Workload | Callable[[], Workload] | str,
    preset: Presets = "reduce-overhead",
    *,
    inference: Presets | None = None,
    rounds: int = ROUNDS,
    calls: int = CALLS,
    regions: Regions = "auto",
    options: Mapping[str, Any] | None = None,
    strict_lifetime: bool = False,
    look: bool = True,
) -> Harness:
    """Hold a program under a preset with CUDA graphs against eager: its training step, and its calls between the steps.

    Where no GPU runs it, the emulation of CUDA graphs does: it finds what would be overwritten, with eager's kernels.

    Args:
        workload: a function that makes a `hotloop.Workload`, or its name as ``file.py:make``; a Workload whose step
            can be copied with its model. Its ``infer`` is called between the steps; without one each model is called as
            the training step called it, in evaluation mode.
        preset: of the training calls, or by model (``model``, or ``model[0]`` and on where there are several).
        inference: of the calls without gradients; None takes ``preset``'s.
        rounds: training steps, 3 or more.
        calls: calls without gradients after each, 2 or more.
        regions: see `hotloop.compile`.
        options: see `hotloop.compile`.
        strict_lifetime: compile with ``strict_lifetime``: what is held past a mark fails.
        look: run a third program to list what is held, and by whom.

    Raises:
        ConfigError: an argument does not fit, neither preset has CUDA graphs, or a model is compiled already.
        Exception: what the program raises in eager.
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
    models = tuple(written)
    settings = Settings(chosen=_chosen(models, preset, inference), more={"regions": regions, "options": options})
    if not settings.cudagraphs:
        named = ", ".join(one.name for one in presets.PRESETS.values() if one.cudagraphs)
        raise ConfigError(f"preset {settings.names(0)!r}: it has no CUDA graphs; expected one that has: {named}")
    return rehearse(source.make, settings, rounds, calls, strict_lifetime=strict_lifetime, look=look)


def rehearse(  # noqa: PLR0913 - see `harness`
    make: Callable[[], Workload],
    settings: Settings,
    rounds: int = ROUNDS,
    calls: int = CALLS,
    *,
    strict_lifetime: bool = False,
    look: bool = False,
) -> Harness:
    """Do what `harness` does, with settings by model, for a program that is about to train."""
    with seeded(), same_random_numbers():
        return _Run(make, settings, rounds, calls).result(strict_lifetime=strict_lifetime, look=look)


def _chosen(models: Sequence[str], preset: Presets, inference: Presets | None) -> dict[str, tuple[Preset, Preset]]:
    """Give each model's presets, in training and without gradients."""
    given = {"preset": preset, "inference": preset if inference is None else inference}
    for what, one in given.items():
        if isinstance(one, Mapping) and (unknown := [name for name in one if name not in models]):
            raise ConfigError(f"{what} names {unknown[0]!r}: expected one of the models, {', '.join(models)}")

    def of(name: str, one: Presets) -> Preset:
        return presets.get(one.get(name, "none") if isinstance(one, Mapping) else one)

    both = {name: (of(name, given["preset"]), of(name, given["inference"])) for name in models}
    return {name: pair for name, pair in both.items() if any(one.backend != "eager" for one in pair)}


class _Run:
    """The programs of one harness, and what is found."""

    def __init__(self, make: Callable[[], Workload], settings: Settings, rounds: int, calls: int) -> None:
        self._new, self._settings, self._rounds, self._calls = make, settings, rounds, calls
        self._findings: list[Finding] = []
        self._components: dict[str, dict[str, Any]] = {}

    def result(self, *, strict_lifetime: bool, look: bool) -> Harness:
        """Run all programs, and sum up."""
        eager = self._make()
        emulated = eager.device.type != "cuda" or emulation.running() is not None
        limits = self._first_step(eager)
        lookout = HeldOutputs()
        with _graphs(emulated=emulated):
            limits = Limits.rounding() if emulated else limits
            nearest, again = self._in_lockstep(eager, limits, strict_lifetime)
            del eager
            if again:
                other = self._make()
                self._first_step(other)
                nearest, _ = self._in_lockstep(other, limits, strict_lifetime, referred=True)
                del other
            if look or strict_lifetime:
                self._look(lookout)
        if strict_lifetime and (held := lookout.held()):  # in place of the error that the first of them raised
            self._findings = [one for one in self._findings if one.kind != "held"]
            self._findings += [Finding(kind="held", what=str(one), remedy=REMEDY) for one in held]
        return Harness(
            preset=self._settings.names(0),
            inference=self._settings.names(1),
            emulated=emulated,
            rounds=self._rounds,
            calls=self._calls,
            findings=tuple(dict.fromkeys(self._findings)),
            held=tuple(lookout.held()),
            strict_lifetime=strict_lifetime,
            components=self._components,
            nearest=nearest,
        )

    def _make(self) -> Subject:
        with seeded():
            return Subject(self._new())

    def _first_step(self, eager: Subject) -> Limits:
        """Run eager's first step, which sets things up, and see what it computes in."""
        batch = next(eager.workload.endless())
        with seeded(), noting_backward(eager.holdings) as reached:
            _, seen = survey(eager.holdings, eager.device, [], lambda: eager.step(batch))
        if not reached:
            refuse_idle(eager.holdings, lambda: eager.step(batch))
        return Limits.compiled(compute_dtype(seen.matrix_dtypes, eager.device))

    def _in_lockstep(
        self, eager: Subject, limits: Limits, strict_lifetime: bool, *, referred: bool = False
    ) -> tuple[str, bool]:
        """Run the two; gives what came nearest to its limit, and whether they are to be judged again in more bits."""
        compiled = self._make()
        with seeded():
            compiled.step(next(compiled.workload.endless()))  # as written, as eager's first step was
        self._settings.put_on(compiled.models, strict_lifetime=strict_lifetime)
        lockstep = Lockstep(eager, compiled, limits, hold=not strict_lifetime, referred=referred)
        lockstep.run(self._rounds, self._calls)
        if lockstep.may_be_rounding and not referred and limits.compute_dtype is not None:
            _log.info("harness: judged again, in more bits: %s", "; ".join(map(str, lockstep.findings)))
            return "", True
        self._findings += lockstep.findings
        self._what_ran(compiled, complete=not lockstep.ended)
        return lockstep.nearest or "everything equals eager's", False

    def _what_ran(self, compiled: Subject, *, complete: bool) -> None:
        """Hold what ran against what was asked for: presets, captures, calls."""
        for name, part in status(dict(compiled.models)).components.items():
            if name in self._settings.chosen:
                self._components[name] = part.to_dict()
                self._findings += _of_component(name, part, self._settings.chosen[name], complete=complete)

    def _look(self, lookout: HeldOutputs) -> None:
        """Run a program that nobody else holds anything of, and note what it holds at each mark."""
        subject = self._make()
        batches = subject.workload.endless()
        calls: Calls = {}
        with seeded(), noting_calls(subject.models, calls):
            subject.step(next(batches))
        self._settings.put_on(subject.models, strict_lifetime=False)
        try:
            with steps.looking(lookout):
                for batch in itertools.islice(batches, self._rounds):
                    subject.step(batch)
                    for number in range(self._calls):
                        collections.deque(subject.infer(batch, calls, number), maxlen=0)
        except Exception as error:  # noqa: BLE001 - the lockstep has told already what goes wrong
            what = f"the list of held outputs ends early: {describe(error)}"
            self._findings.append(Finding(kind="held", what=what, fails=False))


def _graphs(*, emulated: bool) -> contextlib.AbstractContextManager[Any]:
    """Have CUDA graphs while the block runs: the GPU's, or the emulation's, where none is in force already."""
    if not emulated or emulation.running() is not None:
        return contextlib.nullcontext()
    return emulation.cudagraph_emulation()


def _of_component(name: str, part: ComponentStatus, chosen: tuple[Preset, Preset], *, complete: bool) -> list[Finding]:
    causes = "; ".join(dict.fromkeys(cause.reason for cause in part.causes)) or "no cause is known"
    found = []
    uncalled = not any(counts.get("calls") for counts in part.modes.values())
    if part.state not in {"compiled", "pending"} and not uncalled:
        what = f"{name} was asked for {part.requested} and is {part.state}, running {part.running}: {causes}"
        found.append(Finding(kind="stepped down", what=what))
    found += [
        Finding(kind="skipped", what=f"{name}: no CUDA graph was captured: {reason}")
        for reason in part.cudagraphs_skipped
    ]
    for mode, asked in zip(("training", "inference"), chosen, strict=True):
        if complete and asked.backend != "eager" and not part.modes.get(mode, {}).get("calls"):
            what = f"{name} was never called in {mode}"
            hint = "call the module itself, model(x), not its forward() or another method"
            found.append(Finding(kind="not called", what=what, remedy=hint, fails=asked.cudagraphs))
    return found
