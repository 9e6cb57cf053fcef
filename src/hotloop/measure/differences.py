"""Measures the difference between two sets of named tensors, in a few sums per tensor that are read back at once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch

from hotloop.measure.sums import is_numeric, sums_of

Tensors = Mapping[str, torch.Tensor | None]
PORTION = 1 << 26
"""Elements that are held at a time of tensors that are made as they are asked for: 256 MiB in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of a candidate tensor c from its reference r; sums in float64, over elements finite in both.

    Attributes:
        name: the tensor's name.
        numel: its number of elements.
        dtype: its dtype, as ``"float32"``.
        equal: every element compares equal, NaN equal to NaN (and 0.0 to -0.0).
        finite: NaN and infinities stand in the same places with the same signs, or there are none.
        tilt: s - 1, where s = <c, r> / <r, r> is the least-squares fit of c by s*r; None where r is all zero, or holds
            integers. Computed as <c - r, r> / <r, r>, which loses nothing to cancellation.
        residual: ||c - s*r|| / ||r||, what the fit leaves; None where ``tilt`` is None.
        relative: ||c - r|| / ||r||; infinite where r is all zero and c is not; None for integers.
        max_abs: the largest |c - r|.
        rms: the root mean square of r.
        rms_difference: the root mean square of c - r.
        effective: <r, r>^2 / sum(r^4), the number of elements that carry r (inverse participation ratio). It is numel
            where all elements have one size, 1 where a single element is all there is.
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

    @classmethod
    def from_sums(cls, name: str, r: torch.Tensor, sums: list[float]) -> Difference:
        """Make the difference from the reference tensor and the sums of `sums_of`."""
        rr, rd, dd, r4, unequal, unlike, largest = sums
        numeric = is_numeric(r)
        tilt = residual = relative = None
        if numeric and rr > 0:
            tilt = rd / rr
            residual = math.sqrt(max(0.0, dd / rr - tilt * tilt))
            relative = math.sqrt(dd / rr)
        elif numeric:
            relative = math.inf if dd > 0 else 0.0
        numel = max(1, r.numel())
        return cls(
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

    @property
    def slope(self) -> float | None:
        """|<c, r> / <r, r> - 1|: by how much the candidate is too large or too small as a whole."""
        return None if self.tilt is None else abs(self.tilt)

    @property
    def numeric(self) -> bool:
        """Whether the tensor holds floating or complex numbers; other tensors are equal or not."""
        return self.relative is not None

    @property
    def module(self) -> str:
        """The module that the tensor's name begins with: all tensors of one layer have it in common."""
        return self.name.rpartition(".")[0]

    @property
    def unrelated(self) -> bool:
        """Whether no factor makes the candidate of the reference: both are rounding, or they have other directions."""
        return not self.equal and (self.residual is None or self.residual > 0.5 * self.length)

    @property
    def opposite(self) -> bool:
        """Whether the candidate is the reference times a negative factor: rounding of so many elements never is."""
        few = 8
        return self.tilt is not None and self.tilt < -1 and not self.unrelated and self.effective >= few

    @property
    def length(self) -> float:
        """||c|| / ||r||: |c|^2 = |r|^2 * ((1 + tilt)^2 + residual^2)."""
        return math.hypot(1.0 + (self.tilt or 0.0), self.residual or 0.0)

    def measure(self, name: str) -> float | None:
        """Return the number that a ``slope``, ``residual`` or ``relative`` score is about.

        Of a slope that is the tilt, with its sign. ``relative`` scores are about small tensors, so the number is the
        absolute difference.
        """
        if name == "slope":
            return self.tilt
        return self.residual if name == "residual" else self.rms_difference

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain JSON data."""
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
    """Measure each tensor of ``candidate`` against the tensor of the same name in ``reference``.

    ``None`` says that there is no such tensor (no gradient); None on both sides is no entry. Tensors may be of any
    dtype that casts to float64, complex, strided in any way or sparse (compared coalesced). A pair on two devices is
    measured on the accelerator, the other tensor moved in parts. At most ``sums.CHUNK`` elements are held in float64
    at a time.

    Args:
        reference: tensors by name.
        candidate: the tensors to measure.
        sized: whether ``rms`` and ``effective`` are wanted where all tensors are equal. Else they are 0 then.

    Returns:
        the differences by name in the reference's order, and the pairs that cannot be measured.
    """
    found: dict[str, Difference] = {}
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    mismatches = []
    held = 0
    for name in (*reference, *(name for name in candidate if name not in reference)):
        r, c = reference.get(name), candidate.get(name)
        if r is None or c is None:
            # A side that lacks a name altogether is not the same as a side whose tensor of that name is None.
            sides = [
                "absent" if name not in side else "None" if side[name] is None else "a tensor"
                for side in (candidate, reference)
            ]
            if sides[0] != sides[1]:
                mismatches.append(Mismatch(name, "missing", *sides))
        elif r.shape != c.shape:
            mismatches.append(Mismatch(name, "shape", str(tuple(c.shape)), str(tuple(r.shape))))
        elif r.dtype != c.dtype:
            mismatches.append(Mismatch(name, "dtype", _short(c.dtype), _short(r.dtype)))
        elif (r.layout == torch.strided) != (c.layout == torch.strided):
            mismatches.append(Mismatch(name, "layout", _short(c.layout), _short(r.layout)))
        else:
            pairs[name] = r, c
            held += r.numel()
        # Of tensors that are made as they are asked for no more than some are held. Without sizes, the sums of one
        # tensor depend on whether another one differs.
        if sized and held >= PORTION:
            found |= _measured(pairs, sized=sized)
            pairs, held = {}, 0
    return found | _measured(pairs, sized=sized), tuple(mismatches)


def _measured(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], *, sized: bool) -> dict[str, Difference]:
    with torch.no_grad():
        sums = sums_of([_aligned(r, c) for r, c in pairs.values()], sized=sized)
    return {name: Difference.from_sums(name, pairs[name][0], row) for name, row in zip(pairs, sums, strict=True)}


def _short(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def _aligned(r: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dense tensors whose elements correspond; of sparse tensors the values over the union of their indices."""
    # A subclass of Parameter may refuse to be compared with other kinds, so the tensor that it holds is compared.
    r, c = (
        side.detach() if isinstance(side, torch.nn.Parameter) and type(side) is not torch.nn.Parameter else side
        for side in (r, c)
    )
    if r.layout == torch.strided:
        return r, c
    r, c = (side.to_sparse().coalesce() for side in (r, c))
    c = c.to(r.device)
    indices = torch.cat([r.indices(), c.indices()], dim=1)
    zeros_c, zeros_r = torch.zeros_like(c.values()), torch.zeros_like(r.values())
    values = torch.cat([r.values(), zeros_c]), torch.cat([zeros_r, c.values()])
    full_r, full_c = (
        torch.sparse_coo_tensor(indices, side, r.shape, check_invariants=False).coalesce().values() for side in values
    )
    return full_r, full_c
