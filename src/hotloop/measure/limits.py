"""How far a tier may be from eager: limits from the project's own noise data, ``noise.json``.

Two honest compiles differ by rounding. How much depends on the model: a deep stack of BatchNorms magnifies rounding ten
thousandfold over an MLP. So a limit has a part from the data and a part that follows the set of tensors at hand. For a
tensor with residual e and n effective elements, in a set whose median residual is m::

    slope    <= base + e / 5 + 4 * max(e, m) / sqrt(n)
    residual <= max(own, 16 * m)
    m        <= median
    pooled   <= pooled + m / 5

Rounding that is independent from element to element moves the slope by e / sqrt(n) (a regression's standard error), so
4 standard errors are allowed. Rounding that all elements share (of the loss, of one activation) moves the slope by a
part of e. A wrong factor in one op moves the slope without a residual. The names are fields of ``Figures``.

A gradient can be all rounding: the gradient of an attention key's bias, or of a convolution's bias before BatchNorm, is
truly 0. So of a tensor whose root mean square is under 4 * floor of the set's median tensor, only the absolute
difference is judged. It may be floor of that median. Right compiles needed this below 0.012 of the median in bfloat16,
2e-6 in float32. Such rounding differs by its own size from one compile to the next: eager's tensor times a negative
factor is none, and beside its own layer's larger gradients a tensor is rounding only if no factor makes it of eager's.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from hotloop._torch.ambient import matmul_precision
from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hotloop.measure.differences import Difference

SHARED = 0.2
DEVIATIONS = 4.0
RESIDUALS = 16.0

SPREADS = 8.0
"""How many times an honest difference another honest difference may be.

