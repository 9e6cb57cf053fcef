"""Settings of torch that are in force around a step and change what it computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ambient import function_modes, saved_tensors_hooks

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping

    from hotloop.measure.limits import ComputeDtype


_COMPUTE_DTYPES: Mapping[torch.dtype, ComputeDtype] = {
    torch.float64: "float64",
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def matmul_precision() -> str:
    """Give the precision of float32 matrix products; torch refuses the older question once the newer one was set."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        backends: Any = torch.backends  # the types that torch ships do not know these settings
        return f"{backends.cuda.matmul.fp32_precision} {backends.mkldnn.matmul.fp32_precision}"


def compute_dtype(matrix_dtypes: Iterable[torch.dtype], device: torch.device) -> ComputeDtype:
    """Name the narrowest dtype that matrix products were seen in, which sets how much rounding is honest."""
    known = [one for one in matrix_dtypes if one in _COMPUTE_DTYPES]
    found = min(known, key=lambda one: (one.itemsize, one == torch.float16), default=torch.float32)
    fast = device.type == "cuda" and not matmul_precision().startswith(("highest", "ieee"))
    return "tf32" if found == torch.float32 and fast else _COMPUTE_DTYPES[found]


def ambient_modes() -> Hashable:
    """Give the settings of torch that are in force around a step and change what it computes."""
    kinds = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    autocast = tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast,
        torch.get_default_dtype(),
        matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.enabled,
        torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        *_attention_kernels(),
        *_precisions(),
        *function_modes(),
        saved_tensors_hooks(),
    )


def _attention_kernels() -> tuple[bool, ...]:
    """Tell which kernels of scaled_dot_product_attention are switched on."""
    of: Any = torch.backends.cuda
    return of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.math_sdp_enabled(), of.cudnn_sdp_enabled()


def _precisions() -> tuple[object, ...]:
    """Give how exactly single kernels compute: what the flags around TF32 come to, and reductions in 16 bits."""
    backends: Any = torch.backends  # the types that torch ships do not know these settings
    if not torch.cuda.is_available():
        return backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision
    matmul = backends.cuda.matmul
    return (
        matmul.fp32_precision,
        backends.cudnn.conv.fp32_precision,
        backends.cudnn.rnn.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_accumulation,
    )
