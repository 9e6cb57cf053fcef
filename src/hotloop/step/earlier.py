"""What earlier runs of the same program found out about its tiers, and what this one adds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop.cache import CostStore, Key, TierCosts, key_of
from hotloop.decide import Option

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hotloop.decide import Speeds
    from hotloop.step.loop import Loop


class Earlier:
    """The costs that are stored for one loop's program; nothing is known before its first call."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._store = CostStore()
        self._key: Key | None = None
        self._known: Mapping[str, TierCosts] = {}

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

    def option(self, name: str, eager: float, rejected_at: int | None) -> Option | None:
        """Give a tier as earlier runs knew it; None where they did not, or where it was declined.

        Args:
            name: the tier's.
            eager: seconds of an eager step in this run. The machine may be slower than it was: what counts is how the
                tier compared with eager then.
            rejected_at: for the option.
        """
        costs = self._known.get(name)
        if costs is None or not costs.step_seconds or not costs.eager_seconds or costs.verdict != "proven":
            return None
        prepare = costs.warm_seconds if costs.warm_seconds is not None else costs.cold_seconds
        if prepare is None:
            return None
        return Option(
            tier=name,
            step_seconds=eager * costs.step_seconds / costs.eager_seconds,
            prepare_seconds=prepare,
            prepare_worst_seconds=costs.cold_seconds,  # the cache may have been cleared since
            proof_seconds=4 * eager,
            source="stored",
            rejected_at=rejected_at,
        )

    def timed(self, name: str, speeds: Speeds, prepare_seconds: float, *, warm: bool) -> None:
        """Keep what a tier cost and gave; ``warm`` says that its code came out of the compile cache."""
        step, eager = speeds.seconds(name), speeds.seconds(self._loop.given)
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
        self._put(name, TierCosts(verdict="declined", reason=reason))

    def _put(self, name: str, costs: TierCosts) -> None:
        if self._key is not None:
            self._store.put(self._key, name, costs)
