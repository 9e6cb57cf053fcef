"""Is it the same training? A program's own steps, compiled, held against eager and the same steps in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal

import torch

from hotloop import presets
from hotloop._torch.products import products_in_tf32
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.fallback.causes import describe
from hotloop.errors import ConfigError, HotloopError
from hotloop.measure import ALL, Limits, differences, flatten
from hotloop.presets import Preset
from hotloop.prove.verify.verdict import StepVerdict, Verdict, worst_of
from hotloop.prove.workloads import same_random_numbers, survey_training
from hotloop.step.audit.auditor import GRADIENTS_OF_ARGUMENTS
from hotloop.step.capture.engines import traced_path
from hotloop.step.compiled import Compiled, as_eager_draws
from hotloop.step.loop.arguments import device_of
from hotloop.step.obstacle import CandidateFailedError
from hotloop.step.prove import culprit, proof
from hotloop.step.prove.culprit import Culprit
from hotloop.step.prove.outcomes import Outcome, over_steps
from hotloop.step.prove.step_outputs import StepOutputs
from hotloop.step.prove.wide_reference import Draw, NotRepeatableError, candidates, noting_draws, wide_step
from hotloop.step.state.ambient import compute_dtype
from hotloop.step.state.program import Program
from hotloop.step.state.snapshot import Snapshot
from hotloop.step.tiers import parse
from hotloop.step.workload import Workload, arguments, load_factory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.measure import Difference

Reference = Literal["auto", "float64", "float32", "eager"]
REFERENCES = ("auto", "float64", "float32", "eager")
STEPS = proof.STEPS
SEARCH_SECONDS = 300.0
_ROUNDS = 3
"""Where limits are passed by so little that chance may do it, the steps are run so many times, and all judged."""
_log = logging.getLogger("hotloop")


def verify(  # noqa: PLR0913 - the public settings
    workload: Workload | Callable[[], Workload] | str,
    preset: str | Preset = "inductor",
    *,
    steps: int = STEPS,
    reference: Reference = "auto",
    search: bool = True,
    search_seconds: float = SEARCH_SECONDS,
) -> Verdict:
    """Say whether a program trains the same when it is compiled: results, gradients, updates, buffers of real steps.

    Each step runs eagerly, compiled, and in float64, from the same state on the same batch with the same random
    numbers; eager's outcome stays, so that the next step begins where eager training is. In float32 the compiled step's
    error against float64 may be a few times eager's; under bf16, fp16 and TF32 the slope and residual of each tensor
    against eager tell. The step's Python runs several times a step. A `Workload` is afterwards as it was.

    Args:
        workload: the program, a function that makes it, or ``"file.py:function"``.
        preset: what to compile its models with: a preset, or a tier without a graph (``"regional"``).
        steps: how many steps to hold against each other, 1 or more, besides the two that are looked at before.
        reference: ``"float64"``; ``"float32"`` for steps that compute in fewer bits; ``"eager"`` alone; ``"auto"``
            takes the widest that runs and fits in memory.
        search: where it fails, compile its regions one at a time to find the one at fault.
        search_seconds: how long that may take.

    Raises:
        ConfigError: a setting does not fit, the models are compiled already, several processes train together, a batch
            requires gradients, or the step trains nothing.
        HotloopError: the step does not repeat itself from the same state, so that nothing can be held against it.
        Exception: what the program itself raises.
    """
    settings = _settings(preset, steps, reference, search_seconds)
    given = isinstance(workload, Workload)
    found = _made(workload)
    case = _Case(found, settings, reference)
    before = Snapshot(case.program.holdings, [case.program.device]) if given else None
    try:
        with same_random_numbers():
            return case.verdict(steps, search_seconds if search else 0.0)
    finally:
        case.compiled.remove()
        if before is not None:
            before.restore()


def _settings(preset: Any, steps: Any, reference: Any, search_seconds: Any) -> tuple[str, dict[str, Any]]:
    """Check what was asked for; gives the name of what is verified and the arguments of `hotloop.compile`."""
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"steps {steps!r}: expected a whole number of 1 or more")
    if reference not in REFERENCES:
        raise ConfigError(f"reference {reference!r}: expected one of {', '.join(REFERENCES)}")
    if isinstance(search_seconds, bool) or not isinstance(search_seconds, int | float) or search_seconds < 0:
        raise ConfigError(f"search_seconds {search_seconds!r}: expected a number of seconds, 0 or more")
    if not isinstance(preset, Preset | str):
        raise ConfigError(f"preset {preset!r}: expected a preset, or its name")
    if isinstance(preset, Preset):
        if preset.backend == "eager":
            raise ConfigError(f"preset {preset.name!r}: expected one that compiles")
        return preset.name, {"preset": as_eager_draws(preset)}
    name = preset.strip().lower()
    known = [one for one, found in presets.PRESETS.items() if found.backend != "eager"] + ["regional", "full"]
    if name not in known and name.replace("_", "-") not in known:
        raise ConfigError(f"preset {preset!r}: {presets.expected(name, known)}; a Loop proves captured steps itself")
    tier = parse(preset)
    return tier.base, {**tier.settings, "preset": as_eager_draws(presets.get(tier.settings["preset"]))}


def _made(workload: Any) -> Workload:
    made = load_factory(workload)() if isinstance(workload, str) else workload
    made = made() if callable(made) and not isinstance(made, Workload) else made
    if not isinstance(made, Workload):
        raise ConfigError(f"workload {workload!r}: expected a hotloop.Workload, a function that makes one, or its name")
    return made


class _Case:
    """One program under verification."""

    def __init__(self, workload: Workload, asked: tuple[str, dict[str, Any]], reference: Reference) -> None:
        self._workload, (self._name, self._settings), self._asked = workload, asked, reference
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
        self._draws_random = False
        self._spread: dict[str, Difference] = {}
        self._limits = Limits.rounding()
        self._dtypes: list[torch.dtype] = []
        """What references may be computed in, the widest first, and which the last one was."""
        self._dtype: torch.dtype | None = None
        self._why = ""
        self._failed = ""
        self._steps: list[StepVerdict] = []
        self._outcomes: list[Outcome] = []
        self._tried: list[tuple[Any, ...]] = []

    def verdict(self, steps: int, search_seconds: float) -> Verdict:
        """Run the steps, and search for what is at fault."""
        began = time.perf_counter()
        compute = self._look()
        self._compile()
        joined = self._run(steps)
        idle = self.compiled.idle() or self._stepped_down()
        why = self._failed or (joined.why if joined is not None and not joined.agrees else "")
        ran = {name: one.to_dict() for name, one in self.compiled.status().components.items()}
        if not why and idle:
            why = f"not compiled as asked: {idle}"
        blamed = None
        if joined is not None and not joined.agrees and not joined.failed and not joined.random_moved:
            blamed = self._blame(search_seconds)
        comparisons = joined.comparisons if joined is not None else {}
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
            ran={name: {key: one.get(key) for key in ("state", "running")} for name, one in ran.items()},
            blamed=blamed,
            seconds=time.perf_counter() - began,
            copied_bytes=joined.nbytes if joined is not None else 0,
            environment={"torch": torch.__version__, "device": _device(self.program.device)},
        )

    def _stepped_down(self) -> str:
        """Say what ran on a lower rung: a verdict on another preset's code is none on this one's."""
        for name, one in self.compiled.status().components.items():
            if one.fallbacks or one.running not in ("none", one.requested):
                causes = "; ".join(dict.fromkeys(cause.reason for cause in one.causes))
                return f"{name} ran in part on a lower rung than {one.requested}: {causes}"
        return ""

    # -- before ----------------------------------------------------------------------------------------------------

    def _next(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return arguments(next(self._batches)), {}

    def _step(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Callable[[], Any]:
        return functools.partial(self._workload.step, *call[0], **call[1])

    def _look(self) -> str:
        """Run two real steps eagerly: one looked at, one twice, to learn how far eager is from itself."""
        holdings, device = self.program.holdings, self.program.device
        call = self._next()
        inputs = _tensors_of(call)
        _log.info("verify: looking at a step")

        def another() -> Any:
            return self._step(self._next())()

        seen = survey_training(holdings, device, inputs, self._step(call), another)
        self._draws_random = seen.random_operations > 0
        holdings.found += seen.written_found
        holdings.gradients_altered = seen.altered
        compute = compute_dtype(seen.matrix_dtypes, device)
        self._limits = Limits.compiled(compute)
        run = self._step(self._next())

        def noted() -> Any:
            self._draws.clear()
            with noting_draws(self._draws):
                return self._eagerly(run)

        again = functools.partial(self._eagerly, run)
        try:
            _, spread = proof.spread_of(self.program, noted, again, self._limits)
            if compute == "tf32" and presets.get(self._settings["preset"]).autotunes:
                self._limits = dataclasses.replace(self._limits, leans=self._leans(run))
        except CandidateFailedError as error:
            raise (error.__cause__ or error) from None
        if not isinstance(spread, dict):
            why = spread.why if isinstance(spread, proof.Unlike) else spread
            raise HotloopError(f"{why}. Draw from torch's own generators, and name what else changes as state=")
        self._spread = spread
        self._dtypes = list(candidates(compute))
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
        return compute

    def _leans(self, run: Callable[[], Any]) -> dict[str, float]:
        """Run a step with each way to make TF32 numbers; gives the tilt of one against the other, by tensor."""

        def made(how: Literal["rounded", "cut"]) -> dict[str, torch.Tensor | None]:
            def so() -> Any:
                with products_in_tf32(how):
                    return self._eagerly(run)

            found = StepOutputs.of(self.program, so)
            begun = found.start  # parameters are held against each other by their updates
            return {
                name: one - begun[name] if one is not None and name in begun else one
                for name, one in found.ours.items()
            }

        found, _ = differences(made("rounded"), made("cut"))
        return {name: one.tilt for name, one in found.items() if one.tilt is not None}

    def _path(self) -> contextlib.AbstractContextManager[None]:
        """Run eager code on the path that compilers take, where another would draw other random numbers."""
        return traced_path(self.program.device) if self._draws_random else contextlib.nullcontext()

    def _eagerly(self, run: Callable[[], Any]) -> tuple[Any, Mapping[str, torch.Tensor]]:
        with self._path():
            return proof.plain_run(self.program.holdings, run)

    def _compile(self) -> None:
        for model in self.compiled.models.values():
            compile_in_place(model, **self._settings)
        self.compiled.base = self._name

    # -- the steps -------------------------------------------------------------------------------------------------

    def _run(self, steps: int) -> Outcome | None:
        joined: Outcome | None = None
        for _ in range(_ROUNDS):
            for _ in range(steps):
                self._one()
                if self._failed:
                    return joined
            joined = over_steps(self._outcomes)
            if joined.agrees or joined.hopeless:
                break
        return joined

    def _one(self) -> None:
        """Run one step every way."""
        call = self._next()
        run, holdings = self._step(call), self.program.holdings
        with self.compiled.aside():
            wide, said = self._wide(call)

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
            eager()  # what it raises as well is the user's own, and passes
            return
        self._outcomes.append(outcome)
        self._tried.append(call)
        agrees = outcome.agrees
        self._steps.append(StepVerdict(len(self._steps), agrees, outcome.worst, "" if agrees else outcome.why, said))
        _log.info("verify: step %d %s", len(self._steps), "agrees" if agrees else f"does not agree: {outcome.why}")

    def _wide(
        self, call: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[Mapping[str, torch.Tensor | None] | None, str]:
        """Run the step in the widest dtype that it can be run in; gives its values and the dtype's name."""
        while self._dtypes:
            dtype = self._dtypes[0]
            try:
                with self._path():
                    found = wide_step(self.program, call, dtype, self._draws)
            except NotRepeatableError as error:
                if self._asked not in ("auto", "eager"):
                    raise HotloopError(f"there is no reference in {_short(dtype)}: {error}") from error
                self._why = f"not {_short(dtype)}: {error}"
                self._dtypes.pop(0)
                self._dtype = None
                continue
            self._dtype = dtype
            return found, _short(dtype)
        return None, "eager"

    # -- after -----------------------------------------------------------------------------------------------------

    def _blame(self, seconds: float) -> Culprit | None:
        """Search for the region at fault, from the state of now on the batches that disagreed."""
        if seconds <= 0:
            return None
        _log.info("verify: searching for the region at fault")
        self.compiled.remove()
        try:
            calls = [self._kept(call) for call in self._tried[: proof.STEPS]]
        except CandidateFailedError as error:
            return Culprit((), f"no search: a step failed: {describe(error.__cause__ or error)}", 0, 0.0)
        tests = culprit.Tests(
            self.program,
            self.compiled.models,
            calls,
            limits=self._limits,
            settings=self._settings,
            seconds=seconds,
        )
        return culprit.search(self.compiled.models, tests)

    def _kept(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Callable[[], Any], StepOutputs]:
        """Run a step eagerly and in more bits, each undone; gives what runs it, and what it made."""
        run = self._step(call)
        wide, _ = self._wide(call)
        return run, StepOutputs.of(self.program, functools.partial(self._eagerly, run), wide, spread=self._spread)


def _tensors_of(call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[torch.Tensor]:
    """Give a batch's tensors; one that requires gradients would get them from each run of the step."""
    found = [one for one in flatten(call)[0] if isinstance(one, torch.Tensor)]
    if any(one.requires_grad for one in found):
        raise ConfigError(f"{GRADIENTS_OF_ARGUMENTS}: {GRADIENTS_OF_ARGUMENTS.hint}")
    return found


def _visible(joined: Mapping[str, Any]) -> float | None:
    """Give the slope that a typical gradient may have."""
    scores = joined["gradient"].scores if "gradient" in joined else ()
    limits = [one.limit for one in scores if one.measure == "slope" and one.name != ALL]
    return statistics.median(limits) if limits else None


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
