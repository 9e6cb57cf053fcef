"""Sizes by aspect ratio: a few buckets, planned from the pictures, each picture in the nearest.

All sizes have about one area, as trainers of Stable Diffusion have it, so that a batch of any costs about the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes, and which of them each picture gets.

    Args:
        sizes: height and width of each bucket in pixels, smallest area first.
        bucket: the index of each picture's size, int64 of shape (pictures,).
        cut: the share of each picture that is cut off, float64 of shape (pictures,).
    """

    sizes: tuple[tuple[int, int], ...]
    bucket: Tensor
    cut: Tensor


def candidates(size: int, step: int) -> list[tuple[int, int]]:
    """Return the sizes that could be buckets, height and width, in the order of their ratios (width by height).

    A side has ``size / 2`` to ``size * 2`` pixels, both sides are multiples of ``step``, and no area is larger than
    that of the square, so that the square needs the most memory.
    """
    side = max(1, round(size / step))
    longest = max(side, 2 * size // step)
    shortest = min(side, max(1, -(-size // (2 * step))))
    found = {(side, side)}
    for long in range(side + 1, longest + 1):
        short = side * side // long
        if short >= shortest:
            found |= {(short, long), (long, short)}
    return sorted(((high * step, wide * step) for high, wide in found), key=lambda one: one[1] / one[0])


def plan(shapes: Sequence[tuple[int, int]], size: int, step: int, most: int, least: int) -> Plan:
    """Choose sizes for pictures.

    Begins with all `candidates`, and takes away the one with the fewest pictures, whose pictures go to the neighbour
    that is nearest, until there are few enough and each has enough pictures.

    Args:
        shapes: height and width of each picture.
        size: the side of the square whose area all sizes have about.
        step: both sides are multiples of it.
        most: how many sizes there may be.
        least: how many pictures a size needs, unless it is the only one.
    """
    heights, widths = torch.tensor(shapes, dtype=torch.float64).reshape(-1, 2).T
    ratios = (widths / heights).log()
    kept = candidates(size, step)
    while True:
        own = torch.tensor([wide / high for high, wide in kept], dtype=torch.float64).log()
        # Nearest by the logarithm: 2:1 is as far from the square as 1:2.
        nearest = torch.bucketize(ratios, (own[1:] + own[:-1]) / 2)
        counts = nearest.bincount(minlength=len(kept))
        if len(kept) == 1 or (len(kept) <= most and int(counts.min()) >= least):
            break
        del kept[int(counts.argmin())]
    order = sorted(range(len(kept)), key=lambda index: (kept[index][0] * kept[index][1], kept[index]))
    place = torch.empty(len(kept), dtype=torch.int64)
    place[order] = torch.arange(len(kept))
    cut = 1 - (ratios - own[nearest]).abs().neg().exp()
    return Plan(tuple(kept[index] for index in order), place[nearest], cut)
