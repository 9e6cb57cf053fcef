"""Where to put the edges of buckets, so that batches of many sizes run as few shapes with little padding."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import TYPE_CHECKING

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Ascending edges to pad sizes up to, and the share of all padded elements that would be padding."""

    edges: tuple[int, ...]
    waste: float


def bucket_edges(sizes: Mapping[int, int], buckets: int, multiple: int = 1) -> Buckets:
    """Return the edges that waste the least padding on the sizes seen; at most ``buckets`` edges.

    This is the optimum over all choices, by the dynamic programme of Bellman (1961, "On the approximation of curves by
    line segments using dynamic programming") for cutting a sorted list into segments. The best k segments of the first
    j sizes are the best k-1 segments of the first i sizes, and a segment from i to j. A segment pads all of its sizes
    to its largest. Waste is counted in elements along this dimension; attention, which is quadratic in it, wastes more.

    Args:
        sizes: how often each size was seen.
        buckets: the largest number of edges.
        multiple: edges are multiples of this (8 suits tensor cores in half precision).

    Raises:
        ConfigError: no size was seen, or ``buckets`` or ``multiple`` is under 1.
    """
    if not sizes or buckets < 1 or multiple < 1:
        raise ConfigError(
            f"sizes={dict(sizes)}, buckets={buckets}, multiple={multiple}: expected sizes, and numbers >= 1"
        )
    # The search takes buckets * sizes^2 / 2 steps, a tenth of a second for 8 buckets of 512 sizes. More sizes are first
    # rounded up to a multiple that leaves 512, which costs at most 1/256 of the largest size in padding.
    most_sizes = 512
    while True:
        rounded = collections.Counter[int]()
        for size, count in sizes.items():
            rounded[-(-size // multiple) * multiple] += count
        if len(rounded) <= most_sizes:
            break
        multiple *= 2
    ends = sorted(rounded)
    cuts = _best_cuts(ends, [rounded[end] for end in ends], min(buckets, len(ends)))
    edges = tuple(ends[cut] for cut in cuts)
    padded = sum(count * next(edge for edge in edges if edge >= size) for size, count in sizes.items())
    used = sum(size * count for size, count in sizes.items())
    return Buckets(edges, 1 - used / padded if padded else 0.0)


def _best_cuts(ends: list[int], counts: list[int], buckets: int) -> list[int]:
    """Return the last place of each segment: the cut with the fewest padded elements, samples included."""
    number = len(ends)
    before = [0, *itertools.accumulate(counts)]  # how many samples stand before a place
    cost: list[float] = [ends[j] * before[j + 1] for j in range(number)]  # one segment, up to j
    origins: list[list[int]] = []  # per further segment and j: where the segments before it end
    for _ in range(buckets - 1):
        following, origin = list(cost), [-1] * number
        for j in range(number):
            for i in range(j):
                value = cost[i] + ends[j] * (before[j + 1] - before[i + 1])
                if value < following[j]:
                    following[j], origin[j] = value, i
        cost = following
        origins.append(origin)
    cuts = [number - 1]
    for origin in reversed(origins):
        if origin[cuts[0]] >= 0:  # -1: fewer segments do as well
            cuts.insert(0, origin[cuts[0]])
    return cuts
