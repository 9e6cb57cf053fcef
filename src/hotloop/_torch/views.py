"""Checks in one call of torch's that many tensors still have their shapes, strides and dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def can_be_guarded(tensor: torch.Tensor) -> bool:
    """Return whether `guard` takes a tensor; tensors of other classes may define their own shape, and are asked."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def guard(tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    """Return a function that says whether all tensors keep shape, strides and dtype; None where this torch cannot.

    True is certain. False may also mean that a mode of torch's is in force that was not, or the other way round.

    Args:
        tensors: each once; all of them `can_be_guarded`.
    """
    try:
        guards: Any = private("torch._C._dynamo.guards:TensorGuards")
    except CapabilityMissingError:
        return None
    made = guards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    check = made.check
    return lambda: check(*tensors) is True
