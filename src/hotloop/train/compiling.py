"""Compiling a recipe's components as the settings say, the status lines about it, and the measured speed-up."""

from __future__ import annotations

import contextlib
import statistics
from typing import TYPE_CHECKING, Any

import torch

from hotloop import presets
from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import status as status_of
from hotloop.compiling.control import validate
from hotloop.errors import ConfigError, PresetUnavailableError
from hotloop.events import Compiled, Event, Recompiled, Unavailable
from hotloop.report.series import ENOUGH
from hotloop.step.capture.engines import engine_for
from hotloop.step.tiers import CHANNELS_LAST
from hotloop.train.rehearse import without_graphs
from hotloop.train.settings import CompileSettings, ComponentSettings, PresetSettings, Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hotloop.presets import Preset
    from hotloop.train.task import Plan

STEADY_STEPS = 10
"""Compiled steps without a compile in them that are timed before a speed-up is stated."""
PREFIX = "[torch.compile]"
_TRY = "run `hotloop harness` on the program to see each finding; or choose a preset without CUDA graphs"
DISABLED = f"{PREFIX} Disabled (eager execution mode)"


def plan(settings: Settings, components: Iterable[str]) -> Plan:
    """Resolve which component gets which presets; empty where nothing is to be compiled.

    With ``use_torch_compile=auto`` a loop owns the training steps, and only presets of inference are planned.

    Raises:
        ConfigError: a preset or component that does not exist, with those that do.
    """
    chosen, known = settings.compile, tuple(components)
    nothing = ComponentSettings(training="none", inference="none")
    own = {name: presets.from_mapping(name, _given(one)) for name, one in chosen.presets.items()}
    for name in chosen.components:
        # The shipped settings name the loss for all recipes, those without a part of this name too.
        if name not in known and (name, chosen.components[name]) != ("loss", nothing):
            raise ConfigError(f"compile.components.{name}: no such component; expected one of {', '.join(known)}")

    def find(name: str) -> Preset:
        try:
            return own[name] if name in own else presets.get(name)
        except ConfigError as error:
            raise ConfigError(f"compile: {error}") from error

    for rung in chosen.ladder or ():
        find(rung)
    found = {}
    for name in known:
        one = chosen.components.get(name, ComponentSettings())
        found[name] = find(one.training or chosen.preset), find(one.inference or chosen.inference)
    asked = settings.training.optimization.use_torch_compile
    if asked == "auto":
        found = {name: (presets.get("none"), off) for name, (_, off) in found.items()}
    elif not asked:
        return {}
    return {name: both for name, both in found.items() if any(preset.backend != "eager" for preset in both)}


def _given(preset: PresetSettings) -> dict[str, Any]:
    return {key: value for key, value in vars(preset).items() if value is not None}


def check(chosen: Plan, whole: Settings, device: str) -> None:
    """Refuse what this torch does not know, and under strict what this machine cannot run, before anything is loaded.

    Raises:
        ConfigError: a setting that cannot be used, by its name.
    """
    settings, auto = whole.compile, whole.training.optimization.use_torch_compile == "auto"
    if auto and settings.layout == CHANNELS_LAST and engine_for(torch.device(device)) is None:
        raise ConfigError(
            f"compile.layout={settings.layout}: auto tries this layout on a GPU only, and this run is on {device}. "
            "Leave it out"
        )
    try:
        validate("default", options=settings.options or None)
        for training, inference in chosen.values():
            options = settings.options or None
            validate(training, device=device, inference=inference, options=options, strict=settings.strict)
    except PresetUnavailableError as error:
        raise ConfigError(
            f"compile.strict=true: {error}. Choose another preset (compile.preset=default), or compile.strict=false"
        ) from error
    except ConfigError as error:
        raise ConfigError(f"compile.preset or compile.options: {error}") from error


