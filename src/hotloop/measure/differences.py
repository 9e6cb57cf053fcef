"""The difference between two sets of named tensors, in a few sums a tensor that are read back from a device at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from hotloop._torch.foreach import norms, unequal

# Elements held in float64 at a time: four temporaries of 32 MB, little beside what a training step holds.
CHUNK = 1 << 22
_CHUNK_ON_GPU = 1 << 24
"""There, where a launch takes longer than many elements, and 512 MB are little as well."""

_SMALL = 1 << 18
"""Elements up to which a tensor is measured together with others: a segment is summed by one block of threads."""
_TOGETHER = 1 << 21
"""Elements that are measured together, in a dozen temporaries in float64."""

_HALF_AND_SINGLE, _LIGHT_ON = (2, 4), ("cuda",)
_SUMS = 6  # of _measure; the largest difference is beside them, as it does not add up
_SQUARES, _FOURTHS = 0, 3  # where the sums of r^2 and r^4 stand

_PLAIN = (torch.Tensor, torch.nn.Parameter)

Tensors = Mapping[str, torch.Tensor | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """How far a candidate tensor c is from its reference r; sums over elements where both are finite, in float64.

    Attributes:
        name: the tensor's name.
        numel: its number of elements.
        dtype: its dtype, as ``"float32"``.
        equal: every element compares equal, NaN equal to NaN (and 0.0 to -0.0).
        finite: NaN and infinities stand in the same places with the same signs, or there are none.
        tilt: s - 1, where s = <c, r> / <r, r> is the least-squares fit of c by s*r; None where r is all zero, or holds
            integers. Computed as <c - r, r> / <r, r>, which loses nothing to cancellation.
        residual: ||c - s*r|| / ||r||, what the fit leaves; None where ``tilt`` is.
        relative: ||c - r|| / ||r||; infinite where r is all zero and c is not; None for integers.
        max_abs: the largest |c - r|.
        rms: the root mean square of r.
        rms_difference: the root mean square of c - r.
        effective: <r, r>^2 / sum(r^4), the number of elements that carry r (inverse participation ratio): numel where
            all have one size, 1 where one element is all there is.
    """

    name: str
    numel: int
    dtype: str
    equal: bool
    finite: bool
    tilt: float | None
    residual: float | None
    relative: float | None
    max_abs: float
    rms: float
    rms_difference: float
    effective: float

    @property
    def slope(self) -> float | None:
        """|<c, r> / <r, r> - 1|: by how much the candidate is too large or too small as a whole."""
        return None if self.tilt is None else abs(self.tilt)

    @property
    def numeric(self) -> bool:
        """Whether the tensor holds floating or complex numbers; others are equal or not."""
        return self.relative is not None

    def to_dict(self) -> dict[str, Any]:
        """Give the difference as plain JSON data."""
        return {**dataclasses.asdict(self), "slope": self.slope}


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """Two tensors that have no difference to measure: ``measure`` is missing, shape, dtype or layout."""

    name: str
    measure: str
    value: str
    expected: str


def differences(
    reference: Tensors, candidate: Tensors, *, sized: bool = True
) -> tuple[dict[str, Difference], tuple[Mismatch, ...]]:
    """Measure each tensor of ``candidate`` against the one of the same name in ``reference``.

    ``None`` says that there is no such tensor (no gradient); None on both sides is no entry. Tensors may be of any
    dtype that casts to float64, complex, strided in any way or sparse (compared coalesced). A pair on two devices is
    measured on the accelerator, the other tensor moved in parts. At most ``CHUNK`` elements are held in float64 at a
    time (four times as many on a GPU), and the host waits twice a device, whatever the number of tensors (sparse ones
    wait in ``coalesce``).

    Args:
        reference: tensors by name.
        candidate: what is measured against them.
        sized: whether ``rms`` and ``effective`` are wanted of tensors that are equal; else ``effective`` is 0, and
            ``rms`` is of float32's precision, or 0 where all tensors are equal.

    Returns:
        the differences by name in the reference's order, and the pairs that cannot be measured.
    """
    found: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    mismatches = []
    for name in (*reference, *(name for name in candidate if name not in reference)):
        r, c = reference.get(name), candidate.get(name)
        if r is None or c is None:
            # A name that one side lacks altogether is told from one whose tensor is None.
            sides = [_side(name, tensors) for tensors in (candidate, reference)]
            if sides[0] != sides[1]:
                mismatches.append(Mismatch(name, "missing", *sides))
            continue
        mismatch = _mismatch(name, r, c)
        if mismatch:
            mismatches.append(mismatch)
        else:
            found.append((name, r, c))
    with torch.no_grad():
        pairs = [_aligned(r.detach(), c.detach()) for _, r, c in found]
        # Mostly all are equal where eager's own kernels are compared: that is a sixth of the work to find out.
        apart = _unequal(pairs)
        wanted = sized or any(apart)
        raw = _read(_measured(pairs, apart, sized=sized)) if wanted else [[0.0] * (_SUMS + 1)] * len(pairs)
        for place, sums in enumerate(raw):
            if not all(map(math.isfinite, sums)):  # NaN, infinities, or past what float32 holds: there are such tensors
                raw[place] = _read([_measure(*pairs[place]) if apart[place] else _alone(pairs[place][0])])[0]
    return {pair[0]: _difference(pair[0], pair[1], sums) for pair, sums in zip(found, raw, strict=True)}, tuple(
        mismatches
    )


def _side(name: str, tensors: Tensors) -> str:
    if name not in tensors:
        return "absent"
    return "None" if tensors[name] is None else "a tensor"


def _mismatch(name: str, r: torch.Tensor, c: torch.Tensor) -> Mismatch | None:
    if r.shape != c.shape:
        return Mismatch(name, "shape", str(tuple(c.shape)), str(tuple(r.shape)))
    if r.dtype != c.dtype:
        return Mismatch(name, "dtype", _short(c.dtype), _short(r.dtype))
    if (r.layout == torch.strided) != (c.layout == torch.strided):
        return Mismatch(name, "layout", _short(c.layout), _short(r.layout))
    return None


def _short(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def _aligned(r: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give dense tensors whose elements correspond; of sparse ones the values over the union of their indices."""
    if r.layout == torch.strided:
        return r, c
    r, c = (each.to_sparse().coalesce() for each in (r, c))
    c = c.to(r.device)
    indices = torch.cat([r.indices(), c.indices()], dim=1)
    zeros_c, zeros_r = torch.zeros_like(c.values()), torch.zeros_like(r.values())
    values = torch.cat([r.values(), zeros_c]), torch.cat([zeros_r, c.values()])
    full_r, full_c = (
        torch.sparse_coo_tensor(indices, each, r.shape, check_invariants=False).coalesce().values() for each in values
    )
    return full_r, full_c


