"""``hotloop.harness``: is a preset with CUDA graphs safe for a program that trains and is called between the steps?

The program runs twice in lockstep, eager and compiled as its settings say: each training step from the same state, then
many calls without gradients on the same modules. Outputs are held, as an allocator or a sampler holds its best, and
looked at again after later calls and the next step. A third program then hands out the memory of the graphs itself, and
at each mark it is noted what is held of it, and by whom.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

from hotloop import presets
from hotloop.control import compile as compile_in_place
from hotloop.control import status
from hotloop.errors import ConfigError, StaleOutputError
from hotloop.fallback import emulation
from hotloop.fallback.causes import describe
from hotloop.measure import Limits
from hotloop.prove.bench_source import source_of
from hotloop.prove.bench_way import seeded
from hotloop.prove.harness_held import Lookout
from hotloop.prove.harness_lockstep import Lockstep
from hotloop.prove.harness_program import Subject, noting_calls
from hotloop.prove.harness_result import REMEDY, Finding, Harness
from hotloop.prove.verify import same_random_numbers
from hotloop.step.survey import survey
from hotloop.step.variant import compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.config import Regions
    from hotloop.control import ComponentStatus
    from hotloop.presets import Preset
    from hotloop.prove.bench_source import Source
    from hotloop.prove.harness_program import Calls
    from hotloop.step import Workload

ROUNDS = 6
"""Training steps: torch warms up in the first, records in the second and replays from the third on."""
CALLS = 6
"""Calls without gradients after each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What the models are compiled with, as `hotloop.compile` takes it."""

    training: Preset
    inference: Preset
    regions: Regions = "auto"
    options: Mapping[str, Any] | None = None

    def put_on(self, subject: Subject, *, strict_lifetime: bool) -> None:
        """Compile the models in place."""
        compile_in_place(
            dict(subject.models),
            self.training,
            inference=self.inference,
            regions=self.regions,
            options=self.options,
            strict_lifetime=strict_lifetime,
        )


def harness(  # noqa: PLR0913 - the public settings
    workload: Workload | Callable[[], Workload] | str,
    preset: str | Preset = "reduce-overhead",
    *,
    inference: str | Preset | None = None,
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
        preset: of the training calls.
        inference: of the calls without gradients; None takes ``preset``'s.
        rounds: training steps, 3 or more.
        calls: calls without gradients after each, 2 or more.
        regions: see `hotloop.compile`.
        options: see `hotloop.compile`.
        strict_lifetime: compile with ``strict_lifetime``: what is held past a mark fails.
        look: run a third program to list what is held, and by whom.

    Raises:
        ConfigError: an argument does not fit, or neither preset has CUDA graphs.
        Exception: what the program raises in eager.
    """
    for name, value, least in (("rounds", rounds, 3), ("calls", calls, 2)):
        if type(value) is not int or value < least:
            raise ConfigError(f"{name} {value!r}: expected a whole number of {least} or more")
    training = presets.get(preset)
    settings = Settings(
        training=training,
        inference=training if inference is None else presets.get(inference),
        regions=regions,
        options=options,
    )
    if not (settings.training.cudagraphs or settings.inference.cudagraphs):
        named = ", ".join(one.name for one in presets.PRESETS.values() if one.cudagraphs)
        raise ConfigError(f"preset {training.name!r}: it has no CUDA graphs; expected one that has: {named}")
    with seeded(), same_random_numbers():
        return _Run(source_of(workload), settings, rounds, calls).result(strict_lifetime=strict_lifetime, look=look)