class Compiling:
    """Compiles the parts at the step that the settings say, and tells what came of it.

    Args:
        chosen: the plan of `plan`.
        settings: the run's.
        parts: the recipe's components by name; what cannot be compiled in place is replaced in it.
        say: prints a line.
        steps: that the run will have, all of it; the eager ones that are measured are at most half of them.
        rehearsal: tries the CUDA graphs of a plan on copies before they are turned on, and says why they are not safe
            here; None turns them on untried.
    """

    def __init__(  # noqa: PLR0913 - what is compiled, by which settings, in which run
        self,
        chosen: Plan,
        settings: Settings,
        parts: dict[str, Any],
        say: Callable[[str], None],
        *,
        steps: int,
        rehearsal: Callable[[Plan], str] | None = None,
    ) -> None:
        self.chosen, self.settings, self.parts, self._say, self._rehearsal = chosen, settings, parts, say, rehearsal
        self._measured = min(settings.compile.measure_eager_steps, steps // 2)
        self._left_eager: dict[str, dict[str, Any]] = {}
        self.running = "none"
        self.applied = False
        self._said: set[str] = set()
        self._eager: list[tuple[float, int]] = []
        self._done_before = 0
        self._steady: list[tuple[float, int]] = []
        self._compiled_steps = 0

    def announce(self) -> None:
        """Say at the start what will run."""
        if self.chosen:
            eager = self._measured
            first = f"after {eager} eager steps, timed to measure the speed-up" if eager else "at the first step"
            self._say(f"{PREFIX} Compiling {self.names()} {first}; the first steps then take longer, which is normal")
            return
        self._say(DISABLED)

    def resumed(self, step: int, state: Mapping[str, Any] | None = None) -> None:  # noqa: ARG002 - a hot loop's has one
        """Go on after so many steps: what an uninterrupted run has compiled by now is compiled at once."""
        self._done_before = step

    def before_step(self) -> None:
        """Compile once the eager steps to measure are done; what compiles does so in the steps that follow."""
        done = self._done_before + len(self._eager)
        if done >= self._measured:
            self.put_on()

    def put_on(self) -> None:
        """Compile what is safe here, if that was not done yet."""
        if self.chosen and not self.applied:
            self._rehearse()
        if self.chosen and not self.applied:
            apply(self.chosen, self.settings.compile, self.parts)
            self.applied = True
            self.running = self._main().running

    def _rehearse(self) -> None:
        """Try CUDA graphs on copies; where they are not safe for this run, what was to have them stays eager."""
        device = next((one.device.type for one in _parameters(self.parts)), "cpu")
        safe = without_graphs(self.chosen, device)
        changed = {name: both for name, both in self.chosen.items() if safe.get(name) != both}
        if self._rehearsal is None or not changed:
            return
        reason = self._rehearsal(changed)
        names = ", ".join(dict.fromkeys(one.name for both in changed.values() for one in both if one.cudagraphs))
        if not reason:
            self._say(f"{PREFIX} {names}: tried on copies of the model, training and inference, and safe here")
            return
        self._say(f"{PREFIX} Compilation failed: {names} is not safe here: {reason}. Running in eager mode.")
        self.chosen = safe
        self._left_eager |= {name: _left(both, reason, _TRY) for name, both in changed.items()}

    def after_step(self, seconds: float, tokens: int, events: Sequence[Event]) -> None:
        """Record a step: its time, how many tokens it had with padding, and what was observed in it."""
        if not self.applied:
            self._eager.append((seconds, tokens))
            return
        first = self._compiled_steps == 0
        self._compiled_steps += 1
        if first or events:
            self._report(first=first)
        if not first and not compiles_in(events):
            self._steady.append((seconds, tokens))
            if len(self._steady) == STEADY_STEPS:
                self._say_speed_up()

    def after_validation(self, events: Sequence[Event]) -> None:
        """Record what was observed while gradients were off."""
        if self.applied and events:
            self._report(first=False)

    def unrecorded(self, events: Sequence[Event]) -> list[Event]:
        """Return the events that nobody else writes into the record: all of them."""
        return list(events)

    def validating(self) -> contextlib.AbstractContextManager[None]:
        """Surround what runs without gradients between the steps, such as a validation, in ``compile.inference``."""
        return contextlib.nullcontext()

    def status(self) -> dict[str, dict[str, Any]]:
        """Return each component's status as plain data; of those that are not compiled, why not."""
        found = status_of(self.parts).components if self.applied else {}
        eager = {"requested": "none", "running": "none", "state": "eager", "causes": []}
        waiting = {} if self.applied else {name: _left(both, self._not_yet(), "") for name, both in self.chosen.items()}
        left = {name: self._left_eager.get(name, waiting.get(name, eager)) for name in self.parts}
        return {name: found[name].to_dict() if name in found else left[name] for name in self.parts}

    @property
    def speed_up(self) -> float | None:
        """How many times as fast as eager a steady compiled step is, by medians; None where too few were measured.

        Seconds for a token are compared, since with several lengths the steps timed are of different sizes.
        """
        if len(self._steady) < STEADY_STEPS or len(self._eager) < ENOUGH:
            return None
        return _seconds_a_token(self._eager[1:]) / _seconds_a_token(self._steady)

    def figures(self) -> dict[str, float | None]:
        """Return the measurements that belong into the record."""
        return {"speed_up": self.speed_up}

    def summary(self) -> list[str]:
        """Return what is to be said at the end beside each component's status."""
        return [] if self.applied or not self.chosen else [f"Not compiled: {self._not_yet()}"]

    def _not_yet(self) -> str:
        """Say why nothing is compiled in a run as short as this one is by now."""
        first, done = self._measured, self._done_before + len(self._eager)
        return f"compile.measure_eager_steps has the first steps run eager, here {first}, and there were {done}"

    def state_dict(self) -> dict[str, Any] | None:
        """Return what a checkpoint keeps: nothing, since all of it follows from the number of steps."""
        return None

    def close(self) -> None:
        """Let go of what outlives a run: nothing."""

    def _main(self) -> Any:
        """Return the status of the component that stands for the run: the first that is compiled for training."""
        found = status_of(self.parts).components
        asked = [name for name, (training, _) in self.chosen.items() if training.backend != "eager"]
        return found[(asked or list(self.chosen))[0]]

    def _report(self, *, first: bool) -> None:
        found = status_of(self.parts).components
        self.running = self._main().running
        compiled = []
        for name in self.chosen:
            status = found[name]
            for line in problems(name if len(self.chosen) > 1 else "", status):
                self._say_once(line)
            if status.state in ("compiled", "partial") and status.running == status.requested:
                compiled.append(status.requested)
        if first and compiled:
            self._say_once(f"{PREFIX} Model compiled with graph optimization ({', '.join(dict.fromkeys(compiled))})")

    def _say_speed_up(self) -> None:
        gain = self.speed_up
        if gain is None or self.running == "none":
            return
        usual = statistics.median(tokens for _, tokens in self._steady)
        eager, steady = (1000 * usual * _seconds_a_token(one) for one in (self._eager[1:], self._steady))
        slower = (
            "" if gain >= 1 else "; slower than eager: training.optimization.use_torch_compile=false would be faster"
        )
        self._say_once(
            f"{PREFIX} Model compiled with graph optimization ({self.running}: {gain:.2f} times the eager speed, "
            f"{steady:.0f} ms against {eager:.0f} ms a step{slower})"
        )

    def _say_once(self, line: str, key: str | None = None) -> None:
        """Say a line the first time; lines of one key count as one."""
        if (key or line) not in self._said:
            self._said.add(key or line)
            self._say(line)

    def names(self) -> str:
        """Name what is to be compiled, each with its preset."""

        def named(training: Preset, inference: Preset) -> str:
            return training.name if training.backend != "eager" else f"{inference.name}, in inference alone"

        return ", ".join(f"{name} ({named(*both)})" for name, both in self.chosen.items())


def _left(both: tuple[Preset, Preset], reason: str, hint: str) -> dict[str, Any]:
    """Return the status of a component that was to be compiled and runs eager."""
    cause = {
        "reason": reason,
        "stage": "harness" if hint else "",
        "file": None,
        "line": None,
        "source": "",
        "hint": hint,
    }
    training, inference = both
    return {
        "requested": training.name, "inference": inference.name, "running": "none", "state": "eager", "causes": [cause],
    }  # fmt: skip


def _parameters(parts: Mapping[str, Any]) -> Iterator[torch.nn.Parameter]:
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            yield from part.parameters()


def _seconds_a_token(steps: Iterable[tuple[float, int]]) -> float:
    return statistics.median(seconds / tokens for seconds, tokens in steps)


def apply(chosen: Plan, settings: CompileSettings, parts: dict[str, Any]) -> None:
    """Compile the parts of a plan in place."""
    compile_in_place(
        parts,
        {name: training for name, (training, _) in chosen.items()},
        inference={name: inference for name, (_, inference) in chosen.items()},
        **arguments(settings),
    )


def arguments(settings: CompileSettings) -> dict[str, Any]:
    """Return the arguments of `hotloop.compile` besides the presets."""
    return {
        "regions": settings.regions,
        "dynamic": ... if settings.dynamic is None else settings.dynamic,
        "fullgraph": settings.fullgraph,
        "options": settings.options or None,
        "ladder": settings.ladder,
        "strict": settings.strict,
    }


def problems(name: str, status: Any) -> list[str]:
    """Say in the lines that people look for what of a component does not run as asked, and why."""
    asked = status.inference if status.requested == "none" else status.requested  # compiled for one of both alone
    if status.state == "pending" or (status.state == "compiled" and status.running == asked):
        return []
    label = f"{name}: " if name else ""
    if any(cause.stage == "disabled" for cause in status.causes):
        return [DISABLED, f"{label}{status.causes[0].reason}"]
    running = "Running in eager mode" if status.running == "none" else f"Running in preset {status.running}"
    told = []
    for cause in status.causes:
        if cause.stage == Unavailable.kind:
            told.append(f"{PREFIX} Not available here: {label}{_reason(cause)}. {running}.")
        elif status.running == asked:
            told.append(f"{PREFIX} Compiled in part: {label}{_reason(cause)}.")
        else:
            told.append(f"{PREFIX} Compilation failed: {label}{_reason(cause)}. {running}.")
    return told or [f"{PREFIX} Compilation failed: {label}no cause is known. {running}."]


def _reason(cause: Any) -> str:
    text = next((line.strip() for line in str(cause.reason).splitlines() if line.strip()), "no reason given").rstrip(
        "."
    )
    return f"{text} ({cause.file}:{cause.line})" if cause.file else text


def compiles_in(events: Iterable[Event]) -> bool:
    """Say whether a step with these events spent time compiling."""
    return any(isinstance(event, Compiled | Recompiled) for event in events)
