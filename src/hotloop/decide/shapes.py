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
"""A shape with a smaller share of the batches is odd: it is not compiled until a compile proves worthwhile."""
OFTEN = 0.1
MOST_STATIC = 4
"""At most so many shapes get code of their own, if each has a share of `OFTEN`; more shapes go dynamic."""
MOST_DECLARED = 8
"""At most so many shapes get code of their own if they were chosen beforehand: as many as a step has recordings."""


@dataclasses.dataclass(frozen=True)
class ShapePlan:
    """What to do about the shapes that were seen.

    Args:
        choice: ``static`` (each shape has code of its own), ``odd batches eager`` (each common shape has), or
            ``dynamic`` (one code for any size).
        seen: all shapes that were seen.
        common: the shapes that compiled code may see from the start.
        dynamic: (tensor, dimension) to be compiled for any size from the first compile on.
        own_code: whether each length has code of its own, although torch would make one dynamic code.
        reason: one line for people, with its figures.
    """

    choice: Choice
    seen: frozenset[Shapes]
    common: frozenset[Shapes]
    dynamic: tuple[tuple[int, int], ...] = ()
    own_code: bool = False
    reason: str = ""


def plan_shapes(seen: Mapping[Shapes, int], declared: int = 0) -> ShapePlan:
    """Choose a plan from how often each kind of shapes was seen.

    A batch size that varies alone never makes a plan dynamic: `hotloop.compile` keeps code for two batch sizes, and one
    for all further sizes. Lengths do, if there are too many for code of their own.

    Args:
        seen: batches of each kind of shapes; at least one.
        declared: how many lengths were chosen beforehand; none of them is odd.
    """
    total, every = sum(seen.values()), frozenset(seen)
    if len(seen) == 1:
        return ShapePlan("static", every, every, reason=f"all {total} batches looked at have one shape")
    common = frozenset(shapes for shapes, count in seen.items() if count / total >= ODD)
    choice: Choice = "static" if common == every else "odd batches eager"
    lengths = _length_dims(list(seen))
    if not lengths:
        reason = f"{len(seen)} batch sizes in {total} batches looked at: code for each"
        if common != every:
            odd, full = sum(seen[shapes] for shapes in every - common), _rows(max(seen, key=seen.__getitem__))
            reason = f"{odd} of {total} batches looked at are not of the usual size {full}"
            reason += ": they run eager, and change no code"
        return ShapePlan(choice, every, common, reason=reason)
    counts: dict[tuple[int, ...], int] = {}  # batches by their lengths, whatever their number of rows
    for shapes, count in seen.items():
        key = tuple(shapes[place][dim] for place, dim in lengths)
        counts[key] = counts.get(key, 0) + count
    if len(counts) <= min(declared, MOST_DECLARED):
        reason = f"{len(counts)} declared sizes in {total} batches looked at: code for each"
        return ShapePlan("static", every, every, own_code=True, reason=reason)
    often = [count for count in counts.values() if count / total >= OFTEN]
    if len(often) <= MOST_STATIC and sum(often) / total >= 1 - ODD:
        reason = f"{len(often)} lengths make up {sum(often) / total:.0%} of {total} batches looked at: code for each"
        return ShapePlan(choice, every, common, own_code=True, reason=reason)
    reason = f"{len(counts)} lengths in {total} batches looked at: one code for any length, from the first compile on"
    return ShapePlan("dynamic", every, every, lengths, reason=reason)


def _rows(shapes: Shapes) -> int:
    """Return the batch size: the first dimension of the first tensor that has dimensions."""
    return next((shape[0] for shape in shapes if shape), 0)


def _length_dims(kinds: list[Shapes]) -> tuple[tuple[int, int], ...]:
    """Return the (tensor, dimension) pairs that vary, apart from a dimension 0 that is always the batch size."""
    ranks = {tuple(len(shape) for shape in shapes) for shapes in kinds}
    if len(ranks) > 1:  # other arguments from batch to batch: their dimensions cannot be compared
        return ()
    lengths = []
    for place, shape in enumerate(kinds[0]):
        for dim in range(len(shape)):
            varies = len({shapes[place][dim] for shapes in kinds}) > 1
            is_batch = dim == 0 and all(shapes[place][0] == _rows(shapes) for shapes in kinds)
            if varies and not is_batch:
                lengths.append((place, dim))
    return tuple(lengths)


def odd_pays(share: float, steps_left: int, saving: float, compile_seconds: float) -> bool:
    """Return whether code for an odd shape would save more than its compile takes.

    Args:
        share: share of all steps that have this shape.
        steps_left: steps left in the run.
        saving: seconds that a step of the usual shape is faster than eager; an odd batch is mostly smaller and saves
            less.
        compile_seconds: seconds that compiling the usual shape took.
    """
    return share * steps_left * saving > compile_seconds
