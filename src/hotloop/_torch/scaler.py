"""Takes the step of an optimizer under a GradScaler without asking the host whether a gradient is infinite.

The scaler asks, unless the optimizer is fused, and skips the step if one is. A recording cannot ask. It takes the step
in any case, and restores on the device what the step wrote if the scaler has found an infinity.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.sharded import shard_of
from hotloop._torch.thread_patch import replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

Decide = Callable[[torch.optim.Optimizer, functools.partial[Any], torch.Tensor], Any]
"""Takes a scaled step or skips it: given the optimizer, what takes its step, and a number on the device that is above 0
where the scaler found an infinity."""


@contextlib.contextmanager
def scaled_steps(decide: Decide) -> Iterator[None]:
    """Let ``decide`` take or skip the steps of scalers in this thread, in place of the scaler's question to the host.

    Some scalers go on asking, and their step is not captured: those of optimizers on several devices, and those of a
    step that somebody has wrapped to learn whether it runs.
    """

    def asking(real: Callable[..., Any]) -> Callable[..., Any]:
        def decided(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            found = list(state["found_inf_per_device"].values())
            if len(found) != 1 or type(found[0]) is not torch.Tensor or _is_watched(optimizer):
                return real(scaler, optimizer, state, *args, **kwargs)
            return decide(optimizer, functools.partial(optimizer.step, *args, **kwargs), found[0])

        return decided

    known = hasattr(torch.amp.GradScaler, "_maybe_opt_step")
    with replaced(torch.amp.GradScaler, "_maybe_opt_step", asking) if known else contextlib.nullcontext():
        yield


def accelerates(optimizer: torch.optim.Optimizer) -> Any:
    """Return Accelerate's wrapper of an optimizer while it steps, which notes whether the step ran; None for others."""
    own, name = vars(optimizer).get("step"), "accelerated_optimizer"
    if not isinstance(own, types.FunctionType) or name not in own.__code__.co_freevars:
        return None
    return (own.__closure__ or ())[own.__code__.co_freevars.index(name)].cell_contents


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether somebody stands before the optimizer's own step who learns there that it was not skipped."""
    own = vars(optimizer).get("step")
    schedulers = own is None or hasattr(own, "_wrapped_by_lr_sched") or getattr(own, "__self__", None) is optimizer
    return not schedulers and accelerates(optimizer) is None


def take_masked(optimizer: torch.optim.Optimizer, step: Callable[[], Any], found: torch.Tensor) -> Any:
    """Take a step, and put back parameters and state where ``found`` is above 0; the host is asked nothing.

    The state must exist. For the time of the step this takes one more copy of both.
    """
    parameters = [one for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
    state = [value for one in parameters for value in optimizer.state.get(one, {}).values()]
    written = [shard_of(one).detach() for one in (*parameters, *state) if isinstance(one, torch.Tensor)]
    before = [one.clone() for one in written]
    result = step()
    skips = found > 0
    for one, was in zip(written, before, strict=True):
        one.copy_(torch.where(skips, was, one))
    return result
