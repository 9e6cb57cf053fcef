"""``hotloop.verify``: does compiled code train the same? Compares a program's own steps with eager and float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from hotloop import presets
from hotloop._torch.own_compiles import uncompiled
from hotloop._torch.upcast import Draw, recording_draws
from hotloop.compiling.control import compile as compile_in_place
from hotloop.errors import ConfigError, HotloopError, describe
from hotloop.measure import ALL, Limits, flatten
from hotloop.measure.limits import compute_dtype
from hotloop.presets import Preset
from hotloop.prove.verify import culprit
from hotloop.prove.verify.culprit import Culprit
from hotloop.prove.verify.verdict import StepVerdict, Verdict, worst_of
from hotloop.prove.workloads import same_random_numbers, survey_training
from hotloop.step.audit.values import GRADIENTS_OF_ARGUMENTS
from hotloop.step.capture.engines import traced_path
from hotloop.step.capture.optimizers import counted_rounding
from hotloop.step.compiled import Compiled, as_eager_draws
from hotloop.step.loop.arguments import device_of
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove import proof
from hotloop.step.prove.outcomes import STEPS, Outcome, over_steps
from hotloop.step.prove.reference_runs import StepOutputs
from hotloop.step.prove.wide_reference import step_in_first, wider_dtypes
from hotloop.step.state.program import Call, Program
from hotloop.step.state.snapshot import Snapshot
from hotloop.step.tiers import Tier, parse
from hotloop.step.workload import Workload, arguments, load_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.measure import Comparison, Difference

Reference = Literal["auto", "float64", "float32", "eager"]
_ROUNDS = 3
"""If limits are passed by so little that chance may explain it, the steps run so many times, and all are judged."""
_TILT = 0.01
"""Autotuned kernels cut TF32's factors where eager rounds them: of 14 products in a chain, each makes 0.07% less."""
_log = logging.getLogger("hotloop")


def verify(  # noqa: PLR0913 - the public settings
    workload: Workload | Callable[[], Workload] | str,
    preset: str | Preset = "inductor",
    *,
    steps: int = STEPS,
    reference: Reference = "auto",
    search: bool = True,
    search_seconds: float = 300.0,
) -> Verdict:
    """Judge whether a program trains the same when it is compiled: results, gradients, updates, buffers of real steps.

    Each step runs eagerly, compiled, and in float64, from the same state on the same batch with the same random
    numbers. Eager runs also without what the program compiles itself (``torch.compile(optimizer.step)``). Eager's
    outcome stays, so the next step begins there. In float32 the compiled step's error against float64 may be a few
    times eager's. Under bf16, fp16 and TF32 the slope and residual of each tensor against eager decide. The step's
    Python runs several times for each step. A `Workload` is restored afterwards.

    Args:
        workload: the program, a function that makes it, or ``"file.py:function"``.
        preset: what to compile its models with: a preset, or a tier without a graph (``"regional"``).
        steps: how many steps to compare, 1 or more, besides two that are observed before.
        reference: ``"float64"``; ``"float32"`` for steps that compute in fewer bits; ``"eager"`` alone; ``"auto"``
            takes the widest that runs and fits in memory.
        search: if the program fails, compile its regions one at a time to find the one at fault.
        search_seconds: how long that may take.

    Raises:
        ConfigError: a setting does not fit, the models are compiled already, several processes train together, a batch
            requires gradients, or the step trains nothing.
        HotloopError: the step does not repeat itself from the same state, so nothing can be compared with it.
        Exception: the program's own.
    """
    settings = _checked(preset, steps, reference, search_seconds)
    made = load_factory(workload)() if isinstance(workload, str) else workload
    made = made() if callable(made) and not isinstance(made, Workload) else made
    if not isinstance(made, Workload):
        raise ConfigError(f"workload {made!r}: expected a hotloop.Workload, a function that makes one, or its name")
    verification = _Verification(made, settings, reference)
    before = Snapshot(verification.program) if isinstance(workload, Workload) else None
    try:
        with same_random_numbers():
            return verification.verdict(steps, search_seconds if search else 0.0)
    finally:
        verification.compiled.remove()
        if before is not None:
            before.restore()


