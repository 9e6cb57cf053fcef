"""The tensors of a call, of which the first tells its batch size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dynamo import mark_dynamic

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, torch.Tensor | None]:
    """Give the first tensor of a call that has dimensions, with its name as dynamo says it; None where there is none.

    It runs at every call of compiled code: 0.1 us for a tensor as first argument.
    """
    if args and type(args[0]) is torch.Tensor and args[0].ndim:
        return "args[0]", args[0]
    for name, tensor in _tensors(args, kwargs):
        if tensor.ndim:
            return name, tensor
    return "", None


def mark_batch_dynamic(args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> None:
    """Have dim 0 of each tensor that has the batch's size compiled for any size."""
    for _, tensor in _tensors(args, kwargs):
        if tensor.ndim and tensor.shape[0] == size:
            mark_dynamic(tensor, 0)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Give the tensors of a call with their names; of nested arguments those one level down."""
    yield from _named("args", enumerate(args))
    yield from _named("kwargs", kwargs.items())


def _named(outer: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in items:
        if isinstance(value, torch.Tensor):
            yield f"{outer}[{key!r}]", value
        elif isinstance(value, Mapping):
            found = value.items()
            yield from ((f"{outer}[{key!r}][{name!r}]", one) for name, one in found if isinstance(one, torch.Tensor))
        elif isinstance(value, list | tuple):
            inner = enumerate(value)
            yield from ((f"{outer}[{key!r}][{at}]", one) for at, one in inner if isinstance(one, torch.Tensor))
