"""``use_torch_compile=auto``: a hot loop runs the steps, and this tells what it decided, what that saved, and why.

What is called without gradients, before a step and between the steps, runs in presets of inference that were asked for.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

from hotloop.decide import EAGER_STEPS
from hotloop.errors import StepLostError
from hotloop.events import (
    Captured,
    CaptureDropped,
    Event,
    SentinelDisagreed,
    StepsStale,
    StepUndone,
    TierChanged,
    TierDeclined,
    TierProven,
)
from hotloop.step.tiers import Tier, parse
from hotloop.train.between import Between
from hotloop.train.compiling import DISABLED, PREFIX, Compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hotloop.step import Loop, LoopStatus
    from hotloop.train.settings import Settings

_WRITTEN_BY_THE_LOOP = (
    Captured,
    CaptureDropped,
    SentinelDisagreed,
    StepsStale,
    StepUndone,
    TierChanged,
    TierDeclined,
    TierProven,
)
_FIGURES = re.compile(r"[\d.,]+")


class Automatic(Compiling):
    """Runs steps through a hot loop, and says each decision once.

    Args:
        settings: the run's.
        parts: the recipe's components by name.
        say: prints a line.
        loop: owns the step; it writes its decisions, verdicts and events into the run's record itself.
        update: the step that it owns.
        between: compiles components for their calls without gradients; they run so outside of the steps alone.
    """

    def __init__(  # noqa: PLR0913 - a run, the loop that owns its steps, and what runs between them
        self,
        settings: Settings,
        parts: dict[str, Any],
        say: Callable[[str], None],
        loop: Loop,
        update: Callable[..., Any],
        *,
        between: Compiling | None = None,
    ) -> None:
        super().__init__({}, settings, parts, say, steps=0)
        self._loop, self._step = loop, loop.step(update)
        self.running = "eager"
        self._between = Between(between) if between is not None and between.chosen else None
        self._told = 0
        self._lost = False

    def announce(self) -> None:
        """Say at the start what will run."""
        if self._disabled:
            self._say(DISABLED)
            for why in self._loop.account.decisions:
                self._say(f"{PREFIX} {why}")
            return
        self._say(
            f"{PREFIX} auto: steps start eager and are timed; from step {self._loop.steps + EAGER_STEPS + 1} on, what "
            f"is expected to pay within this run is prepared, proven against eager, and timed beside it"
        )
        if self._between is not None and (names := self._between.names()):
            self._say(f"{PREFIX} Compiling {names}, outside of the steps")
        for name in self._between.left if self._between is not None else ():
            self._say(
                f"{PREFIX} auto leaves {name} eager without gradients as well: compile.components.{name}.inference "
                "needs a module, and it is a function"
            )

    def resumed(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Go on after so many steps, with what the loop had learnt; the steps of another policy taught it nothing."""
        self._loop.load_state_dict(state or {"steps": step})

    def step(self, *given: Any) -> Any:
        """Do an optimizer step the fastest way that is right; gives what the update gives."""
        try:
            return self._step(*given)
        except StepLostError:
            self._lost = True
            raise

    def after_step(self, seconds: float, tokens: int, events: Sequence[Event]) -> None:  # noqa: ARG002 - the loop's clock has them
        """Record what the loop ran and decided, and say it."""
        self._loop.settle()
        self.running = self._loop.account.running or "eager"
        # Where the environment switches everything off, that was announced, and there is nothing to decide.
        for decision in () if self._disabled else self._loop.account.decisions[self._told :]:
            # The same decision with other figures is no news.
            self._say_once(f"{PREFIX} auto at step {self._loop.steps}: {decision}", key=_FIGURES.sub("", decision))
        self._told = len(self._loop.account.decisions)
        for event in events:
            if line := _line(event):
                self._say_once(line)
        if self._between is not None:
            self._between.observed(events)

    def after_validation(self, events: Sequence[Event]) -> None:
        """Record what was observed while gradients were off."""
        if self._between is not None:
            self._between.observed(events)

    def unrecorded(self, events: Sequence[Event]) -> list[Event]:
        """Return the events that the loop did not write into the record itself."""
        return [event for event in events if not isinstance(event, _WRITTEN_BY_THE_LOOP)]

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Keep the loop's code out: another mode is another compile, which seldom pays. What was asked for runs."""
        with (
            self._loop.context.eager(),
            self._between.in_force() if self._between is not None else contextlib.nullcontext(),
        ):
            yield

    def status(self) -> dict[str, dict[str, Any]]:
        """Return each component's status as plain data. Of the step, the loop's models alone are ever compiled."""
        tier = self._in_force
        found = self._loop.context.compiled.status().components if tier.compiles else {}
        disabled = {"reason": DISABLED.removeprefix(f"{PREFIX} "), "stage": "disabled"}
        causes = [disabled] if self._disabled else []
        rest = tier if tier.channels_last else Tier("eager", tier.graph)
        others = {"requested": "auto", "running": rest.name, "state": _state(rest), "causes": causes}
        compiled = {name: {**one.to_dict(), "requested": "auto", "running": tier.name} for name, one in found.items()}
        both = {name: compiled.get(name, others) for name in self.parts}
        return self._between.beside(both) if self._between is not None else both

    @property
    def speed_up(self) -> float | None:
        """How many times as fast as eager a step is now, by medians; None while steps are eager."""
        seen, tier = self._seen(), self._in_force.name
        now = next((one.step_seconds for one in seen.tiers if one.name == tier), None)
        return seen.eager_seconds / now if tier != "eager" and seen.eager_seconds and now else None

    def figures(self) -> dict[str, float | None]:
        """Return the measurements that belong into the record."""
        seen = self._seen()
        eager = seen.eager_seconds
        return {
            **super().figures(),
            "eager_step_ms": 1000 * eager if eager else None,
            "seconds_saved": seen.seconds_saved,
            "prepare_seconds": seen.prepare_seconds,
        }

    def summary(self) -> list[str]:
        """Say at the end what auto decided, why, and what that saved."""
        if self._disabled:
            return []
        seen = self._seen()
        ran = ", ".join(_steps(one.steps, one.name, one.step_seconds) for one in seen.tiers if one.steps)
        saved = f"{seen.seconds_saved:.1f} s saved, {seen.prepare_seconds:.1f} s spent on preparing and proving"
        decided = seen.decisions[-1] if seen.decisions else f"nothing: it times {EAGER_STEPS} eager steps first"
        declined = [f"auto declined {one.name}: {one.why}" for one in seen.tiers if one.state == "declined"]
        return [f"auto ran {ran or 'no step'}; {saved}", *declined, f"auto decided: {decided}"]

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the loop."""
        return self._loop.state_dict()

    def close(self) -> None:
        """Let go of what the loop holds. After a lost step the GPU may be lost too, and nothing answers any more."""
        with contextlib.suppress(RuntimeError) if self._lost else contextlib.nullcontext():
            self._loop.close()

    @property
    def _in_force(self) -> Tier:
        """The tier that was decided; the last step may have been another's, in a trial."""
        return self._loop.policy.in_force

    @property
    def _disabled(self) -> bool:
        return not self._loop.policy.chooses

    def _seen(self) -> LoopStatus:
        """Return the loop's status without asking the device, which may be lost: `after_step` has done that."""
        return self._loop.status(settle=False)