def _checked(preset: Any, steps: Any, reference: Any, search_seconds: Any) -> tuple[str, dict[str, Any]]:
    """Check the settings; return the name of the preset or tier, and the arguments of `hotloop.compile`."""
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"steps {steps!r}: expected a whole number of 1 or more")
    if reference not in get_args(Reference):
        raise ConfigError(f"reference {reference!r}: expected one of {', '.join(get_args(Reference))}")
    if isinstance(search_seconds, bool) or not isinstance(search_seconds, int | float) or search_seconds < 0:
        raise ConfigError(f"search_seconds {search_seconds!r}: expected a number of seconds, 0 or more")
    if not isinstance(preset, Preset | str):
        raise ConfigError(f"preset {preset!r}: expected a preset, or its name")
    if isinstance(preset, Preset):
        if preset.backend == "eager":
            raise ConfigError(f"preset {preset.name!r}: expected one that compiles")
        return preset.name, {"preset": as_eager_draws(preset)}
    name = preset.strip().lower()
    known = [key for key, value in presets.PRESETS.items() if value.backend != "eager"] + ["regional", "full"]
    if name not in known and name.replace("_", "-") not in known:
        raise ConfigError(f"preset {preset!r}: {presets.expected(name, known)}; a Loop proves captured steps itself")
    tier = parse(preset)
    return tier.base, {**tier.settings, "preset": as_eager_draws(presets.get(tier.settings["preset"]))}


