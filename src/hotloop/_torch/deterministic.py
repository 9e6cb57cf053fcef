"""Takes chance out of a step: dropout drops nothing, and what else is drawn depends on nothing but the operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.dispatch import is_random, name_of, observing

if TYPE_CHECKING:
    import contextlib

_DROPS = {"aten.native_dropout": "p", "aten._fused_dropout": "p"}
_SHARE = "dropout_p"
"""What fused attention, forward and backward, calls the share that it drops."""
_SEED = 0


def stilled() -> contextlib.AbstractContextManager[Any]:
    """Give a context in which two runs that differ in the random numbers they draw alone compute the same.

    torch's own generators are seeded anew before each draw: put their state back afterwards.
    """

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = [one.name for one in operation._schema.arguments]  # noqa: SLF001 - in the ledger
        share = _SHARE if _SHARE in names else _DROPS.get(name_of(operation))
        if share is None:
            if is_random(operation):
                torch.manual_seed(_SEED)
            return operation(*args, **kwargs)
        place = names.index(share)
        if place < len(args):
            return operation(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return operation(*args, **{**kwargs, share: 0.0})

    return observing(handle)
