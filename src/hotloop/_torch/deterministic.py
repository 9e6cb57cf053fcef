"""Takes chance out of a step: dropout drops nothing, and other random numbers depend only on the operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dispatch import argument_names, argument_of, draws_random, is_random, name_of, observing

if TYPE_CHECKING:
    import contextlib


def without_randomness(rates: set[float]) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which two runs that differ only in their random numbers compute the same.

    torch's own generators are seeded anew before each draw: put their state back afterwards.

    Args:
        rates: gets the share that each dropout would drop. Two runs that drop other shares are not the same.
    """

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (setting := _setting_of(operation)) is None:
            if is_random(operation):
                torch.manual_seed(0)
            return operation(*args, **kwargs)
        name, value = setting
        if draws_random(operation, args, kwargs):
            rates.add(argument_of(operation, args, kwargs, "dropout_p" if name == "dropout_p" else "p"))
        place = argument_names(operation).index(name)
        if place < len(args):
            return operation(*args[:place], value, *args[place + 1 :], **kwargs)
        return operation(*args, **{**kwargs, name: value})

    return observing(handle)


def _setting_of(operation: Any) -> tuple[str, Any] | None:
    """Return the argument by which an operation drops nothing, and its value; None if it has none."""
    if "dropout_p" in argument_names(operation):  # fused attention, forward and backward
        return "dropout_p", 0.0
    return {"aten.native_dropout": ("train", False), "aten.native_dropout_backward": ("scale", 1.0)}.get(
        name_of(operation)
    )
