"""Whose an optimizer is: warns where it is another model's, or another loop's as well."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hotloop.step.state.holdings import Holdings

_log = logging.getLogger("hotloop")
_owners: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The latest loop of each optimizer."""


def warn_of_strangers(holdings: Holdings) -> None:
    """Warn of optimizers none of whose parameters anything else of a loop's has."""
    for name in _strange_optimizers(holdings):
        _log.warning(
            "%s (%s): none of its parameters is one of %s: give the optimizer that was made of model.parameters(), "
            "or what has them as state=",
            name, type(holdings.optimizers[name]).__name__,
            ", ".join(f"{each} ({type(one).__name__})" for each, one in holdings.modules.items()),
        )  # fmt: skip


def _strange_optimizers(holdings: Holdings) -> list[str]:
    """Name the optimizers none of whose parameters anything else of a loop's has: another model's, mostly."""
    known = {id(one) for module in holdings.modules.values() for one in module.parameters()}
    known |= {id(one) for one in holdings.other_tensors().values()}
    return [
        name
        for name, optimizer in holdings.optimizers.items()
        if not any(id(one) in known for group in optimizer.param_groups for one in group["params"])
    ]


def warn_of_another_loop(loop: Any, holdings: Holdings) -> None:
    """Warn where another open loop owns one of the optimizers: what one loop steps, the other finds changed."""
    for name, optimizer in holdings.optimizers.items():
        before = _owners.get(optimizer, lambda: None)()
        if before is not None and not before.bypassed:
            _log.warning(
                "%s (%s) is owned by two loops, %s and %s, of which each takes the other's steps for changes from "
                "outside: decorate both steps with one loop, or close() the first",
                name, type(optimizer).__name__, repr(before), repr(loop),  # a handler may keep what it is given
            )  # fmt: skip
        _owners[optimizer] = weakref.ref(loop)
