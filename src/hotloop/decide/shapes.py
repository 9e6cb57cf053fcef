"""What to do about the shapes of a run's batches, decided before a compile is spent."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of one batch's tensors, in order."""
Choice = Literal["static", "odd batches eager", "dynamic"]

ODD = 0.05
"""A shape of a smaller share of the batches is odd: it is not worth a compile until it has shown to be."""
OFTEN = 0.1
MOST_STATIC = 4
"""Shapes that get code of their own, at most, if each has a share of `OFTEN`; more of them go dynamic."""
MOST_DECLARED = 8
"""Shapes that get code of their own, at most, where they were chosen beforehand; as many as a step has recordings."""


@dataclasses.dataclass(frozen=True)
class ShapePlan:
    """What to do about the shapes that were seen.

    Args:
        choice: ``static`` (each shape has code of its own), ``odd batches eager`` (so has each common one), or
            ``dynamic`` (one code for any size).
        seen: all shapes that were seen.
        common: those that compiled code may see from the start.
        dynamic: (tensor, dimension) to be compiled for any size from the first compile on.
        own_code: whether lengths that differ have code of their own each, where torch would make one dynamic code.
        reason: one line for people, with its figures.
    """

    choice: Choice
    seen: frozenset[Shapes]
    common: frozenset[Shapes]
    dynamic: tuple[tuple[int, int], ...] = ()
    own_code: bool = False
    reason: str = ""


def plan_shapes(seen: Mapping[Shapes, int], declared: int = 0) -> ShapePlan:
    """Choose, from how often each shape was seen.

    A batch size that varies alone never makes a plan dynamic: `hotloop.compile` keeps code for two batch sizes and one
    for all further ones. Lengths do, where there are too many for code of their own.

    Args:
        seen: batches of each kind of shapes; at least one.
        declared: how many lengths were chosen beforehand, none of which is odd.
    """
    total, every = sum(seen.values()), frozenset(seen)
    if len(seen) == 1:
        return ShapePlan("static", every, every, reason=f"all {total} batches looked at have one shape")
    common = frozenset(shapes for shapes, count in seen.items() if count / total >= ODD)
    lengths = _lengths(seen)
    if not lengths:
        return ShapePlan(_choice(every, common), every, common, reason=_of_sizes(seen, common))
    counts = _by_length(seen, lengths)
    if len(counts) <= min(declared, MOST_DECLARED):
        reason = f"{len(counts)} declared sizes in {total} batches looked at: code for each"
        return ShapePlan("static", every, every, own_code=True, reason=reason)
    often = [count for count in counts.values() if count / total >= OFTEN]
    if len(often) <= MOST_STATIC and sum(often) / total >= 1 - ODD:
        reason = f"{len(often)} lengths make up {sum(often) / total:.0%} of {total} batches looked at: code for each"
        return ShapePlan(_choice(every, common), every, common, own_code=True, reason=reason)
    reason = f"{len(counts)} lengths in {total} batches looked at: one code for any length, from the first compile on"
    return ShapePlan("dynamic", every, every, tuple(sorted(lengths)), reason=reason)


def _choice(every: frozenset[Shapes], common: frozenset[Shapes]) -> Choice:
    return "static" if common == every else "odd batches eager"


def _of_sizes(seen: Mapping[Shapes, int], common: frozenset[Shapes]) -> str:
    total, odd = sum(seen.values()), sum(count for shapes, count in seen.items() if shapes not in common)
    if not odd:
        return f"{len(seen)} batch sizes in {total} batches looked at: code for each"
    full = _rows(max(seen, key=lambda shapes: seen[shapes]))
    return f"{odd} of {total} batches looked at are not of the usual size {full}: they run eager, and change no code"


def _by_length(seen: Mapping[Shapes, int], lengths: set[tuple[int, int]]) -> dict[tuple[int, ...], int]:
    """Count batches by what their lengths are, whatever their number of rows."""
    places, counts = sorted(lengths), dict[tuple[int, ...], int]()
    for shapes, count in seen.items():
        key = tuple(shapes[place][dim] for place, dim in places)
        counts[key] = counts.get(key, 0) + count
    return counts


def _rows(shapes: Shapes) -> int:
    return next((shape[0] for shape in shapes if shape), 0)


def _lengths(seen: Mapping[Shapes, int]) -> set[tuple[int, int]]:
    """Give the dimensions that vary and are not the batch's own: dim 0, where it is the same as in the first tensor."""
    kinds = list(seen)
    ranks = {tuple(len(shape) for shape in shapes) for shapes in kinds}
    if len(ranks) > 1:  # other arguments from batch to batch: nothing can be said of their dimensions
        return set()
    found = set()
    for place, shape in enumerate(kinds[0]):
        for dim in range(len(shape)):
            varies = len({shapes[place][dim] for shapes in kinds}) > 1
            is_batch = dim == 0 and all(shapes[place][0] == _rows(shapes) for shapes in kinds)
            if varies and not is_batch:
                found.add((place, dim))
    return found


def odd_pays(share: float, steps_left: int, saving: float, compile_seconds: float) -> bool:
    """Tell whether code for an odd shape would save more than its compile takes.

    Args:
        share: of all steps, that have this shape.
        steps_left: in the run.
        saving: seconds that a step of the usual shape is faster than eager: an odd batch, mostly smaller, saves less.
        compile_seconds: what compiling the usual shape took.
    """
    return share * steps_left * saving > compile_seconds
