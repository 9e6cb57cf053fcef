"""Finds state whose layout no undo puts back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hotloop.step.obstacle import Obstacle

if TYPE_CHECKING:
    from hotloop.step.state.holdings import Holdings

_STRIDED = "keep its indices and values as dense buffers, and make the sparse tensor of them in the step"


def not_strided(holdings: Holdings) -> list[Obstacle]:
    """Find buffers and other state in several pieces of memory, which an undo does not put back at every step."""
    named = {**{f"buffer {name}": one for name, one in holdings.buffers().items()}, **holdings.other_tensors()}
    return [
        Obstacle(
            f"{name} has layout {one.layout}: only strided tensors can be watched and put back",
            _STRIDED,
            not_repeatable=True,
        )
        for name, one in named.items()
        if one.layout != torch.strided
    ][:1]