class _Run:
    """The programs of one harness, and what is found."""

    def __init__(self, source: Source, settings: Settings, rounds: int, calls: int) -> None:
        self._source, self._settings, self._rounds, self._calls = source, settings, rounds, calls
        self._findings: list[Finding] = []
        self._components: dict[str, dict[str, Any]] = {}

    def result(self, *, strict_lifetime: bool, look: bool) -> Harness:
        """Run all programs, and sum up."""
        eager = self._make()
        emulated = eager.device.type != "cuda" or emulation.running() is not None
        limits = self._first_step(eager)
        lookout = Lookout()
        with _graphs(emulated=emulated):
            nearest = self._in_lockstep(eager, Limits.rounding() if emulated else limits, strict_lifetime)
            del eager
            if look or strict_lifetime:
                self._look(lookout)
        if strict_lifetime and (held := lookout.held()):  # in place of the error that the first of them raised
            self._findings = [one for one in self._findings if one.kind != "held"]
            self._findings += [Finding(kind="held", what=str(one), remedy=REMEDY) for one in held]
        return Harness(
            preset=self._settings.training.name,
            inference=self._settings.inference.name,
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
            return Subject(self._source.make())

    def _first_step(self, eager: Subject) -> Limits:
        """Run eager's first step, which sets things up, and see what it computes in."""
        batch = next(eager.workload.endless())
        with seeded():
            _, seen = survey(eager.holdings, eager.device, [], lambda: eager.step(batch))
        return Limits.compiled(compute_dtype(seen.matrix_dtypes, eager.device))

    def _in_lockstep(self, eager: Subject, limits: Limits, strict_lifetime: bool) -> str:
        compiled = self._make()
        with seeded():
            compiled.step(next(compiled.workload.endless()))  # as written, as eager's first step was
        self._settings.put_on(compiled, strict_lifetime=strict_lifetime)
        lockstep = Lockstep(eager, compiled, limits, hold=not strict_lifetime)
        lockstep.run(self._rounds, self._calls)
        self._findings += lockstep.findings
        self._what_ran(compiled, complete=not lockstep.ended)
        return lockstep.nearest or "everything equals eager's"

    def _what_ran(self, compiled: Subject, *, complete: bool) -> None:
        """Hold what ran against what was asked for: presets, captures, calls."""
        for name, part in status(dict(compiled.models)).components.items():
            self._components[name] = part.to_dict()
            self._findings += list(_of_component(name, part, self._settings, complete=complete))

    def _look(self, lookout: Lookout) -> None:
        """Run a program whose outputs are not copied, and note what it holds at each mark."""
        subject = self._make()
        batches = subject.workload.endless()
        calls: Calls = {}
        with seeded(), noting_calls(subject.models, calls):
            subject.step(next(batches))
        self._settings.put_on(subject, strict_lifetime=True)
        try:
            with lookout.looking():
                for _ in range(self._rounds):
                    batch = next(batches)
                    subject.step(batch)
                    for number in range(self._calls):
                        collections.deque(subject.infer(batch, calls, number), maxlen=0)
        except StaleOutputError:
            pass  # it reads what was overwritten: what it held until then is noted, and copies spare it that
        except Exception as error:  # noqa: BLE001 - on a GPU it computes with what was overwritten, which may fail anyhow
            what = f"the list of held outputs ends early: {describe(error)}"
            self._findings.append(Finding(kind="held", what=what, fails=False))


def _graphs(*, emulated: bool) -> contextlib.AbstractContextManager[Any]:
    """Have CUDA graphs while the block runs: the GPU's, or the emulation's, where none is in force already."""
    if not emulated or emulation.running() is not None:
        return contextlib.nullcontext()
    return emulation.cudagraph_emulation()


def _of_component(name: str, part: ComponentStatus, settings: Settings, *, complete: bool) -> list[Finding]:
    causes = "; ".join(dict.fromkeys(cause.reason for cause in part.causes)) or "no cause is known"
    found = []
    if part.state not in {"compiled", "pending"}:
        what = f"{name} was asked for {part.requested} and is {part.state}, running {part.running}: {causes}"
        found.append(Finding(kind="stepped down", what=what))
    found += [
        Finding(kind="skipped", what=f"{name}: no CUDA graph was captured: {reason}")
        for reason in part.cudagraphs_skipped
    ]
    for mode, asked in (("training", settings.training), ("inference", settings.inference)):
        if complete and asked.backend != "eager" and not part.modes.get(mode, {}).get("calls"):
            what = f"{name} was never called in {mode}"
            hint = "call the module itself, model(x), not its forward() or another method"
            found.append(Finding(kind="not called", what=what, remedy=hint, fails=asked.cudagraphs))
    return found
