"""Multiplies float32 matrices as TF32 hardware may: with factors of 10 bits that were rounded, or cut.

cuBLAS rounds each factor to the nearest TF32 number. Triton's products, which autotuning takes, hand float32 to the
tensor core, which drops the 13 bits that it does not use. Cut numbers are too small, on the average by 3.5e-4 of
themselves, and so is each product in a chain of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from hotloop._torch.dispatch import name_of, observing

if TYPE_CHECKING:
    import contextlib

_FACTORS = {
    "aten.mm": (0, 1),
    "aten.bmm": (0, 1),
    "aten.addmm": (1, 2),
    "aten.baddbmm": (1, 2),
    "aten.convolution": (0, 1),
    "aten.convolution_backward": (0, 1, 2),
}
"""Which arguments of an operation are factors. Eager and compiled code use the same fused kernels for attention."""


def products_in_tf32(how: Literal["rounded", "cut"]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the factors of float32 products are TF32 numbers, on any hardware."""

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        factors = _FACTORS.get(name_of(operation), ())
        given = (in_tf32(value, how) if index in factors else value for index, value in enumerate(args))
        return operation(*given, **kwargs)

    return observing(handle)


def in_tf32(tensor: torch.Tensor, how: Literal["rounded", "cut"]) -> torch.Tensor:
    """Return float32 numbers with the bits that TF32 has, rounded to nearest or cut; other numbers as they are."""
    if tensor.dtype != torch.float32:
        return tensor
    bits, unused = tensor.view(torch.int32), 13
    half = 1 << (unused - 1) if how == "rounded" else 0
    return torch.bitwise_and(bits + half, -1 << unused).view(torch.float32)