class _Verification:
    """A program under verification.

    Args:
        workload: the program.
        checked: the name of the preset or tier, and the arguments of `hotloop.compile`.
        reference: that the user asked for.
    """

    def __init__(self, workload: Workload, checked: tuple[str, dict[str, Any]], reference: Reference) -> None:
        self._workload, (self._name, self._settings), self._asked = workload, checked, reference
        group = torch.distributed
        if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
            raise ConfigError(f"verify in one process: torch.distributed runs {group.get_world_size()} here")
        models, holdings = workload.models(), workload.holdings()
        self.compiled = Compiled(models)
        if self.compiled.given:
            raise ConfigError(
                "a model is compiled already: expected it as it was before torch.compile or hotloop.compile"
            )
        self.program = Program(workload.step, holdings, device_of(holdings), lambda: False)
        self._batches = workload.endless()
        self._draws: list[Draw] = []
        self._draws_random = self._compiles_itself = False
        self._spread: dict[str, Difference] = {}
        self._limits = Limits.rounding()
        self._dtypes: list[torch.dtype] = []
        """The dtypes that are left for the reference, the widest first."""
        self._dtype: torch.dtype | None = None
        """The dtype of the last reference; None if it was eager."""
        self._why = ""
        self._failed = ""
        self._steps: list[StepVerdict] = []
        self._outcomes: list[Outcome] = []
        self._calls: list[Call] = []

    def verdict(self, steps: int, search_seconds: float) -> Verdict:
        """Run the steps, and search for the region at fault."""
        began = time.perf_counter()
        compute = self._survey()
        self._choose_references(compute)
        for model in self.compiled.models.values():
            compile_in_place(model, **self._settings)
        self.compiled.tier = Tier(self._name)
        joined = self._run(steps)
        not_compiled = self.compiled.idle() or self._stepped_down()
        why = self._failed or (joined.why if joined is not None and not joined.agrees else "")
        if not why and not_compiled:
            why = f"not compiled as asked: {not_compiled}"
        components = {name: part.to_dict() for name, part in self.compiled.status().components.items()}
        blamed = None
        if joined is not None and not joined.agrees and not joined.failed and not joined.random_moved:
            blamed = self._search(search_seconds)
        comparisons = joined.comparisons if joined is not None else {}
        device = self.program.device
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return Verdict(
            passes=not why,
            preset=self._name,
            compute_dtype=compute,
            reference="eager" if self._dtype is None else _short(self._dtype),
            reference_why=self._why,
            steps=tuple(self._steps),
            worst=worst_of(comparisons),
            why=why,
            visible=_visible(comparisons),
            ran={name: {key: part.get(key) for key in ("state", "running")} for name, part in components.items()},
            blamed=blamed,
            seconds=time.perf_counter() - began,
            environment={"torch": torch.__version__, "device": device_name},
        )

    def _stepped_down(self) -> str:
        """Name a component that ran on a lower preset: the verdict would be about other code than asked for."""
        for name, part in self.compiled.status().components.items():
            if part.fallbacks or part.running not in ("none", part.requested):
                causes = "; ".join(dict.fromkeys(cause.reason for cause in part.causes))
                return f"{name} ran in part on a lower rung than {part.requested}: {causes}"
        return ""

    def _next(self) -> Call:
        return arguments(next(self._batches)), {}

    def _step(self, call: Call) -> Callable[[], Any]:
        return functools.partial(self._workload.step, *call[0], **call[1])

    def _survey(self) -> str:
        """Run two real steps eagerly: survey the first; run the second twice, to learn how far eager is from itself.

        Returns:
            the dtype that the step computes in.
        """
        holdings, device = self.program.holdings, self.program.device
        call = self._next()
        inputs = [leaf for leaf in flatten(call)[0] if isinstance(leaf, torch.Tensor)]
        if any(tensor.requires_grad for tensor in inputs):  # each run of the step would add to its gradient
            raise ConfigError(f"{GRADIENTS_OF_ARGUMENTS}: {GRADIENTS_OF_ARGUMENTS.hint}")
        _log.info("verify: looking at a step")

        def another() -> Any:
            return self._step(self._next())()

        seen = survey_training(holdings, device, inputs, self._step(call), another)
        self._draws_random = seen.random_operations > 0
        holdings.found += seen.written_found
        holdings.gradients_altered = seen.altered
        compute = compute_dtype(seen.matrix_dtypes, device)
        self._limits = Limits.compiled(compute)
        if compute == "tf32" and presets.get(self._settings["preset"]).autotunes:
            self._limits = dataclasses.replace(self._limits, tilt=_TILT)
        run = self._step(self._next())

        def noted() -> Any:
            self._draws.clear()
            with recording_draws(self._draws):
                return self._eagerly(run)

        again = functools.partial(self._eagerly, run)
        try:
            _, spread = proof.spread_of(self.program, noted, again, self._limits)
        except CandidateFailedError as error:
            raise (error.__cause__ or error) from None
        if not isinstance(spread, dict):
            raise HotloopError(f"{spread}. Draw from torch's own generators, and name what else changes as state=")
        self._spread = spread
        if self._compiles_itself:
            scalars = counted_rounding(holdings.optimizers.values())
            self._limits = dataclasses.replace(self._limits, scalars=scalars)
        return compute

    def _choose_references(self, compute: str) -> None:
        """Set the dtypes that the reference may be computed in.

        Raises:
            ConfigError: the user asked for a dtype that is not wider than the step's own.
        """
        self._dtypes = list(wider_dtypes(compute))
        if self._asked == "eager":
            self._dtypes, self._why = [], "as asked"
        elif self._asked != "auto":
            wanted = getattr(torch, self._asked)
            if wanted not in self._dtypes:
                known = ", ".join(["auto", *map(_short, self._dtypes), "eager"])
                raise ConfigError(f"reference {self._asked!r}: for a step in {compute} expected one of {known}")
            self._dtypes = [wanted]
        elif not self._dtypes:
            self._why = f"the step itself computes in {compute}"

    def _path(self) -> contextlib.AbstractContextManager[None]:
        """Take the path of compilers for steps that draw random numbers: eager's own would draw other numbers."""
        return traced_path(self.program.device) if self._draws_random else contextlib.nullcontext()

    def _eagerly(self, run: Callable[[], Any]) -> tuple[Any, Mapping[str, torch.Tensor]]:
        with self._path(), uncompiled() as met:  # also without what the program compiles itself
            made = proof.plain_run(self.program.holdings, run)
        self._compiles_itself |= bool(met)
        return made

    def _run(self, steps: int) -> Outcome | None:
        """Run and compare the steps, again if chance may explain what is past its limit; return the joined outcome."""
        joined: Outcome | None = None
        for _ in range(_ROUNDS):
            for _ in range(steps):
                self._prove_step()
                if self._failed:
                    return joined
            joined = over_steps(self._outcomes)
            if joined.agrees or joined.far_off:
                break
        return joined

    def _prove_step(self) -> None:
        """Run one step in the reference's dtype, compiled and eagerly, and compare."""
        call = self._next()
        run, holdings = self._step(call), self.program.holdings
        with self.compiled.aside():
            wide, reference = self._wide(call)

        def eager() -> Any:
            with self.compiled.aside():
                return self._eagerly(run)

        def candidate() -> Any:
            if self.program.device.type == "cuda":  # a preset may capture for itself
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            return proof.plain_run(holdings, run)

        try:
            outcome = proof.prove_step(self.program, candidate, eager, self._limits, spread=self._spread, wide=wide)
        except CandidateFailedError as error:
            self._failed = f"compiled code failed: {describe(error.__cause__ or error)}"
            if not error.undone:
                raise HotloopError(f"{self._failed}, and could not be undone") from error
            eager()  # if eager raises as well, the exception is the user's own, and passes
            return
        self._outcomes.append(outcome)
        self._calls.append(call)
        agrees, number = outcome.agrees, len(self._steps)
        self._steps.append(StepVerdict(number, agrees, outcome.worst, "" if agrees else outcome.why, reference))
        _log.info("verify: step %d %s", number + 1, "agrees" if agrees else f"does not agree: {outcome.why}")

    def _wide(self, call: Call) -> tuple[Mapping[str, torch.Tensor | None] | None, str]:
        """Run a step in the widest dtype that it runs in; return its values (None for eager) and the dtype's name."""
        with self._path():
            values, why = step_in_first(self.program, call, self._dtypes, self._draws)
        if why and self._asked not in ("auto", "eager"):
            raise HotloopError(f"there is no reference in {why}")
        if why:
            self._why = f"not {why}"
        self._dtype = self._dtypes[0] if self._dtypes else None
        return values, "eager" if self._dtype is None else _short(self._dtype)

    def _search(self, seconds: float) -> Culprit | None:
        """Search for the region at fault, from the present state on the batches that disagreed."""
        if seconds <= 0:
            return None
        _log.info("verify: searching for the region at fault")
        self.compiled.remove()
        try:
            calls = [self._kept(call) for call in self._calls[:STEPS]]
            tests = culprit.Tests(
                self.program,
                self.compiled.models,
                calls,
                limits=self._limits,
                settings=self._settings,
                seconds=seconds,
            )
            with self._path():
                wrong = tests.disagrees_now()
            if wrong:  # else each region would be blamed
                how = "it disagrees where hotloop compiles nothing: look at the code that the program compiles itself"
                return Culprit((), how, 1, tests.spent)
        except CandidateFailedError as error:
            return Culprit((), f"no search: a step failed: {describe(error.__cause__ or error)}", 0, 0.0)
        return culprit.search(self.compiled.models, tests)

    def _kept(self, call: Call) -> tuple[Callable[[], Any], StepOutputs]:
        """Run a step eagerly and in more bits, and undo both; return a function that runs it, and its values."""
        run = self._step(call)
        wide, _ = self._wide(call)
        return run, StepOutputs.of(self.program, functools.partial(self._eagerly, run), wide, spread=self._spread)


def _visible(comparisons: Mapping[str, Comparison]) -> float | None:
    """Return the slope that a typical gradient may have; None if no gradient was judged alone."""
    scores = comparisons["gradient"].scores if "gradient" in comparisons else ()
    limits = [score.limit for score in scores if score.measure == "slope" and score.name != ALL]
    return statistics.median(limits) if limits else None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
