"""The sums that a difference between tensors is made of: few passes, few launches, read back from a device at once."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hotloop._torch.foreach import multiplied, norms, scaled, subtracted
from hotloop.measure.machine import free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Pair = tuple[torch.Tensor, torch.Tensor]

# Elements held in float64 at a time: four temporaries of 32 MB, little beside what a training step holds.
CHUNK = 1 << 22
_CHUNK_ON_GPU = 1 << 24
"""There, where a launch takes longer than many elements, and 512 MB are little as well."""

_MOST_ON_GPU, _SHARE_OF_FREE = 1 << 27, 1 << 9
"""Elements of many tensors that are measured at once where much memory is free, and bytes of it for each of them."""

_SMALL = 1 << 18
"""Elements up to which a tensor is measured together with others: a segment is summed by one block of threads."""
_TOGETHER = 1 << 21
"""Elements that are measured together on a CPU, in a dozen temporaries in float64; on a GPU more, by what is free."""

_HALF_AND_SINGLE, _LIGHT_ON = (2, 4), ("cuda",)
_SUMS = 6  # of _measure; the largest difference is beside them, as it does not add up
_WIDTH = _SUMS + 1
_SQUARES, _FOURTHS = 0, 3  # where the sums of r^2 and r^4 stand

_SMALLEST = 2.0**-126  # positive and normal in float32

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Part(NamedTuple):
    """A pair, or a piece of a large one, that is compared in few launches with many others."""

    place: int
    r: torch.Tensor
    c: torch.Tensor


def _chunks(r: torch.Tensor, c: torch.Tensor) -> Iterator[Pair]:
    """Cut both along dimensions, never by a flat view: that would copy a tensor whose strides are not its own."""
    most = max(_most(r), _most(c))
    if r.numel() <= most:
        yield r, c
        return
    dim = max(range(r.dim()), key=lambda place: r.shape[place])
    step = max(1, r.shape[dim] * most // r.numel())
    for start in range(0, r.shape[dim], step):
        length = min(step, r.shape[dim] - start)
        yield from _chunks(r.narrow(dim, start, length), c.narrow(dim, start, length))


def sums_of(pairs: Sequence[Pair], *, sized: bool) -> list[list[float]]:
    r"""Give the sums of each pair: of r^2, r*d, d^2 and r^4, of elements unequal and unalike, and the largest \|d\|.

    r is the reference, d what the candidate is apart from it; both count as 0 where one of them is not finite. Two
    elements are alike where both are finite, or equal, or both NaN.

    Args:
        pairs: reference and candidate, of one shape and dtype.
        sized: whether the squares and fourth powers are wanted of pairs that are equal; else fourth powers are 0, and
            squares of float32's precision, or 0 where all pairs are equal.
    """
    # Mostly all are equal where eager's own kernels are compared: that is a sixth of the work to find out.
    parts = [_Part(place, *part) for place, pair in enumerate(pairs) if _of_many(*pair) for part in _chunks(*pair)]
    largest, apart = _apart(pairs, parts)
    if not sized and not any(apart):
        return [[0.0] * _WIDTH for _ in pairs]
    light = [n for n, part in enumerate(parts) if (sized or apart[part.place]) and _is_light(*pairs[part.place])]
    rows = _lightly([parts[n] for n in light], [largest[n] for n in light])
    rows |= _heavily([place for place in range(len(pairs)) if place not in rows], pairs, parts, apart, sized=sized)
    for place, sums in rows.items():
        if not all(map(math.isfinite, sums)):  # NaN, infinities, or past what float32 holds: there are such tensors
            (rows[place],) = _read([_measure(*pairs[place]) if apart[place] else _alone(pairs[place][0])])
    return [rows[place] for place in range(len(pairs))]


def _heavily(
    places: Sequence[int], pairs: Sequence[Pair], parts: Sequence[_Part], apart: Sequence[bool], *, sized: bool
) -> dict[int, list[float]]:
    """Give the sums of pairs in float64, small ones in few launches; of equal ones mostly the squares."""
    owners: list[int] = []
    tables: list[torch.Tensor] = []

    def add(table: torch.Tensor, some: Iterable[int]) -> None:
        tables.append(table)
        owners.extend(some)

    left = set(places)
    if not sized:  # one launch for each of them would be long
        alone = [part for part in parts if part.place in left and not apart[part.place]]
        for bunch in _bunches(alone):
            add(_squares_alone([alone[n].r for n in bunch]), (alone[n].place for n in bunch))
        left -= {part.place for part in alone}
    whole = (part for part in parts if part.place in left and part.r is pairs[part.place][0])
    small = [part for part in whole if part.r.numel() <= _SMALL]
    for bunch in _bunches(small, _most_measured):
        add(_measure_many([small[n].r for n in bunch], [small[n].c for n in bunch]), (small[n].place for n in bunch))
    left -= {part.place for part in small}
    for place in sorted(left):
        add(_measure(*pairs[place]) if apart[place] else _alone(pairs[place][0]), [place])
    rows: dict[int, list[float]] = {}
    for place, sums in zip(owners, _read(tables), strict=True):
        rows[place] = [old + new for old, new in zip(rows[place], sums, strict=True)] if place in rows else sums
    return rows


def _is_light(r: torch.Tensor, c: torch.Tensor) -> bool:
    """Tell whether a pair is large, on a GPU, and of single precision or less."""
    if r.numel() <= _SMALL or r.device.type not in _LIGHT_ON or r.device != c.device:
        return False
    plain = type(r) in _PLAIN and type(c) in _PLAIN and r.layout == torch.strided
    return plain and r.is_floating_point() and r.itemsize in _HALF_AND_SINGLE


def _lightly(parts: Sequence[_Part], apart: Sequence[float]) -> dict[int, list[float]]:
    """Give the sums of pairs that are large, in few launches and in float32; not finite where an element is not.

    The difference is exact in float32 for elements within a factor of two of each other. Before anything is squared,
    both are divided by their largest element, so that nothing is lost at either end of the range of float32: the second
    moments of Adam are squares themselves. Sums have a relative error of some 1e-6, <r, d> one of that part of |r| |d|.

    Args:
        parts: of which pairs, by their places.
        apart: the largest |c - r| of each, in its own dtype.
    """
    bunches = list(_bunches(parts))
    tables = []
    for bunch in bunches:
        ones, others = _single([parts[n] for n in bunch])
        tables.append(norms(ones, math.inf)[:, None])
        if parts[bunch[0]].r.dtype != torch.float32:  # a difference in fewer bits is rounded
            tables.append(norms(subtracted(others, ones), math.inf)[:, None])
    read = (one for (one,) in _read(tables))
    extents: dict[int, tuple[float, float]] = {}
    for bunch in bunches:
        of_r = list(itertools.islice(read, len(bunch)))
        single = parts[bunch[0]].r.dtype == torch.float32
        of_d = [apart[n] for n in bunch] if single else list(itertools.islice(read, len(bunch)))
        extents.update(zip(bunch, zip(of_r, of_d, strict=True), strict=True))
    scales = {n: (_scale(r), _scale(d)) for n, (r, d) in extents.items()}
    measured = _read([_scaled_sums([parts[n] for n in bunch], [scales[n] for n in bunch]) for bunch in bunches])
    rows: dict[int, list[float]] = {}
    for n, (rr, rd, dd, fourths) in zip(itertools.chain.from_iterable(bunches), measured, strict=True):
        (_, most), (r, d) = extents[n], scales[n]
        sums = [(rr * r) ** 2, rd * r * d, (dd * d) ** 2, (fourths * r * r) ** 2, float(most > 0), 0.0]
        *before, largest = rows.get(parts[n].place, [0.0] * _WIDTH)
        rows[parts[n].place] = [*(old + new for old, new in zip(before, sums, strict=True)), max(most, largest)]
    return rows


def _scale(largest: float) -> float:
    """Give what tensors are divided by: 1 where their largest element is 0 or not finite, or has no inverse."""
    return largest if _SMALLEST < largest < 1 / _SMALLEST else 1.0


def _single(parts: Sequence[_Part]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Give both sides of parts of one dtype in float32."""
    if parts[0].r.dtype == torch.float32:
        return [part.r for part in parts], [part.c for part in parts]
    return [part.r.float() for part in parts], [part.c.float() for part in parts]