In a tensor of n elements the square of the ratio of two such differences is distributed as F(n, n). It exceeds 64 once
in 1,400 tensors for n = 4, and in practice never from n = 8. Smaller tensors are also allowed the set's typical spread.
"""

ComputeDtype = Literal["float32", "tf32", "bfloat16", "float16", "float64"]


def compute_dtype(matrix_dtypes: Iterable[torch.dtype], device: torch.device) -> ComputeDtype:
    """Return the narrowest dtype that matrix products were seen in, which decides how much rounding is honest."""
    names: dict[torch.dtype, ComputeDtype] = {
        torch.float64: "float64",
        torch.float32: "float32",
        torch.bfloat16: "bfloat16",
        torch.float16: "float16",
    }
    known = [dtype for dtype in matrix_dtypes if dtype in names]
    narrowest = min(known, key=lambda dtype: (dtype.itemsize, dtype == torch.float16), default=torch.float32)
    fast = device.type == "cuda" and not matmul_precision().startswith(("highest", "ieee"))
    return "tf32" if narrowest == torch.float32 and fast else names[narrowest]


@dataclasses.dataclass(frozen=True)
class Figures:
    """The measured numbers that limits are made of, all relative.

    Attributes:
        base: slope that all elements share, beyond what the residual explains.
        scalar: the same for tensors of one element, which have no residual.
        own: a residual that is right whatever the set's median.
        median: the largest median residual of a set.
        floor: root mean square of an error that does not shrink with its tensor, in units of the median tensor's own.
        pooled: slope of all tensors together.
    """

    base: float
    scalar: float
    own: float
    median: float
    floor: float
    pooled: float

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Figures:
        """Read an entry of the noise data: measured values times a safety factor, at least other machines' values."""
        # A float32 step computed in bfloat16 by mistake has a median residual of 5e-3 in small models, a right step at
        # most 6.4e-4: there is no room for a larger factor. A residual of its own is a rare event already.
        factors = {"median": 4.0, "own": 4.0}
        figures = {}
        for name, value in entry["figures"].items():
            scaled = value * factors.get(name, entry["safety"])
            figures[name] = max(scaled, entry["at_least"].get(name, 0.0))
        return cls(**figures)

    def slope_limit(self, difference: Difference, median: float) -> float:
        """Return the largest right slope of a tensor, by the formula of this module."""
        if difference.numel == 1:
            return self.scalar + DEVIATIONS * median
        residual = difference.residual or 0.0
        independent = max(residual, median) / math.sqrt(max(1.0, difference.effective))
        return self.base + SHARED * residual + DEVIATIONS * independent

    def residual_limit(self, median: float) -> float:
        """Return the largest right residual of a tensor, by the formula of this module."""
        return max(self.own, RESIDUALS * median)

    def pooled_limit(self, median: float) -> float:
        """Return the largest right slope of all tensors together, by the formula of this module."""
        return self.pooled + SHARED * median

    def rounding_below(self, typical: float) -> float:
        """Return the root mean square below which all of a tensor may be rounding beside a typical tensor."""
        return 4.0 * self.floor * typical


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for one kind of tier; made by ``rounding`` and ``compiled``.

    Attributes:
        compute_dtype: the dtype that matrices are multiplied in; None for a tier with eager's own kernels.
        updates: whether the tensors are what an optimizer added to parameters.
        wide: the figures for sets of tensors held in float32 or wider.
        half: the figures for sets in which some tensors are held in bfloat16 or float16, where eager itself sums in few
            bits.
        scalars: relative error of a number that one of the two sides rounded to float32, on top of a few ulp.
        tilt: a slope that is allowed on top of the figures'.
    """

    compute_dtype: ComputeDtype | None
    updates: bool = False
    wide: Figures | None = None
    half: Figures | None = None
    scalars: float = 0.0
    tilt: float = 0.0

    @classmethod
    def rounding(cls) -> Limits:
        """Return the limits of a tier that runs eager's own kernels: a few ulp of each dtype, and the eager spread."""
        return cls(None)

    @classmethod
    def compiled(cls, compute_dtype: ComputeDtype, *, updates: bool = False) -> Limits:
        """Return the limits of a tier with compiled kernels.

        Args:
            compute_dtype: what the step computes in: autocast's dtype, else the parameters'; ``"tf32"`` where float32
                matrices may be multiplied in it.
            updates: for parameters after the step minus before it. Adam divides a gradient by its own size. So where a
                gradient is rounding, Adam may make a full step of it, no step, or the opposite step. Only all tensors
                together are judged then, which finds a wrong learning rate or a step left out. What the optimizer does
                with each gradient is proven under ``rounding``: eager's optimizer gets the tier's gradients.

        Raises:
            ConfigError: there are no figures for that dtype.
        """
        kind = "updates" if updates else "gradients"
        entries = noise()["entries"]
        found = {entry["held"]: entry for entry in entries if (entry["compute"], entry["of"]) == (compute_dtype, kind)}
        if not found:
            known = sorted({entry["compute"] for entry in entries})
            raise ConfigError(f"compute_dtype={compute_dtype!r}: expected one of {', '.join(known)}")
        wide = Figures.from_entry(found["wide"])
        return cls(compute_dtype, updates, wide, Figures.from_entry(found["half"]) if "half" in found else wide)

    def of_updates(self) -> Limits:
        """Return the limits of what an optimizer adds to parameters in the same step; for ``compiled`` limits only."""
        assert self.compute_dtype is not None
        limits = Limits.compiled(self.compute_dtype, updates=True)
        return dataclasses.replace(limits, scalars=self.scalars, tilt=self.tilt)

    def ulps(self, dtype: str) -> float:
        """Return the relative difference that rounding alone may make in a tensor of this dtype."""
        # A recorded optimizer's learning rate is float32, and Python's double in eager. A value that is rounded to a
        # narrower dtype afterwards moves by at most one ulp of that dtype.
        eps, single = _eps(dtype), _eps("float32")
        return (eps if eps > single else 16.0 * single) + self.scalars

    def figures(self, dtypes: set[str]) -> Figures | None:
        """Return the figures for a set that holds tensors of these dtypes; None for ``rounding``."""
        return self.half if any(_eps(dtype) > _eps("float32") for dtype in dtypes) else self.wide


@functools.cache
def _eps(dtype: str) -> float:
    """Return the distance from 1 to the next number; for a complex dtype that of its real parts."""
    return float(torch.finfo(getattr(torch, dtype)).eps)


@functools.cache
def noise() -> dict[str, Any]:
    """Return the noise data that the limits come from, as ``benchmarks/noise.py`` wrote it."""
    text = importlib.resources.files("hotloop.measure").joinpath("noise.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
