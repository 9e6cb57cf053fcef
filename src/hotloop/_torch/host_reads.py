"""Operations that Python waits for: they read a value on the host, or the size of their result depends on the data."""

from __future__ import annotations

from typing import Any

import torch

from hotloop._torch.dispatch import name_of, tensors_in

_VALUES = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal")
_SIZED = (
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten._coalesce",
    "aten.bincount",
)
_DECIDES = ("higher_order.cond", "higher_order.while_loop")


def host_read(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return, in the user's terms, why Python waits for the result of an operation; empty where it does not.

    The reason of an operation whose result has no fixed size, or that decides by a value, ends with its name, by which
    `hotloop.diagnose.sized_results` knows the remedy.
    """
    name = name_of(operation)
    if name in _VALUES:
        return "a value is read on the host: .item(), float(), print, or a branch on a tensor"
    if name in _DECIDES:
        return f"the host reads a value to decide what runs: torch.{name.removeprefix('higher_order.')}"
    adds_up = name == "aten.repeat_interleave" and kwargs.get("output_size") is None  # nobody says what they come to
    if name in _SIZED or adds_up or (name == "aten.index" and _is_masked(args)):
        return f"the size of a result depends on the data: {name.removeprefix('aten.')}"
    return ""


def _is_masked(args: tuple[Any, ...]) -> bool:
    """Return whether an index is a mask: ``x[mask]``."""
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(*args[1:2]))
