"""The worlds that runs are played in: workloads with the time of each tier, and noise, all from seeds."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import random

REGIONAL = ("regional", "regional+graph")


@dataclasses.dataclass(frozen=True)
class Tier:
    """``prepare``: seconds in the foreground beyond eager's own first three steps; ``ms`` a step."""

    prepare: float
    ms: float

    def swap(self, name: str) -> float:
        """Seconds of the stall after a background compile, interpolated from measurements (xlmr 4.7 s, inception 6.7 s
        whole, 1.3 to 1.7 s by block), and of a capture on top."""
        base = 1.3 + 0.02 * self.prepare if name in REGIONAL else 4.1 + 0.024 * self.prepare
        return base + (0.1 if name.endswith("+graph") else 0.0)


@dataclasses.dataclass(frozen=True)
class World:
    """A program on a machine.

    ``phases``: (first step, {tier: factor}); "*" names all tiers. ``fixed``: ways of the table that are no tier of ours.
    """

    name: str
    cold: float
    eager_ms: float
    launch_bound: float
    tiers: dict[str, Tier]
    phases: tuple[tuple[int, dict[str, float]], ...] = ()
    device: str = "cuda"

    def ms(self, tier: str, step: int) -> float:
        base = self.eager_ms if tier == "eager" else self.tiers[tier].ms
        for start, factors in self.phases:
            if step >= start:
                base *= factors.get(tier, factors.get("*", 1.0))
        return base


def measured(name, cold, eager_ms, launch_bound, **tiers):
    """A row of the table of 2026-11-20; cold seconds are given as they stand there."""
    made = {key.replace("_", "+"): Tier(max(0.15, way[0] - cold), way[1]) for key, way in tiers.items()}
    return World(name, cold, eager_ms, launch_bound, made)


WORLDS = {
    world.name: world
    for world in (
        # reduce-overhead stands for full+graph where the table has no such row.
        measured(
            "tiny", 2.1, 16.75, 0.89, eager_graph=(2.0, 1.85), full=(20.5, 13.21), full_graph=(21.6, 3.59),
            autotune_graph=(156.2, 3.92),
        ),
        measured(
            "xlmr", 1.9, 36.06, 0.61, eager_graph=(3.7, 13.98), regional=(7.5, 21.78), regional_graph=(15.2, 11.44),
            full=(29.1, 22.80), full_graph=(27.1, 11.00),
        ),
        measured(
            "inception", 1.1, 41.49, 0.03, eager_graph=(1.1, 40.17), full=(116.0, 39.48), full_graph=(105.0, 15.47)
        ),
        # The graph of a device-bound step gives nothing on top, so regional+graph is taken at regional's time.
        measured(
            "gpt", 1.4, 49.50, 0.01, eager_graph=(0.7, 48.97), regional=(11.5, 34.21), regional_graph=(12.5, 34.21),
            full=(18.8, 33.50), full_graph=(20.0, 33.11),
        ),
        measured(
            "unet", 8.4, 111.25, 0.05, eager_graph=(9.1, 106.11), regional=(85.2, 132.31),
            regional_graph=(86.6, 90.26), full=(134.3, 94.03), full_graph=(140.1, 78.37),
        ),
    )
}  # fmt: skip


class Noise:
    """A factor per step, the same for every tier: ±30% a step, and spells in which the machine is half as fast."""

    def __init__(self, steps: int, seed: int | None) -> None:
        if seed is None:
            self.factors, self._sums = None, None
            return
        rng = random.Random(seed)
        self.factors, slow = [], 1.0
        for _ in range(steps):
            if rng.random() < (1 / 30 if slow > 1 else 1 / 120):
                slow = 3.0 - slow
            self.factors.append(slow * rng.uniform(0.7, 1.3))
        self._sums = [0.0, *itertools.accumulate(self.factors)]

    def at(self, step: int) -> float:
        return self.factors[step] if self.factors else 1.0

    def sum(self, start: int, end: int) -> float:
        return self._sums[end] - self._sums[start] if self._sums else float(end - start)


@functools.lru_cache(maxsize=32)
def noise(steps: int, seed: int | None) -> Noise:
    """Return the noise of a seed, made once for all runs that are played in it."""
    return Noise(steps, seed)


def steady(world: World, noise: Noise, tier: str, start: int, end: int) -> float:
    """Seconds of the steps from ``start`` up to ``end`` in ``tier``."""
    if not world.phases:
        return world.ms(tier, start) / 1e3 * noise.sum(start, end)
    cuts = [start, *(cut for cut, _ in world.phases if start < cut < end), end]
    return sum(world.ms(tier, low) / 1e3 * noise.sum(low, high) for low, high in itertools.pairwise(cuts))


def each(world: World, noise: Noise, tier: str, start: int, end: int) -> list[float]:
    """Seconds of each step from ``start`` up to ``end`` in ``tier``."""
    factors = noise.factors[start:end] if noise.factors else [1.0] * (end - start)
    if not world.phases:
        took = world.ms(tier, start) / 1e3
        return [took * factor for factor in factors]
    return [world.ms(tier, step) / 1e3 * factor for step, factor in enumerate(factors, start)]


def fixed(world: World, noise: Noise, tier: str, steps: int) -> float:
    """Seconds of a run that is in ``tier`` from its first step on: preparation, then steps."""
    warm = min(3, steps)
    prepare = 0.0 if tier == "eager" else world.tiers[tier].prepare
    return world.cold * warm / 3 + prepare + steady(world, noise, tier, warm, steps)


def best_fixed(world: World, noise: Noise, steps: int) -> tuple[float, str]:
    return min((fixed(world, noise, tier, steps), tier) for tier in ("eager", *world.tiers))


def best_proven(world: World, steps: int) -> float:
    """The least total that perfect knowledge could reach, if the promise had to hold before anything is proven.

    Eight eager steps, then ``eager+graph`` or nothing, then at most one compiled tier, in the background or not at all
    (a compile in the foreground only where the credit holds it), each proven on four steps.
    """
    eager = world.eager_ms / 1e3
    start = fixed(world, Noise(0, None), "eager", min(steps, 8))
    left = max(0, steps - 8)
    totals = [start + left * eager]
    graph = world.tiers["eager+graph"]
    for first, cost in ((eager, 0.0), (graph.ms / 1e3, graph.prepare + 4 * eager)):
        totals.append(start + cost + left * first)
        for name, tier in world.tiers.items():
            waited = bisect.bisect_left(range(left), (5 + tier.prepare) / first)
            swapped = cost + waited * first + tier.swap(name) + 4 * eager + (left - waited) * tier.ms / 1e3
            totals.append(start + swapped)
    return min(totals)
