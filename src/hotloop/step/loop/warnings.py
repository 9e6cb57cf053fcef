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
    """Warn of optimizers none of whose parameters the loop's models or other state have: another model's, mostly."""
    known = {id(parameter) for module in holdings.modules.values() for parameter in module.parameters()}
    known |= {id(tensor) for tensor in holdings.other_tensors().values()}
    models = ", ".join(f"{name} ({type(module).__name__})" for name, module in holdings.modules.items())
    for name, optimizer in holdings.optimizers.items():
        if not any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
            _log.warning(
                "%s (%s): none of its parameters is one of %s: give the optimizer that was made of model.parameters(), "
                "or what has them as state=",
                name, type(optimizer).__name__, models,
            )  # fmt: skip


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
