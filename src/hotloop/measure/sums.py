"""Computes the sums that a difference between tensors is made of: few passes, few launches, one read per device."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hotloop._torch.foreach import norms, pairwise
from hotloop.measure.machine import free_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    Pair = tuple[torch.Tensor, torch.Tensor]

CHUNK = 1 << 22
"""Elements held in float64 at a time: four temporaries of 32 MB, little beside what a training step holds."""
_BUNCH_ON_GPU = 1 << 24
"""Elements of all tensors that are measured in one launch on a GPU: a few temporaries of 64 MiB in float32."""
_SMALL = 1 << 18
"""Elements up to which a tensor is measured together with others: a segment is summed by one block of threads."""
_TOGETHER = 1 << 21
"""Elements that are measured together on a CPU, in a dozen temporaries in float64; on a GPU more, if memory is free."""
_LIGHT_ON = ("cuda",)
"""Kinds of device on which large tensors are summed in float32, since float64 is slow there."""
_WIDTH = 7
"""Length of a row of sums; the first is of r^2, the fourth of r^4, the last is the largest difference."""


class _Part(NamedTuple):
    """A pair, or a piece of a large pair, that is compared in few launches with many others."""

    place: int
    r: torch.Tensor
    c: torch.Tensor


def sums_of(pairs: Sequence[Pair], *, sized: bool) -> list[list[float]]:
    r"""Return the sums of each pair: of r^2, r*d, d^2 and r^4, of elements unequal and unalike, and the largest \|d\|.

    r is the reference, d the candidate minus r; both count as 0 where one of them is not finite. Two elements are alike
    where both are finite, or equal, or both NaN.

    Args:
        pairs: reference and candidate, of one shape and dtype.
        sized: whether the squares and fourth powers are wanted of pairs that are equal. Else fourth powers are 0, and
            squares have float32's precision, or are 0 where all pairs are equal.
    """
    batch = _Batch(pairs, sized=sized)
    if not sized and not any(batch.apart):
        return [[0.0] * _WIDTH for _ in pairs]
    rows = batch.light_rows()
    rows |= batch.exact_rows([place for place in range(len(pairs)) if place not in rows])
    for place, sums in rows.items():
        if not all(map(math.isfinite, sums)):  # NaN, infinities, or past what float32 holds: there are such tensors
            (rows[place],) = _read([batch.measure(place)])
    return [rows[place] for place in range(len(pairs))]


class _Batch:
    """The pairs of a call. Pairs that differ are found first, since with eager's own kernels mostly none differs.

    That is a sixth of the work of the sums.
    """

    def __init__(self, pairs: Sequence[Pair], *, sized: bool) -> None:
        self.pairs, self.sized = pairs, sized
        self.parts: list[_Part] = []
        for place, (r, c) in enumerate(pairs):
            plain = {type(r), type(c)} <= {torch.Tensor, torch.nn.Parameter} and r.layout == torch.strided
            if plain and r.is_floating_point() and r.device == c.device and r.itemsize > 1 and r.numel() > 0:
                self.parts += [_Part(place, *part) for part in _chunks(r, c)]
        self.largest = [0.0] * len(self.parts)
        """The largest |c - r| of each part, in its own dtype; NaN where an element is not finite."""
        self.apart = [False] * len(pairs)
        """Whether a pair has to be measured: an element differs, or is not finite."""
        self._find_differing()

    def _find_differing(self) -> None:
        bunches = list(_bunches(self.parts))
        tables = []
        for bunch in bunches:
            difference = pairwise("sub", [self.parts[n].c for n in bunch], [self.parts[n].r for n in bunch])
            tables.append(norms(difference, math.inf)[:, None])
        joined = {part.place for part in self.parts}
        others = [place for place in range(len(self.pairs)) if place not in joined]
        read = _read([*tables, *(_unlike(*self.pairs[place]).reshape(1, 1) for place in others)])
        for n, (most,) in zip(itertools.chain.from_iterable(bunches), read, strict=False):
            self.largest[n] = most
            self.apart[self.parts[n].place] |= most != 0  # as is NaN, which inf - inf and NaN - NaN are
        for place, (unlike,) in zip(others, read[len(self.parts) :], strict=True):
            self.apart[place] = bool(unlike)

    def measure(self, place: int) -> torch.Tensor:
        """Return a pair's sums in float64, of shape [1, 7]."""
        return _measure(*self.pairs[place]) if self.apart[place] else _measure_equal(self.pairs[place][0])

    def exact_rows(self, places: Iterable[int]) -> dict[int, list[float]]:
        """Return the sums of pairs in float64, small pairs in few launches; of equal pairs mostly the squares."""
        owners: list[int] = []
        tables: list[torch.Tensor] = []
        left = set(places)
        if not self.sized:  # one launch for each equal pair would be long
            equal = [part for part in self.parts if part.place in left and not self.apart[part.place]]
            for bunch in _bunches(equal):
                squares = norms([equal[n].r for n in bunch]).to(torch.float64).square()  # infinite beyond float32
                tables.append(torch.nn.functional.pad(squares[:, None], (0, _WIDTH - 1)))
                owners += [equal[n].place for n in bunch]
            left -= {part.place for part in equal}
        whole = (part for part in self.parts if part.place in left and part.r is self.pairs[part.place][0])
        small = [part for part in whole if part.r.numel() <= _SMALL]
        for bunch in _bunches(small, in_float64=True):
            tables.append(_measure_many([small[n].r for n in bunch], [small[n].c for n in bunch]))
            owners += [small[n].place for n in bunch]
        left -= {part.place for part in small}
        for place in sorted(left):
            tables.append(self.measure(place))
            owners.append(place)
        rows: dict[int, list[float]] = {}
        for place, sums in zip(owners, _read(tables), strict=True):
            rows[place] = [old + new for old, new in zip(rows[place], sums, strict=True)] if place in rows else sums
        return rows

    def light_rows(self) -> dict[int, list[float]]:
        """Return the sums of large pairs, in few launches and in float32; not finite where an element is not finite.

        The difference is exact in float32 for elements within a factor of two of each other. Before anything is
        squared, both tensors are divided by their largest element. So nothing is lost at either end of the range of
        float32, though the second moments of Adam are squares themselves. Sums have a relative error of some 1e-6,
        <r, d> an error of that part of |r| |d|.
        """
        places = [n for n, part in enumerate(self.parts) if self._is_light(part)]
        light, largest = [self.parts[n] for n in places], [self.largest[n] for n in places]
        bunches = list(_bunches(light))
        tables = []
        for bunch in bunches:
            ones, others = [light[n].r.float() for n in bunch], [light[n].c.float() for n in bunch]
            tables.append(norms(ones, math.inf)[:, None])
            if light[bunch[0]].r.dtype != torch.float32:  # a difference in fewer bits is rounded
                tables.append(norms(pairwise("sub", others, ones), math.inf)[:, None])
        read = (value for (value,) in _read(tables))
        scales: dict[int, tuple[float, float]] = {}
        most: dict[int, float] = {}
        for bunch in bunches:
            of_r = list(itertools.islice(read, len(bunch)))
            single = light[bunch[0]].r.dtype == torch.float32
            of_d = [largest[n] for n in bunch] if single else list(itertools.islice(read, len(bunch)))
            most.update(zip(bunch, of_d, strict=True))
            scales.update(zip(bunch, zip(map(_scale, of_r), map(_scale, of_d), strict=True), strict=True))
        measured = _read([_scaled_sums([light[n] for n in bunch], [scales[n] for n in bunch]) for bunch in bunches])
        rows: dict[int, list[float]] = {}
        for n, (rr, rd, dd, fourths) in zip(itertools.chain.from_iterable(bunches), measured, strict=True):
            r, d = scales[n]
            sums = [(rr * r) ** 2, rd * r * d, (dd * d) ** 2, (fourths * r * r) ** 2, float(most[n] > 0), 0.0]
            *before, far = rows.get(light[n].place, [0.0] * _WIDTH)
            rows[light[n].place] = [*(old + new for old, new in zip(before, sums, strict=True)), max(most[n], far)]
        return rows

    def _is_light(self, part: _Part) -> bool:
        """Return whether a part belongs to a pair that is large, on a GPU, and of single precision or less."""
        if not (self.sized or self.apart[part.place]) or self.pairs[part.place][0].numel() <= _SMALL:
            return False
        return part.r.device.type in _LIGHT_ON and part.r.itemsize in (2, 4)


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


