"""The sums that a difference between tensors is made of: few passes, few launches, read back from a device at once."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.foreach import multiplied, norms, scaled, subtracted, unequal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Pair = tuple[torch.Tensor, torch.Tensor]

# Elements held in float64 at a time: four temporaries of 32 MB, little beside what a training step holds.
CHUNK = 1 << 22
_CHUNK_ON_GPU = 1 << 24
"""There, where a launch takes longer than many elements, and 512 MB are little as well."""

_MOST_ON_GPU, _SHARE_OF_FREE = 1 << 26, 1 << 10
"""Elements of many tensors that are measured at once where much memory is free, and bytes of it for each of them."""

_SMALL = 1 << 18
"""Elements up to which a tensor is measured together with others: a segment is summed by one block of threads."""
_TOGETHER = 1 << 21
"""Elements that are measured together, in a dozen temporaries in float64."""

_HALF_AND_SINGLE, _LIGHT_ON = (2, 4), ("cuda",)
_SUMS = 6  # of _measure; the largest difference is beside them, as it does not add up
_WIDTH = _SUMS + 1
_SQUARES, _FOURTHS = 0, 3  # where the sums of r^2 and r^4 stand

_SMALLEST = 2.0**-126  # positive and normal in float32

_PLAIN = (torch.Tensor, torch.nn.Parameter)


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
    apart = _unequal(pairs)
    if not sized and not any(apart):
        return [[0.0] * _WIDTH for _ in pairs]
    wanted = [place for place in range(len(pairs)) if sized or apart[place]]
    light = _lightly([place for place in wanted if _is_light(*pairs[place])], pairs)
    found: dict[int, torch.Tensor] = {}
    many = [place for place, pair in enumerate(pairs) if place not in light and _of_many(*pair)]
    if not sized:  # one launch for each of them would be long
        found = _squares_alone([place for place in many if not apart[place]], pairs)
    small = [place for place in many if place not in found and pairs[place][0].numel() <= _SMALL]
    for some in _bunches(small, pairs, _TOGETHER):
        ones, others = zip(*(pairs[place] for place in some), strict=True)
        found.update(zip(some, _measure_many(ones, others).unbind(), strict=True))
    left = [place for place in range(len(pairs)) if place not in light]
    measured = [
        found[place] if place in found else _measure(*pairs[place]) if apart[place] else _alone(pairs[place][0])
        for place in left
    ]
    rows = light | dict(zip(left, _read(measured), strict=True))
    for place, sums in rows.items():
        if not all(map(math.isfinite, sums)):  # NaN, infinities, or past what float32 holds: there are such tensors
            rows[place] = _read([_measure(*pairs[place]) if apart[place] else _alone(pairs[place][0])])[0]
    return [rows[place] for place in range(len(pairs))]


def _is_light(r: torch.Tensor, c: torch.Tensor) -> bool:
    """Tell whether a pair is large, on a GPU, and of single precision or less."""
    if r.numel() <= _SMALL or r.device.type not in _LIGHT_ON or r.device != c.device:
        return False
    plain = type(r) in _PLAIN and type(c) in _PLAIN and r.layout == torch.strided
    return plain and r.is_floating_point() and r.itemsize in _HALF_AND_SINGLE


def _lightly(places: list[int], pairs: Sequence[Pair]) -> dict[int, list[float]]:
    """Give the sums of pairs that are large, in few launches and in float32; not finite where an element is not.

    The difference is exact in float32 for elements within a factor of two of each other. Before anything is squared,
    both are divided by their largest element, so that nothing is lost at either end of the range of float32: the second
    moments of Adam are squares themselves. Sums have a relative error of some 1e-6, <r, d> one of that part of |r| |d|.
    """
    if not places:
        return {}
    owners: list[int] = []
    parts: list[Pair] = []
    for place in places:
        for part in _chunks(*pairs[place]):
            owners.append(place)
            parts.append(part)
    bunches = list(_bunches(list(range(len(parts))), parts))
    largest = _read([one for bunch in bunches for one in _largest([parts[n] for n in bunch]).unbind()])
    order = [n for bunch in bunches for n in bunch]
    scales = {n: [_scale(one) for one in each] for n, each in zip(order, largest, strict=True)}
    measured = [one for bunch in bunches for one in _scaled_sums([parts[n] for n in bunch], scales, bunch).unbind()]
    rows = {place: [0.0] * _WIDTH for place in places}
    for n, (_, most), (rr, rd, dd, fourths) in zip(order, largest, _read(measured), strict=True):
        row, (r, d) = rows[owners[n]], scales[n]
        sums = [(rr * r) ** 2, rd * r * d, (dd * d) ** 2, (fourths * r * r) ** 2, float(most > 0), 0.0]
        rows[owners[n]] = [*(old + new for old, new in zip(row[:-1], sums, strict=True)), max(most, row[-1])]
    return rows


def _scale(largest: float) -> float:
    """Give what tensors are divided by: 1 where their largest element is 0 or not finite, or has no inverse."""
    return largest if _SMALLEST < largest < 1 / _SMALLEST else 1.0


def _largest(pairs: Sequence[Pair]) -> torch.Tensor:
    """Give the largest |r| and |c - r| of each pair, in float32, of shape [pairs, 2]."""
    ones, others = ([one.float() for one in side] for side in zip(*pairs, strict=True))
    return torch.stack([norms(ones, math.inf), norms(subtracted(others, ones), math.inf)], dim=1)


def _scaled_sums(pairs: Sequence[Pair], scales: Mapping[int, list[float]], places: Sequence[int]) -> torch.Tensor:
    """Give |r|, <r, d>, |d| and the norm of r^2 of each pair, r and d divided by their scales, of shape [pairs, 4]."""
    ones, others = ([one.float() for one in side] for side in zip(*pairs, strict=True))
    by = [[1.0 / one for one in scales[place]] for place in places]
    d = scaled(subtracted(others, ones), [one for _, one in by])
    r = scaled(ones, [one for one, _ in by])
    products = torch.stack([torch.dot(a.reshape(-1), b.reshape(-1)) for a, b in zip(r, d, strict=True)])
    squares = norms(multiplied(r, r))
    return torch.stack([norms(r), products, norms(d), squares], dim=1)


def _squares_alone(places: list[int], pairs: Sequence[Pair]) -> dict[int, torch.Tensor]:
    """Give the sums of tensors of which only the squares are wanted, as far as float32 tells: infinite beyond that."""
    found: dict[int, torch.Tensor] = {}
    for some in _bunches(places, pairs):
        squares = norms([pairs[place][0] for place in some]).to(torch.float64).square()
        sums = squares.new_zeros(len(some), _WIDTH)
        sums[:, _SQUARES] = squares
        found.update(zip(some, sums.unbind(), strict=True))
    return found


def _unequal(pairs: Sequence[Pair]) -> list[bool]:
    """Tell of each pair whether it has to be measured: where an element differs, or is not finite."""
    many = [place for place, pair in enumerate(pairs) if _of_many(*pair)]
    told: dict[int, torch.Tensor] = {}
    for some in _bunches(many, pairs):
        ones, others = zip(*(pairs[place] for place in some), strict=True)
        told.update(zip(some, unequal(ones, others).reshape(-1, 1).unbind(), strict=True))
    return [bool(one) for (one,) in _read([told[n] if n in told else _unlike(*pair) for n, pair in enumerate(pairs)])]


def _of_many(r: torch.Tensor, c: torch.Tensor) -> bool:
    """Tell whether a pair can be compared with many others at once."""
    plain = type(r) in _PLAIN and type(c) in _PLAIN and r.layout == torch.strided and r.is_floating_point()
    return plain and r.device == c.device and r.itemsize > 1 and 0 < r.numel() <= _most(r)


def _most(tensor: torch.Tensor) -> int:
    return _CHUNK_ON_GPU if tensor.is_cuda else CHUNK


def _most_together(device: torch.device) -> int:
    """Give how many elements of several tensors may be held once more, a few times over: launches are dear."""
    if device.type != "cuda":
        return CHUNK
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_MOST_ON_GPU, max(_CHUNK_ON_GPU, (free + unused) // _SHARE_OF_FREE))


def _bunches(places: list[int], pairs: Sequence[Pair], at_most: int | None = None) -> Iterator[list[int]]:
    """Cut a list of pairs by device and dtype, and where they have as many elements as may be held once more."""
    groups: dict[Any, list[int]] = {}
    for place in places:
        groups.setdefault((pairs[place][0].device, pairs[place][0].dtype), []).append(place)
    for (device, _), group in groups.items():
        most = at_most or _most_together(device)
        bunch: list[int] = []
        held = 0
        for place in group:
            size = pairs[place][0].numel()
            if bunch and held + size > most:
                yield bunch
                bunch, held = [], 0
            bunch.append(place)
            held += size
        yield bunch


def _unlike(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Tell of one pair, in a boolean of shape [1], whether it has to be measured."""
    odd = r.is_quantized or (r.is_floating_point() and r.itemsize == 1)  # torch cannot compare these
    if r.device != c.device or not r.numel() or odd:
        return torch.ones(1, dtype=torch.bool, device=c.device if r.device.type == "cpu" else r.device)
    return torch.stack([((a != b) | a.isfinite().logical_not()).any() for a, b in _chunks(r, c)]).any().reshape(1)


def _alone(r: torch.Tensor) -> torch.Tensor:
    """Give the sums of `_measure` for a tensor and its equal."""
    sums = torch.zeros(_WIDTH, dtype=torch.float64, device=r.device)
    for part, _ in _chunks(r, r):
        values = _float64(part) if not is_numeric(r) else part
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        sums[_SQUARES] += torch.linalg.vector_norm(values, dtype=torch.float64).square()
        fourths = values.to(torch.float64).square()  # a pow in float64 is slow
        sums[_FOURTHS] += torch.linalg.vector_norm(fourths, dtype=torch.float64).square()
    return sums


def _measure(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Give r's and c's sums, float64 of shape [_WIDTH], on the device that they were computed on."""
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
    return torch.cat([sums, largest])


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


def _read(measured: list[torch.Tensor]) -> list[list[float]]:
    """Bring all sums to the host, one transfer a device."""
    places: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(measured):
        places.setdefault(tensor.device, []).append(place)
    read: list[list[float]] = [[] for _ in measured]
    for indices in places.values():
        rows = torch.stack([measured[place] for place in indices]).tolist()
        for place, row in zip(indices, rows, strict=True):
            read[place] = row
    return read
