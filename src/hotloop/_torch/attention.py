"""Draws the dropout masks of fused attention again, for a step whose attention is computed in another dtype.

On a GPU torch takes a fused kernel for attention with dropout in float32 and narrower. In float64 it has none: there
softmax and dropout are operations of their own, and draw other numbers. A fused kernel never shows its mask. But what
it drops depends only on the random position and on places, and with queries of zero it weighs all values alike. So
given the columns of an identity as values, it returns the mask.

That is nowhere promised. So each mask is tried where the kernel runs on the step's own numbers: what dropout changed
there is what this mask changes, or the kernel's draw cannot be repeated.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from hotloop._torch.dispatch import argument_names, is_random
from hotloop._torch.random_state import put_back

_TENSORS = ("query", "key", "value")
_DIMENSIONS = 4
"""Of the queries that fused kernels take: batch, heads, places, width."""


@dataclasses.dataclass(frozen=True)
class FusedDropout:
    """A call of a fused kernel with dropout: everything that is needed to draw its mask again.

    Args:
        operation: the kernel.
        options: its arguments by name, without the three tensors.
        dtype: of the three tensors.
        widths: of a query and of a value.
        why: why its mask cannot be drawn again; empty where the mask was drawn, and explained the result.
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
        # The mask is drawn for all places: nothing that hides places from queries may take part.
        hiding = {"attn_bias": None, "is_causal": False}
        unhidden = {name: value for name, value in hiding.items() if name in argument_names(self.operation)}
        places = torch.arange(keys, device=device)[:, None]
        mask = torch.empty(tuple(shape), dtype=torch.bool, device=device)
        state = _rng_state(device)
        for start in range(0, keys, of_value):
            _set_rng_state(device, state)
            wanted = torch.arange(start, start + of_value, device=device)
            columns = (places == wanted).to(self.dtype).expand(*outer, keys, of_value).contiguous()
            part = mask[..., start : start + of_value]
            made = self.operation(query=query, key=key, value=columns, **{**self.options, **unhidden})
            part.copy_(made[0][..., : part.shape[-1]] > 0)
        return mask

    def obstacle(self, tensors: tuple[torch.Tensor, ...], given: dict[str, Any], result: torch.Tensor) -> str:
        """Return why `mask` is not the mask of a call, by its first and last batch; empty where it is."""
        query, key, _ = tensors
        if query.dim() != _DIMENSIONS:
            return f"its queries have {query.dim()} dimensions"
        mask = self.mask((*query.shape[:-1], key.shape[-2]), query.device)
        for index in {0, query.shape[0] - 1}:
            dropped, changed = self._with_mask([side[index].float() for side in tensors], given, index, mask[index])
            # A mask explains a result that is nearer to its own result than half of what the mask changes. Rounding to
            # bfloat16 came to 0.14 of that at worst; another mask of the same share is 1.4 times it away.
            if not (result[index].float() - dropped).norm() <= 0.5 * changed:  # a NaN is never near
                return "its mask does not show from outside"
        return ""

    def _with_mask(
        self, tensors: list[torch.Tensor], given: dict[str, Any], index: int, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention in one batch with a mask; also return the norm of what the mask changes."""
        query, key, value = tensors
        shared = query.shape[0] // key.shape[0]  # queries of several heads may have keys and values in common
        key, value = (side.repeat_interleave(shared, 0) for side in (key, value))
        scale = given.get("scale")
        scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        bias = given.get("attn_bias")
        if bias is not None:
            scores = scores + (bias[min(index, bias.shape[0] - 1)] if bias.dim() == _DIMENSIONS else bias).float()
        if given.get("is_causal"):
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
        weights = scores.softmax(-1).nan_to_num(0.0)  # a query from which all keys are hidden
        plain, dropped = weights @ value, (weights * mask * (0.0 if self.share >= 1 else 1 / (1 - self.share))) @ value
        return dropped, (dropped - plain).norm()


def drops_inside(operation: Any) -> bool:
    """Return whether an operation is attention that may drop weights without showing which."""
    hidden = {*argument_names(operation)} >= {*_TENSORS, "dropout_p"}
    return is_random(operation) and hidden and not takes_position(operation)


def takes_position(operation: Any) -> bool:
    """Return whether an operation gets a random position as an argument, and draws nothing: attention's backward.

    torch calls it random all the same.
    """
    return "philox_seed" in argument_names(operation)


def run_recorded(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, FusedDropout]:
    """Run attention with dropout; also return what draws its mask again. Random numbers are left as by the call."""
    given = {**dict(zip(argument_names(operation), args, strict=False)), **kwargs}
    query, key, value = (given.pop(name) for name in _TENSORS)
    device = query.device
    before = _rng_state(device)
    result = operation(*args, **kwargs)
    after = _rng_state(device)
    options = {name: option for name, option in given.items() if not isinstance(option, torch.Tensor)}
    call = FusedDropout(operation, options, query.dtype, (query.shape[-1], value.shape[-1]))
    try:
        _set_rng_state(device, before)
        with torch.no_grad():
            why = call.obstacle((query, key, value), given, result[0])
    except (RuntimeError, TypeError) as error:  # also too little memory: the step itself goes on
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        _set_rng_state(device, after)
    return result, dataclasses.replace(call, why=why)


def _rng_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        put_back(device, state)
    else:
        torch.set_rng_state(state)
