"""Computes the sums that a difference between tensors is made of: few launches, and one read a bunch."""

from __future__ import annotations

import collections
import operator
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Pair = tuple[torch.Tensor, torch.Tensor]

CHUNK = 1 << 21
"""Elements held in float64 at a time, a dozen times over."""
SEGMENT = 1 << 16
"""Elements that are summed up by one block of a GPU."""
_WIDTH = 7
"""Length of a row of sums; the first is of r^2, the fourth of r^4, the last is the largest difference."""


def sums_of(pairs: Sequence[Pair], *, sized: bool) -> list[list[float]]:
    r"""Return the sums of each pair: of r^2, r*d, d^2 and r^4, of elements unequal and unalike, and the largest \|d\|.

    r is the reference, d the candidate minus r; both count as 0 where one of them is not finite. Two elements are alike
    where both are finite, or equal, or both NaN.

    Args:
        pairs: reference and candidate, of one shape and dtype.
        sized: whether the sums are wanted where all pairs are equal. Else they are 0 then.
    """
    rows = [[0.0] * _WIDTH for _ in pairs]
    if not sized and all(_equal(*pair) for pair in pairs):
        return rows
    for bunch in _bunches(pairs):
        for place, found in _measure(bunch):
            row = rows[place]
            rows[place] = [*map(operator.add, row[:-1], found[:-1]), max(row[-1], found[-1])]
    return rows


def _equal(r: torch.Tensor, c: torch.Tensor) -> bool:
    """Return whether all elements are known to compare equal, none of them a NaN."""
    incomparable = r.is_quantized or (r.is_floating_point() and r.itemsize == 1)  # torch cannot compare these
    if incomparable or r.device != c.device:
        return False
    return all(torch.equal(*chunk) for chunk in _chunks(r, c))


def _bunches(pairs: Sequence[Pair]) -> Iterator[list[tuple[int, Pair]]]:
    """Group parts of pairs that are measured together, each part with the place of its pair."""
    waiting: dict[Any, list[tuple[int, Pair]]] = {}
    held: collections.Counter[Any] = collections.Counter()
    for place, (r, c) in enumerate(pairs):
        kind = r.device, c.device, is_numeric(r), type(r), type(c)
        for chunk in _chunks(r, c) if r.numel() else ():
            size = chunk[0].numel()
            if kind in waiting and held[kind] + size > CHUNK:
                yield waiting.pop(kind)
                held[kind] = 0
            waiting.setdefault(kind, []).append((place, chunk))
            held[kind] += size
    yield from waiting.values()


def _chunks(r: torch.Tensor, c: torch.Tensor) -> Iterator[Pair]:
    """Cut both along dimensions, never by a flat view: that would copy a tensor whose strides are not its own."""
    if r.numel() <= CHUNK:
        yield r, c
        return
    dim = max(range(r.dim()), key=lambda place: r.shape[place])
    step = max(1, r.shape[dim] * CHUNK // r.numel())
    for start in range(0, r.shape[dim], step):
        length = min(step, r.shape[dim] - start)
        yield from _chunks(r.narrow(dim, start, length), c.narrow(dim, start, length))


def _measure(bunch: Sequence[tuple[int, Pair]]) -> Iterator[tuple[int, list[float]]]:
    """Yield the sums of the parts of a bunch, a row for each segment, with the place of its pair."""
    r, c = bunch[0][1]
    device = c.device if r.device.type == "cpu" else r.device
    moved = [(r.to(device), c.to(device)) for _, (r, c) in bunch]
    r, c = (torch.cat([_float64(one) for one in side]) for side in zip(*moved, strict=True))
    same = (r == c) | (r.isnan() & c.isnan())
    if not is_numeric(moved[0][0]):  # integers are compared as they are: float64 holds 53 bits of an int64
        same = torch.cat([(one == other).reshape(-1) for one, other in moved])
    finite = r.isfinite() & c.isfinite()
    d = torch.where(finite, c - r, 0.0)
    first = torch.where(finite, r, 0.0)
    squares = first * first
    unlike = (finite | same).logical_not()
    terms = [squares, first * d, d * d, squares * squares, same.logical_not().double(), unlike.double()]
    owners, pieces = list[int](), list[int]()
    for place, (one, _) in bunch:
        size = one.numel() * (2 if one.is_complex() else 1)
        cut = [min(SEGMENT, size - start) for start in range(0, size, SEGMENT)]
        owners += [place] * len(cut)
        pieces += cut
    lengths = torch.tensor(pieces, device=device)
    sums = [torch.segment_reduce(term, "sum", lengths=lengths, unsafe=True) for term in terms]
    farthest = torch.segment_reduce(d.abs(), "max", lengths=lengths, unsafe=True)
    yield from zip(owners, torch.stack([*sums, farthest], dim=1).tolist(), strict=True)


def _float64(part: torch.Tensor) -> torch.Tensor:
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    return part.to(torch.float64).reshape(-1)


def is_numeric(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds numbers that rounding may change."""
    return tensor.is_floating_point() or tensor.is_complex()
