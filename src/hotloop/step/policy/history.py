"""What earlier runs of the same program found out about its tiers, and what this run adds.

A search or a cross-validation trains the same program again and again in one process, with new instances. Their tiers
need not be timed again, only proven again: each instance has a recording of its own. Two runs train the same program
where their keys are equal (`hotloop.cache.key_of`). Other processes learn the costs from a file.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from hotloop.cache import CostStore, TierCosts, key_of
from hotloop.compiling.apply import entry_points, holds_code_for
from hotloop.decide import Option, expect
from hotloop.step.tiers import parse

if TYPE_CHECKING:
    from collections.abc import Callable

    from hotloop.cache import BackgroundCompile
    from hotloop.decide import Facts, Speeds
    from hotloop.step.context import Context

_MOST_PROGRAMS = 64
_PROOF_STEPS = 4
_WORST_AGAIN = 2.0
"""How many times its expectation a known tier's preparation may take at worst; chosen, not measured."""


@dataclasses.dataclass
class Child:
    """A background compile.

    Args:
        process: the child process.
        tier: the name of the tier that it compiles for.
        since: when it began, on the monotonic clock.
        expected: seconds that it was expected to take, as if no earlier child had been late.
        left: its run is over; the next run of the program goes on with it.
    """

    process: BackgroundCompile
    tier: str
    since: float
    expected: float | None
    left: bool = False


@dataclasses.dataclass
class ProgramHistory:
    """What the runs of this process found out about one program.

    Args:
        eager_seconds: of a step in the tier that runs begin in; None before any tier was timed beside it.
        ratios: by tier, a step's time over that of the tier that runs begin in, and the slow end of that ratio.
        faster: the tiers that beat the tier in force when they were timed.
        again_seconds: what it took a later run to get to a tier: the capture and the proof, nothing to compile.
        ready: by base, seconds of the swap after a child has compiled it.
        child: the child that compiles just now.
        slower: how many times longer than expected a child took.
    """

    eager_seconds: float | None = None
    ratios: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    faster: set[str] = dataclasses.field(default_factory=set)
    again_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    ready: dict[str, float] = dataclasses.field(default_factory=dict)
    child: Child | None = None
    slower: float = 1.0

    def stop_child(self) -> None:
        """Stop the child that still compiles, if any."""
        child, self.child = self.child, None
        if child is not None:
            child.process.stop()


_programs: collections.OrderedDict[str, ProgramHistory] = collections.OrderedDict()


def _program(key: str) -> ProgramHistory:
    history = _programs.pop(key, None) or ProgramHistory()
    _programs[key] = history
    while len(_programs) > _MOST_PROGRAMS:
        _programs.popitem(last=False)[1].stop_child()
    return history


def stop_left_children() -> None:
    """Stop the children that no run waits for: each takes cores and memory."""
    for known in _programs.values():
        if known.child is not None and known.child.left:
            known.stop_child()


def forget() -> None:
    """Forget everything: the next run is the first one."""
    for known in _programs.values():
        known.stop_child()
    _programs.clear()


def _is_new(name: str) -> bool:
    """Return whether each run pays for a tier anew, since nothing of it is kept."""
    return name.endswith("eager+graph") or parse(name).channels_last


class History:
    """The costs that are known of one loop's program. Nothing is known before `look_up`.

    Attributes:
        program: what the runs of this process found out.
        timed_here: names of the tiers that this run has timed itself.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = CostStore()
        self._key = ""
        self._stored: dict[str, TierCosts] = {}
        self._code_held = False
        self.timed_here: set[str] = set()
        self.program = ProgramHistory()

    def look_up(self, step: Callable[..., Any], inputs: Any) -> None:
        """Look up the program by the arguments of its first call."""
        device = self._context.device
        self._key = key_of(
            self._context.compiled.models.values(),
            inputs,
            optimizers=self._context.holdings.optimizers.values(),
            step=step,
            autocast=torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
            device=device,
        )
        self._stored = self._store.get(self._key)
        self.program = _program(self._key)
        if self.program.child is not None:
            self.program.child.left, self.program.child.expected = False, None  # it was late for another run

    def option(self, name: str, facts: Facts, rejected_at: int | None) -> Option | None:
        """Return a tier that an earlier run timed beside eager; None where none did.

        Of a run of this process only the proof is missing, as long as the process holds the code.
        """
        ratio, eager = self.program.ratios.get(name), facts.eager_seconds
        expected = expect(name, facts)
        if ratio is not None and (not parse(name).compiles or self._holds_code()):
            prepare = self.program.again_seconds.get(name)
            if prepare is None and expected is not None:
                prepare = expected.cost_seconds if expected.again_seconds is None else expected.again_seconds
            if prepare is None:  # a model that runs as it was given
                prepare = _PROOF_STEPS * eager
            return Option(
                tier=name,
                step_seconds=eager * ratio[0],
                step_worst_seconds=eager * ratio[1],
                prepare_seconds=prepare,
                prepare_worst_seconds=_WORST_AGAIN * prepare,
                proof_seconds=_PROOF_STEPS * max(0.0, eager * (1 - ratio[0])),  # the first steps save nothing
                recalled=name not in self.timed_here,
                again_seconds=None if _is_new(name) else prepare,
                source="measured",
                rejected_at=rejected_at,
            )
        costs = self._stored.get(name)
        if costs is None:
            return None
        prepare = costs.cold_seconds if costs.warm_seconds is None else costs.warm_seconds
        if prepare is None:
            return None
        proof = _PROOF_STEPS * eager
        general = (expected.again_seconds or 0.0) if expected is not None else 0.0
        return Option(
            tier=name,
            step_seconds=eager * costs.ratio,
            prepare_seconds=prepare,
            prepare_worst_seconds=costs.cold_seconds,  # the cache may have been cleared since
            proof_seconds=proof,
            again_seconds=None if _is_new(name) else min(prepare, general) + proof,
            source="stored",
            rejected_at=rejected_at,
            by_steps=not parse(name).compiles,
        )

    def _holds_code(self) -> bool:
        """Return whether this process holds code for these models: the oldest is let go, a class made anew has none."""
        if not self._code_held:  # what the run's own models use is not let go any more
            models = self._context.compiled.models.values()
            self._code_held = any(holds_code_for(point) for model in models for point in entry_points(model))
        return self._code_held

    def note_trial(self, name: str, speeds: Speeds, prepare_seconds: float, *, faster: bool) -> None:
        """Note what a tier cost and saved, and whether it was faster than the tier in force.

        ``prepare_seconds`` go from the decision to the first proven step, beyond what plain steps would have taken.
        """
        self.timed_here.add(name)
        if not self._key:  # one of several processes: what it alone knows must not count
            return
        program, ratio = self.program, speeds.ratio(name)
        program.ratios, program.eager_seconds = speeds.known(), speeds.seconds(self._context.base_tier.name)
        if faster:
            program.faster.add(name)
        else:
            program.faster.discard(name)
        if prepare_seconds <= 0 or ratio is None:
            return
        if not parse(name).compiles:  # a later run takes as long
            program.again_seconds.setdefault(name, prepare_seconds)
        if self._context.compiled.was_warm():
            self._store.put(self._key, name, TierCosts(ratio=ratio, warm_seconds=prepare_seconds))
        else:
            self._store.put(self._key, name, TierCosts(ratio=ratio, cold_seconds=prepare_seconds))
