"""The precision that a step computes in, which says how much rounding is honest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hotloop.measure.limits import ComputeDtype


def matmul_precision() -> str:
    """Return the precision of float32 matrix products.

    torch refuses to answer the older question once the newer setting was used; then both newer settings are named.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backends: Any = torch.backends  # the types that torch ships do not know these settings
        return f"{backends.cuda.matmul.fp32_precision} {backends.mkldnn.matmul.fp32_precision}"


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
