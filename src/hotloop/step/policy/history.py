"""What earlier runs of the same program found out about its tiers, and what this one adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop.cache import CostStore, Key, TierCosts, key_of
from hotloop.compiling.apply import entry_points, holds_code_for
from hotloop.decide import Option, expect
from hotloop.step.policy import history_store
from hotloop.step.policy.history_store import Program
from hotloop.step.tiers import parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.decide import Facts, Speeds
    from hotloop.measure import Difference
    from hotloop.step.loop.loop import Loop

_PROOF_STEPS = 4
_WORST_AGAIN = 2.0
"""How many times what it takes to get to a known tier again that may take at worst; chosen, not measured."""


class Earlier:
    """The costs that are stored for one loop's program; nothing is known before its first call."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._store = CostStore()
        self._key: Key | None = None
        self._known: Mapping[str, TierCosts] = {}
        self._held = False
        self.timed_here: set[str] = set()
        """Tiers that this run has timed itself."""
        self.program = Program()
        """What earlier runs of this process found out."""

    def called(self, step: Callable[..., Any], inputs: Any) -> None:
        """Look up the program of the first call."""
        if self._key is not None:
            return
        kind = self._loop.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._key = key_of(
            self._loop.compiled.models.values(),
            inputs,
            optimizers=list(self._loop.holdings.optimizers.values()),
            step=step,
            autocast=autocast,
            device=self._loop.device,
        )
        self._known = self._store.get(self._key) or {}
        self.program = history_store.program(self._key)

    def option(self, name: str, facts: Facts, rejected_at: int | None) -> Option | None:
        """Give a tier as earlier runs knew it; None where they did not, or where it was declined.

        Args:
            name: the tier's.
            facts: what is known of this run. The machine may be slower than it was: what counts is how the tier
                compared with eager then.
            rejected_at: for the option.
        """
        costs = self._known.get(name)
        if costs is None or not costs.step_seconds or not costs.eager_seconds or costs.verdict != "proven":
            return None
        prepare = costs.warm_seconds if costs.warm_seconds is not None else costs.cold_seconds
        if prepare is None:
            return None
        eager = facts.eager_seconds
        expected = expect(name, facts)
        general = (expected.again_seconds or 0.0) if expected is not None else 0.0
        return Option(
            tier=name,
            step_seconds=eager * costs.step_seconds / costs.eager_seconds,
            prepare_seconds=prepare,
            prepare_worst_seconds=costs.cold_seconds,  # the cache may have been cleared since
            proof_seconds=_PROOF_STEPS * eager,
            again_seconds=None if name.endswith("eager+graph") else min(prepare, general) + _PROOF_STEPS * eager,
            source="stored",
            rejected_at=rejected_at,
            by_steps=not parse(name).compiles,
        )

    def recalled(self, name: str, facts: Facts, rejected_at: int | None) -> Option | None:
        """Give a tier that an earlier run of this process timed beside eager: its code is there, its proof is not.

        None where there is no such run, or where its code is gone: then getting there costs what it costs the first.
        """
        ratio = self.program.ratios.get(name)
        if ratio is None or (parse(name).compiles and not self._holds_code()):
            return None
        general = expect(name, facts)
        known = self.program.again_seconds.get(name)
        if known is None and general is not None:
            known = general.again_seconds if general.again_seconds is not None else general.cost_seconds
        if known is None:  # taken as given
            known = _PROOF_STEPS * facts.eager_seconds
        return Option(
            tier=name,
            step_seconds=facts.eager_seconds * ratio[0],
            step_worst_seconds=facts.eager_seconds * ratio[1],
            prepare_seconds=known,
            proof_seconds=_PROOF_STEPS * max(0.0, facts.eager_seconds * (1 - ratio[0])),  # the first steps save nothing
            recalled=name not in self.timed_here,
            prepare_worst_seconds=_WORST_AGAIN * known,
            again_seconds=None if name.endswith("eager+graph") else known,
            source="measured",
            rejected_at=rejected_at,
        )

    def _holds_code(self) -> bool:
        """Tell whether this process holds code for these models: the oldest is let go, a class made anew has none."""
        if not self._held:  # what the run's own models use is not let go any more
            models = self._loop.compiled.models.values()
            self._held = any(holds_code_for(point) for model in models for point in entry_points(model))
        return self._held

    def spread(self, step: str) -> dict[str, Difference]:
        """Give how far a step was from itself in earlier runs of this process, by tensor, to be added to.

        Noise of a few bits is now there and now not: one run's sample would have the next one's proof fail.
        """
        return self.program.spreads.setdefault(step, {})

    def again(self, name: str, seconds: float) -> None:
        """Keep what it took to get to a tier that an earlier run of this process had got ready."""
        self.program.again_seconds[name] = seconds

    def timed(self, name: str, speeds: Speeds, prepare_seconds: float, *, warm: bool, faster: bool) -> None:
        """Keep what a tier cost and gave.

        Args:
            name: the tier's.
            speeds: what trials told, this one included.
            prepare_seconds: from the decision to the first proven step, beyond what the steps between took.
            warm: its code came out of the compile cache.
            faster: it beat the tier in force.
        """
        step, eager = speeds.seconds(name), speeds.seconds(self._loop.given)
        self.timed_here.add(name)
        self.program.ratios, self.program.eager_seconds = speeds.known(), eager
        (self.program.faster.add if faster else self.program.faster.discard)(name)
        if prepare_seconds > 0 and not parse(name).compiles:  # a later run takes as long
            self.program.again_seconds.setdefault(name, prepare_seconds)
        if step is not None and eager is not None and prepare_seconds > 0:
            costs = TierCosts(
                cold_seconds=None if warm else prepare_seconds,
                warm_seconds=prepare_seconds if warm else None,
                step_seconds=step,
                eager_seconds=eager,
                verdict="proven",
            )
            self._put(name, costs)

    def declined(self, name: str, reason: str) -> None:
        """Keep that a tier was declined, for the record; it is tried again in another run, which may differ."""
        self.program.declines[name] += 1
        self._put(name, TierCosts(verdict="declined", reason=reason))

    def _put(self, name: str, costs: TierCosts) -> None:
        if self._key is not None:
            self._store.put(self._key, name, costs)
