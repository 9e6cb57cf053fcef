"""The data of a decision: a tier on offer, where the run stands, and the answer."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Source = Literal["measured", "stored", "prior"]
Action = Literal["stay", "prepare", "try", "switch"]

WORST: Mapping[Source, float] = {"measured": 1.05, "stored": 1.1, "prior": 2.0}
"""How many times its expectation a figure may become, unless the option says; chosen, not measured."""

ASK_SECONDS = 5.0
"""Seconds from one decision to the next, if nothing happens."""


def number(value: float | None) -> float | None:
    """Return ``value`` if it is finite and not negative, else None: a clock that jumped is no measurement."""
    return value if value is not None and math.isfinite(value) and value >= 0 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """A tier on offer. The same tier may be offered twice, say in the foreground and through the background.

    Args:
        tier: its name.
        step_seconds: expected seconds of a step there, at the machine's speed of `Standing.eager_seconds`; figures of
            earlier runs are scaled by their eager step.
        prepare_seconds: seconds that training stands still until the tier's first proven step: compile, capture, or
            the swap after a background compile. 0 if the tier stands ready.
        source: the source of the figures: timed in this run, kept from earlier runs of the same model, shapes, hardware
            and versions, or a general expectation (`priors`).
        background_seconds: seconds that a child process compiles while training goes on; None if no child can do it, or
            needs to, as after it has finished.
        contention: seconds of training lost per second of that child, e.g. on a CPU that both share.
        proof_seconds: seconds that the proof adds, about one extra step for each of 3-4 real steps; 0 once proven.
        memory_bytes: what the tier needs on top of eager, or None if unknown.
        chance: chance that the tier can be prepared, proves right and is faster.
        paired: timed step by step beside the tier in force and found faster, in the `Trial` that has just ended (or
            in a trial of an earlier run: ``recalled``).
        recalled: timed beside the tier in force by an earlier run of this process, not by this one.
        by_steps: nothing is compiled for it, so its preparation can be given up between any two steps.
        step_worst_seconds: the slowest a step is believed to be; None takes `WORST` of the source.
        prepare_worst_seconds: the longest the preparation is believed to take; None takes `WORST` of the source.
        again_seconds: seconds of training that a later run of this process takes to get there: capture and proof, since
            compiled code is kept; None if nothing is kept, so that each run pays for all of it.
        rejected_at: steps that were left when a trial last found the tier no better; it is not tried again before the
            horizon has grown `REGROWN` times beyond that.
    """

    tier: str
    step_seconds: float
    prepare_seconds: float
    source: Source
    background_seconds: float | None = None
    contention: float = 0.0
    proof_seconds: float = 0.0
    memory_bytes: int | None = None
    chance: float = 1.0
    paired: bool = False
    recalled: bool = False
    by_steps: bool = False
    step_worst_seconds: float | None = None
    prepare_worst_seconds: float | None = None
    again_seconds: float | None = None
    rejected_at: int | None = None

    @property
    def usable(self) -> bool:
        """Whether all its figures are numbers; otherwise it is never chosen."""
        figures = (self.step_seconds, self.prepare_seconds, self.proof_seconds, self.contention, self.chance)
        optional = [value for value in (self.background_seconds, self.again_seconds) if value is not None]
        return all(number(figure) is not None for figure in (*figures, *optional))

    @property
    def cost_seconds(self) -> float:
        """Expected seconds of training to get there, including the proof."""
        return self.prepare_seconds + self.proof_seconds + self.contention * (self.background_seconds or 0.0)

    @property
    def worst_cost_seconds(self) -> float:
        """Seconds of training to get there at worst, including the proof."""
        given = number(self.prepare_worst_seconds)
        worst = WORST[self.source] * self.prepare_seconds if given is None else max(given, self.prepare_seconds)
        return self.cost_seconds - self.prepare_seconds + worst

    def stake_seconds(self, *, guessed: bool) -> float:
        """Return the seconds that may have to be lost before the option is begun.

        A background compile is no bet yet: after it, the swap is decided on with what is known then. A preparation by
        steps is given up once it costs more than may be lost. A run of ``guessed`` length waits until it can afford
        the worst instead.
        """
        if self.background_seconds is not None or (self.by_steps and not guessed):
            return self.cost_seconds
        return self.worst_cost_seconds

    @property
    def worst_step_seconds(self) -> float:
        """Seconds of a step there at worst."""
        given = number(self.step_worst_seconds)
        return WORST[self.source] * self.step_seconds if given is None else max(given, self.step_seconds)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """Where the run stands. All times in seconds; those of steps at one speed of the machine, as `Speeds` gives them.

    Args:
        step: steps done.
        total_steps: the length of the run, or None.
        tier: the tier in force.
        base: the tier that the run started in and can go back to at any time: ``eager``, or ``as-given``; "eager" below
            means this tier.
        step_seconds: a step there; None before it is known.
        step_high_seconds: the slow end of what it may be.
        recent_seconds: median of the last steps there, at the machine's speed of that time.
        eager_seconds: an eager step, measured before anything else.
        eager_low_seconds: the least that an eager step took; the promise is computed from it, so that a slow spell of
            the machine does not allow more.
        trial_seconds: spent on trials: the steps of a slower candidate (`Trial.extra_seconds`), and preparation
            and proof of the tiers that were not chosen.
        prepare_seconds: spent on preparation (contention included) and proof of the tiers that were chosen.
        saved_seconds: what the steps done so far saved against eager, before those two costs.
        free_memory_bytes: memory left for a tier, or None if unknown.
        preparing: the tier that a child is preparing in the background; it is still offered as before.
        runs: runs of about this length, this one included, that will use what is compiled in it: folds, trials.
    """

    step: int
    total_steps: int | None = None
    tier: str = "eager"
    base: str = "eager"
    step_seconds: float | None = None
    step_high_seconds: float | None = None
    recent_seconds: float | None = None
    eager_seconds: float | None = None
    eager_low_seconds: float | None = None
    trial_seconds: float = 0.0
    prepare_seconds: float = 0.0
    saved_seconds: float = 0.0
    free_memory_bytes: int | None = None
    preparing: str | None = None
    runs: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, and why.

    Args:
        action: ``stay``; ``prepare`` (start the background compile of ``tier``); ``try`` (prepare ``tier`` where it
            is not ready, prove it where it is not proven, and time real steps of it beside the tier in force: a
            `Trial`); ``switch`` (``tier`` was just tried: put it in force).
        tier: the tier that the action is about; the tier in force for ``stay``.
        reason: one line for people, with its figures.
        numbers: the same for programs, as plain JSON data.
        ask_again_in_steps: steps after which to ask again; sooner when something was prepared, tried, or failed.
        ask_again_in_seconds: seconds after which to ask again, if they pass before those steps.
        limit_seconds: when to give a preparation up: it can no longer pay, or would break the promise.
    """

    action: Action
    tier: str
    reason: str
    numbers: dict[str, Any]
    ask_again_in_steps: int
    ask_again_in_seconds: float = ASK_SECONDS
    limit_seconds: float | None = None
