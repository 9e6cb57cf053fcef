"""Settings of torch that are in force around a step and change what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ambient import function_modes, saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

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


def ambient_modes() -> Hashable:
    """Return the settings of torch that are in force around a step and change what it computes."""
    backends: Any = torch.backends  # the types that torch ships do not know all of these settings
    matmul = backends.cuda.matmul
    if torch.cuda.is_available():
        kinds: tuple[str, ...] = ("cuda", "cpu")
        precisions: tuple[Any, ...] = (
            matmul.fp32_precision,
            backends.cudnn.conv.fp32_precision,
            backends.cudnn.rnn.fp32_precision,
            matmul.allow_fp16_reduced_precision_reduction,
            matmul.allow_bf16_reduced_precision_reduction,
            matmul.allow_fp16_accumulation,
        )
    else:
        kinds = ("cpu",)
        precisions = backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.get_default_dtype(),
        matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cudnn.enabled,
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        # which kernels scaled_dot_product_attention may use
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        *precisions,
        *function_modes(),
        saved_tensors_hooks(),
    )
