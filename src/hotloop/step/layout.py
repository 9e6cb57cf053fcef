"""The layout that convolutions compute in: channels last while a step runs in a tier that asks for it.

On a GPU cuDNN computes convolutions in half precision channels last, and transposes what goes in and comes out where
tensors are laid out as torch makes them. A convolution whose input is channels last returns its result so, and what
follows keeps that. So inputs alone are laid out: weights, gradients and optimizer state keep their strides.
"""

from __future__ import annotations

import contextlib
import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hotloop._torch.module import eager_call, get_entry, set_entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def why_not(modules: Iterable[nn.Module]) -> str:
    """Say why channels last is of no use to a model of these modules; empty where it may be."""
    convolutions = [module for module in modules if isinstance(module, _CONVOLUTIONS)]
    if not any(math.prod(one.kernel_size) > 1 for one in convolutions):
        return "no convolution of the models has a kernel larger than 1"
    # A weight that is computed, as by a parametrization, is no parameter of its module; a lazy one has no shape yet.
    weights = [dict(one.named_parameters(recurse=False)).get("weight") for one in convolutions]
    if all(weight is not None and not nn.parameter.is_lazy(weight) and _is_laid_out(weight) for weight in weights):
        return "the convolutions' weights are channels last already"
    return ""


def _is_laid_out(weight: torch.Tensor) -> bool:
    return weight.dim() in _FORMATS and weight.is_contiguous(memory_format=_FORMATS[weight.dim()])


@contextlib.contextmanager
def channels_last(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Lay out the inputs of the convolutions among modules while the block runs; those that were compiled stay so."""
    convolutions = [module for module in modules if isinstance(module, _CONVOLUTIONS) and not _is_compiled(module)]
    try:
        for one in convolutions:
            set_entry(one, functools.partial(_call, one))
        yield
    finally:
        for one in convolutions:
            set_entry(one, None)


def _is_compiled(convolution: nn.Module) -> bool:
    entry = get_entry(convolution)
    left = isinstance(entry, functools.partial) and entry.func is _call  # by a block whose end was interrupted
    return entry is not None and not left


def _call(convolution: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], torch.Tensor) and args[0].dim() in _FORMATS:
        args = args[0].contiguous(memory_format=_FORMATS[args[0].dim()]), *args[1:]
    return eager_call(convolution, *args, **kwargs)