def _chunks(r: torch.Tensor, c: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
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


def _measured(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], apart: Sequence[bool], *, sized: bool
) -> list[torch.Tensor]:
    """Give the sums of each pair, of shape [_SUMS + 1]; ``apart`` says which are not equal."""
    found: dict[int, torch.Tensor] = {}
    many = [place for place, pair in enumerate(pairs) if _of_many(*pair)]
    if not sized:  # most of them are equal where eager's own kernels are compared, and one launch each would be long
        found = _squares_alone([place for place in many if not apart[place]], pairs)
    small = [place for place in many if place not in found and pairs[place][0].numel() <= _SMALL]
    for some in _bunches(small, pairs, _TOGETHER):
        ones, others = zip(*(pairs[place] for place in some), strict=True)
        found.update(zip(some, _measure_many(ones, others).unbind(), strict=True))
    return [
        found[place] if place in found else _measured_alone(*pair) if apart[place] else _alone(pair[0])
        for place, pair in enumerate(pairs)
    ]


def _measured_alone(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Give the sums of `_measure`; of large tensors of single precision on a GPU by fewer passes over them."""
    plain = type(r) in _PLAIN and type(c) in _PLAIN and r.device == c.device and r.layout == torch.strided
    light = plain and r.is_floating_point() and r.itemsize in _HALF_AND_SINGLE and r.device.type in _LIGHT_ON
    return _measure_lightly(r, c) if light and r.numel() > _SMALL else _measure(r, c)


def _measure_lightly(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Give the sums of `_measure` of two tensors in which all is finite; else the first of them is not.

    The difference is taken in float32, where it is exact for elements within a factor of two of each other, all sums in
    float64. <c - r, r> is (|c|^2 - |r|^2 - |c - r|^2) / 2, so that a tilt has an absolute error of some 1e-15.
    """
    sums = torch.zeros(_SUMS + 1, dtype=torch.float64, device=r.device)
    for chunk_r, chunk_c in _chunks(r, c):
        part_r, part_c = chunk_r.float(), chunk_c.float()
        d = part_c - part_r
        rr, cc, dd = (torch.linalg.vector_norm(one, dtype=torch.float64).square() for one in (part_r, part_c, d))
        largest = torch.linalg.vector_norm(d, math.inf).to(torch.float64)
        fourths = torch.linalg.vector_norm(part_r.to(torch.float64).square()).square()
        sums[:-1] += torch.stack([rr, (cc - rr - dd) / 2, dd, fourths, (largest > 0).to(rr.dtype), 0 * rr])
        sums[-1] = torch.maximum(sums[-1], largest)
    return sums


def _squares_alone(places: list[int], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Give the sums of tensors of which only the squares are wanted, as far as float32 tells: infinite beyond that."""
    found: dict[int, torch.Tensor] = {}
    for some in _bunches(places, pairs):
        squares = norms([pairs[place][0] for place in some]).to(torch.float64).square()
        sums = squares.new_zeros(len(some), _SUMS + 1)
        sums[:, _SQUARES] = squares
        found.update(zip(some, sums.unbind(), strict=True))
    return found


def _unequal(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[bool]:
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
    return _CHUNK_ON_GPU if tensor.device.type == "cuda" else CHUNK


def _bunches(
    places: list[int], pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], at_most: int | None = None
) -> Iterator[list[int]]:
    """Cut a list of pairs by device and dtype, and where they have as many elements as may be held once more."""
    groups: dict[Any, list[int]] = {}
    for place in places:
        groups.setdefault((pairs[place][0].device, pairs[place][0].dtype), []).append(place)
    for group in groups.values():
        bunch: list[int] = []
        held = 0
        for place in group:
            one = pairs[place][0]
            if bunch and held + one.numel() > (at_most or _most(one)):
                yield bunch
                bunch, held = [], 0
            bunch.append(place)
            held += one.numel()
        yield bunch


def _unlike(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Tell of one pair, in a boolean of shape [1], whether it has to be measured."""
    odd = r.is_quantized or (r.is_floating_point() and r.itemsize == 1)  # torch cannot compare these
    if r.device != c.device or not r.numel() or odd:
        return torch.ones(1, dtype=torch.bool, device=c.device if r.device.type == "cpu" else r.device)
    return torch.stack([((a != b) | a.isfinite().logical_not()).any() for a, b in _chunks(r, c)]).any().reshape(1)


def _alone(r: torch.Tensor) -> torch.Tensor:
    """Give the sums of `_measure` for a tensor and its equal."""
    sums = torch.zeros(_SUMS + 1, dtype=torch.float64, device=r.device)
    for part, _ in _chunks(r, r):
        values = _float64(part) if not _is_numeric(r) else part
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        sums[_SQUARES] += torch.linalg.vector_norm(values, dtype=torch.float64).square()
        fourths = values.to(torch.float64).square()  # a pow in float64 is slow
        sums[_FOURTHS] += torch.linalg.vector_norm(fourths, dtype=torch.float64).square()
    return sums


def _measure(r: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Give r's and c's sums, float64 of shape [_SUMS + 1], on the device that they were computed on."""
    device = c.device if r.device.type == "cpu" else r.device
    sums = torch.zeros(_SUMS, dtype=torch.float64, device=device)
    largest = torch.zeros(1, dtype=torch.float64, device=device)
    for chunk_r, chunk_c in _chunks(r, c):
        part_r, part_c = chunk_r.to(device), chunk_c.to(device)
        # Integers are compared as they are: float64 holds 53 bits of an int64.
        same = None if _is_numeric(r) else part_r == part_c
        more, most = _sums(_float64(part_r), _float64(part_c), same)
        sums += more
        largest = torch.maximum(largest, most)
    return torch.cat([sums, largest])


def _measure_many(r: Sequence[torch.Tensor], c: Sequence[torch.Tensor]) -> torch.Tensor:
    """Give the sums of `_measure` of many pairs, float64 of shape [pairs, _SUMS + 1], in a few launches for all."""
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


def _is_numeric(tensor: torch.Tensor) -> bool:
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


def _difference(name: str, r: torch.Tensor, sums: list[float]) -> Difference:
    rr, rd, dd, r4, unequal, unlike, largest = sums
    numeric = _is_numeric(r)
    tilt = residual = relative = None
    if numeric and rr > 0:
        tilt = rd / rr
        residual = math.sqrt(max(0.0, dd / rr - tilt * tilt))
        relative = math.sqrt(dd / rr)
    elif numeric:
        relative = math.inf if dd > 0 else 0.0
    numel = max(1, r.numel())
    return Difference(
        name=name,
        numel=r.numel(),
        dtype=_short(r.dtype),
        equal=unequal == 0,
        finite=unlike == 0,
        tilt=tilt,
        residual=residual,
        relative=relative,
        max_abs=largest,
        rms=math.sqrt(rr / numel),
        rms_difference=math.sqrt(dd / numel),
        effective=rr * rr / r4 if r4 > 0 else 0.0,
    )
