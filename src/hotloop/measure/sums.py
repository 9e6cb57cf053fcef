"""Computes the sums that a difference between tensors is made of: few passes, few launches, one read per device."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Pair = tuple[torch.Tensor, torch.Tensor]

CHUNK = 1 << 22
"""Elements held in float64 at a time: four temporaries of 32 MB, little beside what a training step holds."""
_SMALL, _TOGETHER = 1 << 18, 1 << 21
"""Elements up to which tensors are measured together in few launches, and of all that are measured so at a time."""
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
    if not sized and all(_equal(*pair) for pair in pairs):
        return [[0.0] * _WIDTH for _ in pairs]
    small = [place for place, pair in enumerate(pairs) if _joins(*pair)]
    large = sorted({*range(len(pairs))} - {*small})
    owners, tables = list[int](), list[torch.Tensor]()
    for bunch in _bunches(pairs, small):
        tables.append(_measure_many([pairs[place] for place in bunch]))
        owners += bunch
    tables += [_measure(*pairs[place]) for place in large]
    rows = dict(zip([*owners, *large], _read(tables), strict=True))
    return [rows[place] for place in range(len(pairs))]


def _equal(r: torch.Tensor, c: torch.Tensor) -> bool:
    """Return whether all elements are known to compare equal, none of them a NaN."""
    incomparable = r.is_quantized or (r.is_floating_point() and r.itemsize == 1)  # torch cannot compare these
    if incomparable or r.device != c.device:
        return False
    return all(torch.equal(*chunk) for chunk in _chunks(r, c))


def _joins(r: torch.Tensor, c: torch.Tensor) -> bool:
    """Return whether a pair can be measured together with others."""
    plain = {type(r), type(c)} <= {torch.Tensor, torch.nn.Parameter} and r.layout == torch.strided
    return plain and r.is_floating_point() and r.itemsize > 1 and r.device == c.device and 0 < r.numel() <= _SMALL


def _bunches(pairs: Sequence[Pair], places: Iterable[int]) -> Iterator[list[int]]:
    """Group pairs by device, with as many elements as may be held in float64 a dozen times over."""
    bunches: dict[torch.device, tuple[list[int], int]] = {}
    for place in places:
        r = pairs[place][0]
        bunch, held = bunches.get(r.device, ([], 0))
        if held + r.numel() > _TOGETHER:
            yield bunch
            bunch, held = [], 0
        bunches[r.device] = [*bunch, place], held + r.numel()
    for bunch, _ in bunches.values():
        yield bunch


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


def _measure(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return the sums of a pair, float64 of shape [1, 7], on the device that they were computed on."""
    device = c.device if r.device.type == "cpu" else r.device
    row = torch.zeros(_WIDTH, dtype=torch.float64, device=device)
    for chunk_r, chunk_c in _chunks(r, c):
        part_r, part_c = chunk_r.to(device), chunk_c.to(device)
        # Integers are compared as they are: float64 holds 53 bits of an int64.
        same = None if is_numeric(r) else part_r == part_c
        terms = _terms(_float64(part_r), _float64(part_c), same)
        row[:-1] += torch.stack([term.sum() for term in terms[:-1]])
        if r.numel():
            row[-1] = torch.maximum(row[-1], terms[-1].amax())
    return row[None]


def _measure_many(pairs: Sequence[Pair]) -> torch.Tensor:
    """Return the sums of `_measure` of many pairs, float64 of shape [pairs, 7], in a few launches for all."""
    r, c = (torch.cat([_float64(tensor) for tensor in side]) for side in zip(*pairs, strict=True))
    lengths = torch.tensor([tensor.numel() for tensor, _ in pairs], device=r.device)
    *terms, far = _terms(r, c)
    sums = [torch.segment_reduce(term, "sum", lengths=lengths, unsafe=True) for term in terms]
    return torch.stack([*sums, torch.segment_reduce(far, "max", lengths=lengths, unsafe=True)], dim=1)


def _terms(r: torch.Tensor, c: torch.Tensor, same: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return the elements that a row of sums is made of, in float64; the last one's are for a maximum."""
    same = (r == c) | (r.isnan() & c.isnan()) if same is None else same.reshape(-1)
    finite = r.isfinite() & c.isfinite()
    d = torch.where(finite, c - r, 0.0)
    first = torch.where(finite, r, 0.0)
    squares = first * first
    unlike = (finite | same).logical_not()
    return [squares, first * d, d * d, squares * squares, same.logical_not().double(), unlike.double(), d.abs()]


def _float64(part: torch.Tensor) -> torch.Tensor:
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    return part.to(torch.float64).reshape(-1)


def is_numeric(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds numbers that rounding may change."""
    return tensor.is_floating_point() or tensor.is_complex()


def _read(tables: Sequence[torch.Tensor]) -> list[list[float]]:
    """Copy the rows of tables of one width to the host, with one transfer per device."""
    places: dict[torch.device, list[int]] = {}
    for place, table in enumerate(tables):
        places.setdefault(table.device, []).append(place)
    read: dict[int, list[list[float]]] = {}
    for indices in places.values():
        rows = iter(torch.cat([tables[place] for place in indices]).tolist())
        read.update((place, list(itertools.islice(rows, len(tables[place])))) for place in indices)
    return [row for place in range(len(tables)) for row in read[place]]
