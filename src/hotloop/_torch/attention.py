"""Makes the dropout masks of fused attention again, for a step whose attention is computed in another dtype.

On a GPU torch takes a fused kernel for attention with dropout in float32 and narrower. In float64 it has none: there
softmax and dropout are operations of their own, and draw other numbers. A fused kernel never shows its mask. But what
it drops depends on the random position and on places alone, and with queries of zero it weighs all values alike:
given the columns of an identity as values it returns the mask.

That is nowhere promised. So each mask is tried where the kernel runs on the step's own numbers: what dropout changed
there is what this mask changes, or the kernel's draw cannot be repeated.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from hotloop._torch.dispatch import is_random

_DIMENSIONS = 4
"""Of the queries that fused kernels take: batch, heads, places, width."""
_TENSORS = ("query", "key", "value")
_SEED = "philox_seed"
"""What a backward is given of the random position that its forward drew from."""
_HIDING = {"attn_bias": None, "is_causal": False}
"""What hides places from queries: a mask is made of all of them, and of what is hidden nothing is read."""
_APART = 0.5
"""A mask explains a result that is nearer to what it makes than half of what it changes. Rounding to bfloat16 came to
0.14 of that at worst; another mask of the same share is 1.4 times it away."""


@dataclasses.dataclass(frozen=True)
class FusedDropout:
    """A call of a fused kernel that dropped: what it takes to draw its mask again.

    Args:
        operation: the kernel.
        options: its arguments by name, but for the three tensors.
        dtype: of these.
        widths: of a query and of a value.
        why: why its mask cannot be made again; empty where it was, and explained the result.
    """

    operation: Any
    options: dict[str, Any]
    dtype: torch.dtype
    widths: tuple[int, int]
    why: str = ""

    @property
    def share(self) -> float:
        """The share that is dropped."""
        return float(self.options["dropout_p"])

    def mask(self, shape: torch.Size | tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Draw the mask of the coming call, true where a weight is kept; the random position moves as by the call.

        Args:
            shape: of the weights: batch, heads, queries, keys.
            device: where the call runs.
        """
        *outer, queries, keys = shape
        of_query, of_value = self.widths
        query, key = (torch.zeros(*outer, each, of_query, dtype=self.dtype, device=device) for each in (queries, keys))
        places = torch.arange(keys, device=device)[:, None]
        found = torch.empty(tuple(shape), dtype=torch.bool, device=device)
        state = _position(device)
        for start in range(0, keys, of_value):
            _move(device, state)
            wanted = torch.arange(start, start + of_value, device=device)
            columns = (places == wanted).to(self.dtype).expand(*outer, keys, of_value).contiguous()
            part = found[..., start : start + of_value]
            made = self.operation(query=query, key=key, value=columns, **{**self.options, **_unhidden(self)})
            part.copy_(made[0][..., : part.shape[-1]] > 0)
        return found


def drops_inside(operation: Any) -> bool:
    """Tell whether an operation is attention that may drop weights without showing which."""
    names = {one.name for one in operation._schema.arguments}  # noqa: SLF001 - in the ledger
    return is_random(operation) and names.issuperset((*_TENSORS, "dropout_p")) and not is_told(operation)


def is_told(operation: Any) -> bool:
    """Tell whether an operation is told where its random numbers begin, and draws none: the backward of attention.

    torch calls it random all the same.
    """
    return any(one.name == _SEED for one in operation._schema.arguments)  # noqa: SLF001 - in the ledger


def noted(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, FusedDropout]:
    """Run attention that drops, and note what draws its mask again; random numbers are left as by the call alone."""
    names = [one.name for one in operation._schema.arguments]  # noqa: SLF001 - in the ledger
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value = (given.pop(name) for name in _TENSORS)
    device = query.device
    before = _position(device)
    result = operation(*args, **kwargs)
    after = _position(device)
    kept = {name: one for name, one in given.items() if not isinstance(one, torch.Tensor)}
    found = FusedDropout(operation, kept, query.dtype, (query.shape[-1], value.shape[-1]))
    try:
        _move(device, before)
        with torch.no_grad():
            why = _untrue(found, (query, key, value), given, result[0])
    except (RuntimeError, TypeError) as error:  # also too little memory: the step itself goes on
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        _move(device, after)
    return result, dataclasses.replace(found, why=why)


def _unhidden(call: FusedDropout) -> dict[str, Any]:
    names = [one.name for one in call.operation._schema.arguments]  # noqa: SLF001 - in the ledger
    return {name: value for name, value in _HIDING.items() if name in names}


def _untrue(call: FusedDropout, tensors: tuple[torch.Tensor, ...], given: dict[str, Any], result: torch.Tensor) -> str:
    """Say why a mask is not that of a call, by its first and last batch; empty where it is."""
    query, key, _ = tensors
    if query.dim() != _DIMENSIONS:
        return f"its queries have {query.dim()} dimensions"
    mask = call.mask((*query.shape[:-1], key.shape[-2]), query.device)
    for index in {0, query.shape[0] - 1}:
        one, changed = _with_mask(call, [each[index].float() for each in tensors], given, index, mask[index])
        if not (result[index].float() - one).norm() <= _APART * changed:  # NaN is none
            return "its mask does not show from outside"
    return ""


def _with_mask(
    call: FusedDropout, tensors: list[torch.Tensor], given: dict[str, Any], index: int, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give attention in one batch with a mask, and the norm of what the mask changes."""
    query, key, value = tensors
    shared = query.shape[0] // key.shape[0]  # queries of several heads may have keys and values in common
    key, value = (one.repeat_interleave(shared, 0) for one in (key, value))
    scale = given.get("scale")
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    bias = given.get("attn_bias")
    if bias is not None:
        scores = scores + (bias[min(index, bias.shape[0] - 1)] if bias.dim() == _DIMENSIONS else bias).float()
    if given.get("is_causal"):
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # a query from which all is hidden
    plain, dropped = weights @ value, (weights * mask * (0.0 if call.share >= 1 else 1 / (1 - call.share))) @ value
    return dropped, (dropped - plain).norm()


def _position(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _move(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
