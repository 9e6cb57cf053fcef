"""The tensors of a call; the first of them has the batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dynamo import mark_dynamic

if TYPE_CHECKING:
    from collections.abc import Iterator


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, torch.Tensor | None]:
    """Return the first tensor of a call that has dimensions, with its name in dynamo's words; ("", None) without one.

    It runs at every call of compiled code: 0.1 us for a tensor as first argument.
    """
    if args and type(args[0]) is torch.Tensor and args[0].ndim:
        return "args[0]", args[0]
    for name, tensor in _tensors(args, kwargs):
        if tensor.ndim:
            return name, tensor
    return "", None


def mark_batch_dynamic(args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> None:
    """Mark dim 0 of each tensor that has the batch's size, so that it is compiled for any size."""
    for _, tensor in _tensors(args, kwargs):
        if tensor.ndim and tensor.shape[0] == size:
            mark_dynamic(tensor, 0)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a call with their names; in nested arguments those one level down."""
    arguments = [(f"args[{index}]", value) for index, value in enumerate(args)]
    arguments += [(f"kwargs[{key!r}]", value) for key, value in kwargs.items()]
    for name, value in arguments:
        if isinstance(value, torch.Tensor):
            yield name, value
        elif isinstance(value, Mapping | list | tuple):
            entries: Any = value.items() if isinstance(value, Mapping) else enumerate(value)
            for key, entry in entries:
                if isinstance(entry, torch.Tensor):
                    yield f"{name}[{key!r}]", entry
