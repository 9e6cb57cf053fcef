"""Tells in one call of torch's that many tensors have the shapes, strides and dtypes that they had."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import CapabilityMissingError, private

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_KINDS = (torch.Tensor, torch.nn.Parameter)
"""Other classes may answer for themselves what shape they have, and are asked."""


def can_be_guarded(tensor: torch.Tensor) -> bool:
    """Tell whether `guard` takes a tensor."""
    return type(tensor) in _KINDS and tensor.layout == torch.strided


def guard(tensors: Sequence[torch.Tensor]) -> Callable[[], bool] | None:
    """Give what tells that none has another shape, strides or dtype; None where this torch cannot.

    True is certain. False may also mean that a mode of torch's is in force that was not, or the other way round.

    Args:
        tensors: each once, and one that `can_be_guarded`.
    """
    try:
        guards: Any = private("torch._C._dynamo.guards:TensorGuards")
    except CapabilityMissingError:
        return None
    made = guards(
        *tensors,
        dynamic_dims_sizes=[list(one.shape) for one in tensors],
        dynamic_dims_strides=[list(one.stride()) for one in tensors],
    )
    check = made.check
    return lambda: check(*tensors) is True
