"""Times layers of a step beside another form, at the shapes that the step uses: padded sizes, fused attention."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - torch's own custom

from hotloop.prove.doctor.pairs import timed_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hotloop.prove.doctor.step_calls import Attention, Layer, StepCalls

MULTIPLE, LARGE = 64, 512
"""Tensor cores take rows of 64 numbers at full speed; the padding of smaller sizes would be a large share of them."""
_MOST = 4
"""Layers of each kind that are timed, those with the most work."""


def padded(size: int) -> int:
    """Return the size that a large dimension should have: the next multiple of 64."""
    return math.ceil(size / MULTIPLE) * MULTIPLE if size >= LARGE else size


def padded_linears(
    calls: StepCalls, models: Mapping[str, nn.Module], device: torch.device, wait: Callable[[], None]
) -> list[dict[str, Any]]:
    """Time the large linear layers with a size that is no multiple of 64, as written and padded, forward and backward.

    Args:
        calls: of a step.
        models: of the workload, by name.
        device: where they are.
        wait: waits until the device is done.

    Returns:
        for each layer: ``name``, ``rows``, ``inner`` and ``outer`` size with ``padded_inner`` and ``padded_outer``,
        ``calls`` a step, whether it gives a ``vocabulary`` and whether the model ``resizes`` its embeddings,
        ``step_ms`` of one call with its interval, and the same of the padded layer after ``padded_``.
    """
    odd = [layer for layer in calls.linears if (padded(layer.inner), padded(layer.outer)) != (layer.inner, layer.outer)]
    odd = sorted(odd, key=lambda layer: -layer.rows * layer.inner * layer.outer * calls.linears[layer])[:_MOST]
    modules = [(f"{name}.{path}", module) for name, model in models.items() for path, module in model.named_modules()]
    resizes = any(hasattr(module, "resize_token_embeddings") for _, module in modules)
    found = []
    for layer in odd:
        try:
            pair = [_linear(layer, device, *sizes) for sizes in _sizes(layer)]
            figures = timed_pair(pair, wait, "padded_")
        except RuntimeError:  # no memory for a second layer of this size, or an operation that the device lacks
            continue
        found.append(
            {
                "name": _name(layer, modules),
                "rows": layer.rows,
                "inner": layer.inner,
                "outer": layer.outer,
                "padded_inner": padded(layer.inner),
                "padded_outer": padded(layer.outer),
                "calls": calls.linears[layer],
                "vocabulary": _is_vocabulary(layer, (module for _, module in modules)),
                "resizes": resizes,
                **figures,
            }
        )
    return found


def fused_attention(calls: StepCalls, device: torch.device, wait: Callable[[], None]) -> list[dict[str, Any]]:
    """Time attention that a step computes by a softmax of its own, and torch's fused one, forward and backward.

    Masks and dropout are left out of both.

    Returns:
        for each shape: ``heads`` (of all rows), ``queries``, ``keys``, ``width``, ``calls`` a step, ``file`` and
        ``line`` of the first, ``step_ms`` of a call with its interval, and the same of the fused one after ``fused_``.
    """
    most = sorted(calls.manual, key=lambda one: -one.heads * one.queries * one.keys * calls.manual[one])[:_MOST]
    file, line = calls.places.get("manual") or (None, None)
    found = []
    for shape in most:
        try:
            pair = [_attention(shape, device, function) for function in (_by_softmax, F.scaled_dot_product_attention)]
            figures = timed_pair(pair, wait, "fused_")
        except RuntimeError:  # as above
            continue
        sizes = {"heads": shape.heads, "queries": shape.queries, "keys": shape.keys, "width": shape.width}
        found.append({**sizes, "calls": calls.manual[shape], "file": file, "line": line, **figures})
    return found


def _sizes(layer: Layer) -> tuple[tuple[int, int], tuple[int, int]]:
    return (layer.inner, layer.outer), (padded(layer.inner), padded(layer.outer))


def _linear(layer: Layer, device: torch.device, inner: int, outer: int) -> Callable[[], None]:
    """Return a function that runs a layer forward, and backward where the step does."""
    made = nn.Linear(inner, outer, bias=layer.bias, device=device, dtype=layer.weight_dtype)
    taken = torch.randn(layer.rows, inner, device=device).to(layer.dtype).requires_grad_(layer.backward)
    autocast = torch.autocast(device.type, layer.autocast, enabled=layer.autocast is not None)

    def forward() -> torch.Tensor:
        with autocast:
            result: torch.Tensor = made(taken)
        return result

    return _with_backward(forward, [taken, *made.parameters()], needed=layer.backward)


def _attention(shape: Attention, device: torch.device, function: Callable[..., torch.Tensor]) -> Callable[[], None]:
    def drawn(places: int) -> torch.Tensor:
        made = torch.randn(1, shape.heads, places, shape.width, device=device)
        return made.to(shape.dtype).requires_grad_(shape.backward)

    sides = [drawn(shape.queries), drawn(shape.keys), drawn(shape.keys)]
    return _with_backward(functools.partial(function, *sides), sides, needed=shape.backward)


def _by_softmax(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, -1) @ value


def _with_backward(forward: Callable[[], torch.Tensor], of: list[torch.Tensor], *, needed: bool) -> Callable[[], None]:
    # A gradient made beforehand: the loss is no part of the layer.
    with torch.no_grad():
        gradient = torch.randn_like(forward())

    def run() -> None:
        with torch.set_grad_enabled(needed):
            result = forward()
        if needed:
            torch.autograd.grad(result, of, gradient)

    return run


def _name(layer: Layer, modules: Iterable[tuple[str, nn.Module]]) -> str:
    """Return the path of the module that holds a layer's weight; of several the one that is a linear layer."""
    holding = [
        (not isinstance(module, nn.Linear), path)
        for path, module in modules
        if any(id(one) == layer.weight for one in module.parameters(recurse=False))
    ]
    return min(holding)[1].rstrip(".") if holding else "a linear layer"


def _is_vocabulary(layer: Layer, modules: Iterable[nn.Module]) -> bool:
    """Return whether a layer gives a score for each row of an embedding, whether they share the weight or not."""
    return any(isinstance(module, nn.Embedding) and module.num_embeddings == layer.outer for module in modules)
