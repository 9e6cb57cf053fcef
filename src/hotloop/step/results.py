"""What a step returns, on its way to the caller."""

from __future__ import annotations

from typing import Any

import torch

from hotloop._torch.autograd import was_freed
from hotloop.measure import flatten, unflatten


def without_used_graph(result: Any) -> Any:
    """Detach the tensors whose graph a backward has freed; others are the caller's to go backward through.

    A graph that is kept keeps the nodes that accumulate its parameters' gradients, which remember the stream that they
    were made on: a later step that is captured on another stream would fail. A replay's results have none either.
    """
    leaves, structure = flatten(result)
    used = [isinstance(one, torch.Tensor) and one.grad_fn is not None and was_freed(one) for one in leaves]
    if not any(used):
        return result
    return unflatten(structure, [one.detach() if freed else one for one, freed in zip(leaves, used, strict=True)])