def _scaled_sums(parts: Sequence[_Part], scales: Sequence[tuple[float, float]]) -> torch.Tensor:
    """Give |r|, <r, d>, |d| and the norm of r^2 of each part, r and d divided by their scales, of shape [parts, 4]."""
    ones, others = _single(parts)
    d = scaled(subtracted(others, ones), [1.0 / by for _, by in scales])
    r = scaled(ones, [1.0 / by for by, _ in scales])
    products = torch.stack([torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in zip(r, d, strict=True)])
    squares = norms(multiplied(r, r))
    return torch.stack([norms(r), products, norms(d), squares], dim=1)


def _squares_alone(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give the sums of tensors of which only the squares are wanted, as far as float32 tells: infinite beyond that."""
    squares = norms(tensors).to(torch.float64).square()
    sums = squares.new_zeros(len(tensors), _WIDTH)
    sums[:, _SQUARES] = squares
    return sums


def _apart(pairs: Sequence[Pair], parts: Sequence[_Part]) -> tuple[list[float], list[bool]]:
    r"""Give the largest \|c - r\| of each part in its own dtype, and tell of each pair whether it has to be measured.

    The largest is NaN where an element is not finite. A pair is measured where an element differs, or is not finite.
    """
    bunches = list(_bunches(parts))
    sides = (([parts[n].c for n in bunch], [parts[n].r for n in bunch]) for bunch in bunches)
    tables = [norms(subtracted(*both), math.inf)[:, None] for both in sides]
    told = {part.place for part in parts}
    others = [place for place in range(len(pairs)) if place not in told]
    read = _read([*tables, *(_unlike(*pairs[place]).reshape(1, 1) for place in others)])
    largest = [0.0] * len(parts)
    apart = [False] * len(pairs)
    for n, (most,) in zip(itertools.chain.from_iterable(bunches), read, strict=False):
        largest[n] = most
        apart[parts[n].place] |= most != 0  # as is NaN, which inf - inf and NaN - NaN are
    for place, (unlike,) in zip(others, read[len(parts) :], strict=True):
        apart[place] = bool(unlike)
    return largest, apart


def _of_many(r: torch.Tensor, c: torch.Tensor) -> bool:
    """Tell whether a pair can be compared with many others at once."""
    plain = type(r) in _PLAIN and type(c) in _PLAIN and r.layout == torch.strided and r.is_floating_point()
    return plain and r.device == c.device and r.itemsize > 1 and r.numel() > 0


def _most(tensor: torch.Tensor) -> int:
    return _CHUNK_ON_GPU if tensor.is_cuda else CHUNK


def _most_together(device: torch.device) -> int:
    """Give how many elements of several tensors may be held once more, a few times over: launches are dear."""
    if device.type != "cuda":
        return CHUNK
    return min(_MOST_ON_GPU, max(_CHUNK_ON_GPU, (free_bytes(device) or 0) // _SHARE_OF_FREE))


def _most_measured(device: torch.device) -> int:
    """Give how many elements of several tensors may be held in float64, a dozen times over."""
    return _TOGETHER if device.type != "cuda" else _most_together(device) // 8


def _bunches(parts: Sequence[_Part], most_of: Callable[[torch.device], int] = _most_together) -> Iterator[list[int]]:
    """Cut the indices of parts by device and dtype, and where they have as many elements as may be held once more."""
    groups: dict[Any, list[int]] = {}
    for n, part in enumerate(parts):
        groups.setdefault((part.r.device, part.r.dtype), []).append(n)
    for (device, _), group in groups.items():
        most = most_of(device)
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


def _unlike(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Tell of one pair that cannot be compared with others, in one boolean, whether it has to be measured."""
    odd = r.is_quantized or (r.is_floating_point() and r.itemsize == 1)  # torch cannot compare these
    if r.device != c.device or not r.numel() or odd:
        return torch.ones(1, dtype=torch.bool, device=c.device if r.device.type == "cpu" else r.device)
    return torch.stack([((a != b) | a.isfinite().logical_not()).any() for a, b in _chunks(r, c)]).any()


def _alone(r: torch.Tensor) -> torch.Tensor:
    """Give the sums of `_measure` for a tensor and its equal."""
    sums = torch.zeros(1, _WIDTH, dtype=torch.float64, device=r.device)
    for part, _ in _chunks(r, r):
        values = _float64(part) if not is_numeric(r) else part
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        sums[0, _SQUARES] += torch.linalg.vector_norm(values, dtype=torch.float64).square()
        fourths = values.to(torch.float64).square()  # a pow in float64 is slow
        sums[0, _FOURTHS] += torch.linalg.vector_norm(fourths, dtype=torch.float64).square()
    return sums


def _measure(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Give r's and c's sums, float64 of shape [1, _WIDTH], on the device that they were computed on."""
    device = c.device if r.device.type == "cpu" else r.device
    sums = torch.zeros(_SUMS, dtype=torch.float64, device=device)
    largest = torch.zeros(1, dtype=torch.float64, device=device)
    for chunk_r, chunk_c in _chunks(r, c):
        part_r, part_c = chunk_r.to(device), chunk_c.to(device)
        # Integers are compared as they are: float64 holds 53 bits of an int64.
        same = None if is_numeric(r) else part_r == part_c
        more, most = _sums(_float64(part_r), _float64(part_c), same)
        sums += more
        largest = torch.maximum(largest, most)
    return torch.cat([sums, largest])[None]


def _measure_many(r: Sequence[torch.Tensor], c: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give the sums of `_measure` of many pairs, float64 of shape [pairs, _WIDTH], in a few launches for all."""
    lengths = torch.tensor([one.numel() for one in r], device=r[0].device)
    first, second = (torch.cat([one.reshape(-1) for one in each]).to(torch.float64) for each in (r, c))
    first, d, other, unlike = _compared(first, second)
    squares = first * first
    summed = (squares, first * d, d * d, squares * squares, other.to(d.dtype), unlike.to(d.dtype))
    sums = [torch.segment_reduce(each, "sum", lengths=lengths, unsafe=True) for each in summed]
    return torch.stack([*sums, torch.segment_reduce(d.abs(), "max", lengths=lengths, unsafe=True)], dim=1)


def _float64(part: torch.Tensor) -> torch.Tensor:
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj())
    return part.to(torch.float64).reshape(-1)


def is_numeric(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor holds numbers that rounding may change."""
    return tensor.is_floating_point() or tensor.is_complex()


def _sums(r: torch.Tensor, c: torch.Tensor, same: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    r, d, other, unlike = _compared(r, c, same)
    squares = r * r
    sums = (squares.sum(), torch.dot(r, d), torch.dot(d, d), torch.dot(squares, squares), other.sum(), unlike.sum())
    largest = d.abs().amax().reshape(1) if d.numel() else d.new_zeros(1)
    return torch.stack([each.to(torch.float64) for each in sums]), largest


def _compared(
    r: torch.Tensor, c: torch.Tensor, same: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give r and c - r where both are finite and 0 elsewhere, where they are not equal, and where not alike at all."""
    same = (r == c) | (r.isnan() & c.isnan()) if same is None else same.reshape(-1)
    finite = r.isfinite() & c.isfinite()
    d = torch.where(finite, c - r, 0.0)
    return torch.where(finite, r, 0.0), d, same.logical_not(), (finite | same).logical_not()


def _read(tables: Sequence[torch.Tensor]) -> list[list[float]]:
    """Bring the rows of tables of one width to the host, one transfer a device."""
    places: dict[torch.device, list[int]] = {}
    for place, table in enumerate(tables):
        places.setdefault(table.device, []).append(place)
    read: dict[int, list[list[float]]] = {}
    for indices in places.values():
        rows = iter(torch.cat([tables[place] for place in indices]).tolist())
        read.update((place, list(itertools.islice(rows, len(tables[place])))) for place in indices)
    return [row for place in range(len(tables)) for row in read[place]]