def _bunches(parts: Sequence[_Part], *, in_float64: bool = False) -> Iterator[list[int]]:
    """Group the indices of parts by device and dtype, with as many elements as may be held a few times more.

    Args:
        parts: of any devices and dtypes.
        in_float64: the elements will be held in float64, a dozen times over.
    """
    groups: dict[Any, list[int]] = {}
    for n, part in enumerate(parts):
        groups.setdefault((part.r.device, part.r.dtype), []).append(n)
    for (device, _), group in groups.items():
        if device.type == "cuda":
            # Launches are dear: each element held may take 512 bytes of what is free.
            most = min(_BUNCH_ON_GPU, max(CHUNK, (free_bytes(device) or 0) // 512))
            most = most // 8 if in_float64 else most
        else:
            most = _TOGETHER if in_float64 else CHUNK
        bunch: list[int] = []
        held = 0
        for n in group:
            size = parts[n].r.numel()
            if bunch and held + size > most:
                yield bunch
                bunch, held = [], 0
            bunch.append(n)
            held += size
        yield bunch


def _scale(largest: float) -> float:
    """Return what tensors are divided by: 1 where their largest element is 0 or not finite, or has no inverse."""
    smallest = 2.0**-126  # the smallest normal number of float32
    return largest if smallest < largest < 1 / smallest else 1.0


def _scaled_sums(parts: Sequence[_Part], scales: Sequence[tuple[float, float]]) -> torch.Tensor:
    """Return |r|, <r, d>, |d| and |r^2| of each part, of shape [parts, 4]; r and d are divided by their scales."""
    ones, others = [part.r.float() for part in parts], [part.c.float() for part in parts]
    d = pairwise("mul", pairwise("sub", others, ones), [1.0 / of_d for _, of_d in scales])
    r = pairwise("mul", ones, [1.0 / of_r for of_r, _ in scales])
    products = torch.stack([torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in zip(r, d, strict=True)])
    squares = norms(pairwise("mul", r, r))
    return torch.stack([norms(r), products, norms(d), squares], dim=1)


def _unlike(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return, as one boolean, whether a pair that cannot be compared with others has to be measured."""
    incomparable = r.is_quantized or (r.is_floating_point() and r.itemsize == 1)  # torch cannot compare these
    if r.device != c.device or not r.numel() or incomparable:
        return torch.ones(1, dtype=torch.bool, device=c.device if r.device.type == "cpu" else r.device)
    return torch.stack([((a != b) | a.isfinite().logical_not()).any() for a, b in _chunks(r, c)]).any()


def _measure_equal(r: torch.Tensor) -> torch.Tensor:
    """Return the sums of `_measure` for a tensor and its equal."""
    sums = torch.zeros(1, _WIDTH, dtype=torch.float64, device=r.device)
    for part, _ in _chunks(r, r):
        values = _float64(part) if not is_numeric(r) else part
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        sums[0, 0] += torch.linalg.vector_norm(values, dtype=torch.float64).square()
        fourths = values.to(torch.float64).square()  # a pow in float64 is slow
        sums[0, 3] += torch.linalg.vector_norm(fourths, dtype=torch.float64).square()
    return sums


def _measure(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return the sums of a pair, float64 of shape [1, 7], on the device that they were computed on."""
    device = c.device if r.device.type == "cpu" else r.device
    row = torch.zeros(_WIDTH, dtype=torch.float64, device=device)
    for chunk_r, chunk_c in _chunks(r, c):
        part_r, part_c = chunk_r.to(device), chunk_c.to(device)
        # Integers are compared as they are: float64 holds 53 bits of an int64.
        same = None if is_numeric(r) else part_r == part_c
        part_r, d, unequal, unlike = _compared(_float64(part_r), _float64(part_c), same)
        squares = part_r * part_r
        products = squares.sum(), torch.dot(part_r, d), torch.dot(d, d), torch.dot(squares, squares)
        row[:-1] += torch.stack([each.to(torch.float64) for each in (*products, unequal.sum(), unlike.sum())])
        if d.numel():
            row[-1] = torch.maximum(row[-1], d.abs().amax())
    return row[None]


def _measure_many(r: Sequence[torch.Tensor], c: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of `_measure` of many pairs, float64 of shape [pairs, 7], in a few launches for all."""
    lengths = torch.tensor([tensor.numel() for tensor in r], device=r[0].device)
    joined = (torch.cat([tensor.reshape(-1) for tensor in side]).to(torch.float64) for side in (r, c))
    first, d, unequal, unlike = _compared(*joined)
    squares = first * first
    summed = (squares, first * d, d * d, squares * squares, unequal.to(d.dtype), unlike.to(d.dtype))
    sums = [torch.segment_reduce(each, "sum", lengths=lengths, unsafe=True) for each in summed]
    return torch.stack([*sums, torch.segment_reduce(d.abs(), "max", lengths=lengths, unsafe=True)], dim=1)


def _float64(part: torch.Tensor) -> torch.Tensor:
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    return part.to(torch.float64).reshape(-1)


def is_numeric(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds numbers that rounding may change."""
    return tensor.is_floating_point() or tensor.is_complex()


def _compared(
    r: torch.Tensor, c: torch.Tensor, same: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return r and c - r where both are finite and 0 elsewhere, where they are not equal, and where not alike."""
    same = (r == c) | (r.isnan() & c.isnan()) if same is None else same.reshape(-1)
    finite = r.isfinite() & c.isfinite()
    d = torch.where(finite, c - r, 0.0)
    return torch.where(finite, r, 0.0), d, same.logical_not(), (finite | same).logical_not()


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
