"""How far a tier may be from eager: limits from the project's own noise data, ``noise.json``.

The difference of two honest compiles is rounding, yet how much of it depends on the model: a deep stack of BatchNorms
magnifies it ten thousandfold over an MLP. So a limit has a part from the data and a part that follows the set at hand.
For a tensor with residual e, of n effective elements, in a set whose median residual is m::

    slope    <= base + e / 5 + 4 * max(e, m) / sqrt(n)
    residual <= max(own, 16 * m)
    m        <= median
    pooled   <= pooled + m / 5

Rounding that is independent from element to element moves the slope by e / sqrt(n) (a regression's standard error), so
4 of these are allowed; rounding that all elements share (of the loss, of one activation) moves it by a part of e. A
wrong factor in one op moves the slope without a residual. The names are fields of ``Figures``.

In TF32 there are two honest roundings, to nearest and down (``hotloop._torch.products``). The second makes each tensor
smaller by a part that depends on how many products are behind it: its lean, which is measured on the step at hand.
Where compiled code may round down, a slope is allowed twice the lean besides: an autotuned step on an H200 was off by
1.3 times what a simulation of it on a CPU leans by in the worst tensor, by 1.8 times in all together.

A gradient can be all rounding: that of an attention key's bias, or of a convolution's before BatchNorm, is truly 0. So
of a tensor whose root mean square is under 4 * floor of the set's median one, only the absolute difference is judged,
which may be floor of that median. Right compiles needed this below 0.012 of the median in bfloat16, 2e-6 in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
import math
from typing import TYPE_CHECKING, Any, Literal

import torch

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARED = 0.2
DEVIATIONS = 4.0
RESIDUALS = 16.0
LEANS = 2.0
_FLOORS = 4.0

# Scalars of an optimizer (learning rate, 1 - beta^t) are float32 on the device, and Python's double in eager. Worst is
# Adam's 1 - beta2^t at t = 1, with 0.999 rounded to float32: an update wrong by 1.5e-5 of itself, which is 13 ulp of a
# parameter that it made 1/10 of. The same kernels give all else bit for bit. A value rounded to a narrower dtype
# afterwards moves by at most one ulp of that.
_ULPS_FLOAT32 = 16.0

# Two honest differences of one size: in a tensor of n elements the square of their ratio is distributed as F(n, n), of
# which 64 is passed once in 1,400 for n = 4 and never in practice from n = 8. With fewer elements what is typical of
# the set helps.
SPREADS = 8.0

# A float32 step computed in bfloat16 by mistake has a median residual of 5e-3 in small models, a right one at most
# 6.4e-4: there is no room for more. A residual of its own is a rare event already, and needs no more.
_SAFETY_OF = {"median": 4.0, "own": 4.0}

ComputeDtype = Literal["float32", "tf32", "bfloat16", "float16", "float64"]


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the limits are made of; all relative numbers.

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


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for one kind of tier; made by ``rounding`` and ``compiled``.

    Attributes:
        compute_dtype: what matrices are multiplied in; None for a tier with eager's own kernels.
        updates: whether the tensors are what an optimizer added to parameters.
        wide: the figures for sets of tensors held in float32 or wider.
        half: those for sets in which some are held in bfloat16 or float16, where eager itself sums in few bits.
        scalars: relative error of a number that one of the two reads rounded to float32, on top of a few ulp.
        leans: by tensor, the tilt of one honest rounding against another; empty where both round alike.
    """

    compute_dtype: ComputeDtype | None
    updates: bool = False
    wide: Figures | None = None
    half: Figures | None = None
    scalars: float = 0.0
    leans: Mapping[str, float] = dataclasses.field(default_factory=dict, compare=False)

    @classmethod
    def rounding(cls) -> Limits:
        """Limits of a tier that runs eager's own kernels: a few ulp of each tensor's dtype, and the eager spread."""
        return cls(None)

    @classmethod
    def compiled(cls, compute_dtype: ComputeDtype, *, updates: bool = False) -> Limits:
        """Limits of a tier with compiled kernels.

        Args:
            compute_dtype: what the step computes in: autocast's dtype, else the parameters'; ``"tf32"`` where float32
                matrices may be multiplied in it.
            updates: for parameters after the step minus before it. Adam divides a gradient by its own size, so that of
                one that is rounding it may make a full step, none, or the opposite one: only all tensors together are
                judged, which finds a wrong learning rate or a step left out. What the optimizer does with each
                gradient is proven by giving eager's optimizer the tier's gradients, under ``rounding``.

        Raises:
            ConfigError: there are no figures for that dtype.
        """
        kind = "updates" if updates else "gradients"
        entries = noise()["entries"]
        found = {each["held"]: each for each in entries if (each["compute"], each["of"]) == (compute_dtype, kind)}
        if not found:
            known = sorted({each["compute"] for each in entries})
            raise ConfigError(f"compute_dtype={compute_dtype!r}: expected one of {', '.join(known)}")
        wide = _figures(found["wide"])
        return cls(compute_dtype, updates, wide, _figures(found["half"]) if "half" in found else wide)

    def of_updates(self) -> Limits:
        """Give the limits of what an optimizer adds to parameters in the same step; of ``compiled`` only."""
        assert self.compute_dtype is not None
        return dataclasses.replace(Limits.compiled(self.compute_dtype, updates=True), leans=self.leans)

    def ulps(self, dtype: str) -> float:
        """Give the relative difference that rounding alone may make in a tensor of this dtype."""
        eps = _eps(dtype)
        single = _eps("float32")
        return (eps if eps > single else _ULPS_FLOAT32 * single) + self.scalars

    def figures(self, dtypes: set[str]) -> Figures | None:
        """Give the figures for a set that holds tensors of these dtypes; None for ``rounding``."""
        return self.half if any(_eps(dtype) > _eps("float32") for dtype in dtypes) else self.wide


def _figures(entry: dict[str, Any]) -> Figures:
    """Make limits of what was measured: times a safety factor, at least what was seen on other machines."""
    return Figures(
        **{
            name: max(value * (_SAFETY_OF.get(name, entry["safety"])), entry["at_least"].get(name, 0.0))
            for name, value in entry["figures"].items()
        }
    )


def slope_limit(figures: Figures, residual: float, median: float, numel: int, effective: float) -> float:
    """Give the largest right slope of a tensor, by the formula of this module."""
    if numel == 1:
        return figures.scalar + DEVIATIONS * median
    return figures.base + SHARED * residual + DEVIATIONS * max(residual, median) / math.sqrt(max(1.0, effective))


def may_be_rounding(figures: Figures, rms: float, typical: float) -> bool:
    """Whether a tensor is so much smaller than the typical one that rounding may be all there is in it."""
    return rms < _FLOORS * figures.floor * typical


def residual_limit(figures: Figures, median: float) -> float:
    """Give the largest right residual of a tensor, by the formula of this module."""
    return max(figures.own, RESIDUALS * median)


def pooled_limit(figures: Figures, median: float) -> float:
    """Give the largest right slope of all tensors together, by the formula of this module."""
    return figures.pooled + SHARED * median


@functools.cache
def _eps(dtype: str) -> float:
    """Give the distance from 1 to the next number, the real parts' for a complex dtype."""
    return float(torch.finfo(getattr(torch, dtype)).eps)


@functools.cache
def noise() -> dict[str, Any]:
    """Give the noise data that the limits come from, as ``benchmarks/noise.py`` wrote it."""
    text = importlib.resources.files("hotloop.measure").joinpath("noise.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