def _state(tier: Tier) -> str:
    return "captured" if tier.graph else "eager"


def _steps(many: int, tier: str, seconds: float | None) -> str:
    took = f" ({1000 * seconds:.2f} ms each)" if seconds is not None else ""
    return f"{many:,} {'step' if many == 1 else 'steps'} {tier}{took}"


def _words(tier: Tier) -> tuple[str, str]:
    """Say what a tier does, where it was proven and where it was declined."""
    if tier.compiles:
        return "Model compiled with graph optimization", "Compilation failed"
    if tier.graph:
        return "Step captured as one graph", "Not captured"
    return "Convolutions laid out channels last", "Not laid out channels last"


def _line(event: Event) -> str:
    """Say an event of the loop's in the words that people look for; empty where it needs none."""
    if isinstance(event, TierProven):
        return f"{PREFIX} {_words(parse(event.tier))[0]} ({event.tier}: agrees with eager on {event.steps} steps)"
    if isinstance(event, TierDeclined):
        at = f" ({event.location})" if event.location else ""
        return f"{PREFIX} {_words(parse(event.tier))[1]}: {event.tier}: {event.reason.rstrip('.')}{at}. {event.hint}"
    if isinstance(event, SentinelDisagreed):
        return f"{PREFIX} Step {event.step + 1} in {event.tier} does not agree with eager: {event.reason}"
    if isinstance(event, StepUndone):
        return f"{PREFIX} Step {event.step + 1} failed in {event.tier} and was done eagerly: {event.reason}"
    return ""
