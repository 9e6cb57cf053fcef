"""Optimizers inside a captured step: device copies of values that would be frozen, and which optimizers stay outside.

A fused or capturable optimizer step can be recorded, with its step counts and learning rates in device tensors that are
refreshed before a replay. The rest of the parameter groups (weight decay, betas, momentum) is frozen into the
recording, so a change drops it. An optimizer that cannot be recorded, or whose frozen settings change all the time,
runs outside, between two segments.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.foreach import copies
from hotloop._torch.hooks import calls_hooks
from hotloop._torch.places import span_of
from hotloop._torch.sharded import is_spread, shard_of
from hotloop.step.audit.averaged_model import return_counts
from hotloop.step.watch.optimizers import frozen_settings

if TYPE_CHECKING:
    from hotloop.step.context import Context

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
"""Recorded by their fused kernel, which takes learning rate and step count from the device on CPU and GPU alike."""
_CAPTURABLE = (
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)
"""Recorded with ``capturable=True``, which torch has on GPUs only."""
_log = logging.getLogger("hotloop")
_moved: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[tuple[int, str]]] = weakref.WeakKeyDictionary()
"""By optimizer: parameter id and key of each value that eager keeps on the host, and a recording on the device."""


def recordable(optimizer: torch.optim.Optimizer, device: torch.device) -> str:
    """Return why an optimizer's step has to run outside of a recording on a device; empty if it can be recorded."""
    kind = type(optimizer)
    if kind in _CAPTURABLE:
        return "" if device.type == "cuda" else f"{kind.__name__} is capturable on a GPU only"
    if kind not in _FUSED:
        return f"{kind.__name__} is not known to run without the host"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if kind is torch.optim.SGD and any(map(is_spread, parameters)):
        return "torch's fused SGD kernel takes no sharded parameters: Adam's and AdamW's do"
    return _no_fused_kernel(optimizer, parameters, device)


def _no_fused_kernel(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], device: torch.device) -> str:
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "differentiable=True has no fused kernel"
    if any(one.device.type != device.type or not one.is_floating_point() for one in parameters):
        return f"not all of its parameters are floating point on {device.type}, as a fused kernel needs"
    if any(one.grad is not None and one.grad.layout != torch.strided for one in parameters):
        return "sparse gradients have no fused kernel"
    if any(_strides_differ(optimizer, parameter) for parameter in parameters):
        return (
            "some of its state, or a gradient, has other strides than its parameter, and a fused kernel knows but one"
        )
    held = [*map(shard_of, parameters)]
    gaps = any(one.layout == torch.strided and one.numel() and span_of(one) != one.numel() for one in held)
    return "a parameter is a slice with gaps (weight[:, ::2]), and a fused kernel writes into these" if gaps else ""


def _strides_differ(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    """Return whether state or gradient have other strides than the parameter, after ``weight.t_()`` for example."""

    def strides(tensor: torch.Tensor) -> list[int]:  # along dimensions of one element strides may be anything
        return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]

    values = (parameter.grad, *optimizer.state.get(parameter, {}).values())
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.ndim]
    return any(one.shape == parameter.shape and strides(one) != strides(parameter) for one in tensors)


class Recorded:
    """An optimizer whose step is recorded: its settings on the device, and the settings that were frozen.

    Args:
        optimizer: an optimizer that is `recordable`; its state must exist, so it has stepped before.
        device: the device on which it is recorded.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        self._rates = [
            given if self._on(device, given := group["lr"]) else torch.full((), float(given), device=device)
            for group in optimizer.param_groups
        ]
        self._last = [float(group["lr"]) for group in optimizer.param_groups]
        self._frozen, self._step = frozen_settings(optimizer), self._step_now()

    def _step_now(self) -> tuple[Any, ...]:
        """Return the functions that run as the optimizer's step; a user may replace them."""
        kind = type(self.optimizer)
        return kind, kind.step, vars(self.optimizer).get("step")

    def refresh(self) -> None:
        """Write the current learning rates to the device, for the next replay."""
        for index, group in enumerate(self.optimizer.param_groups):
            rate, ours = group["lr"], self._rates[index]
            if self._on(ours.device, rate):
                continue  # the recording reads this tensor itself; another tensor in its place is a change
            if (value := float(rate)) != self._last[index]:  # schedulers change a tensor on the host in place
                ours.fill_(value)
                self._last[index] = value

    @staticmethod
    def _on(device: torch.device, rate: Any) -> bool:
        """Return whether a learning rate is a tensor that a recording can read."""
        return isinstance(rate, torch.Tensor) and rate.device.type == device.type

    def changed(self) -> str:
        """Return the name of a setting that differs from the frozen one; empty if none does."""
        if self._step_now() != self._step:
            return f"the class of {type(self.optimizer).__name__}, or its step"
        now = frozen_settings(self.optimizer)
        if now == self._frozen:
            return ""
        if len(now) != len(self._frozen):
            return "the number of parameter groups"
        for index, (ours, theirs) in enumerate(zip(self._frozen, now, strict=True)):
            for key in {**ours, **theirs}:
                if ours.get(key) != theirs.get(key):
                    return f"{key} of parameter group {index}"
        return "param_groups"

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Put device tensors into the groups, and ask for kernels that read them, while a step is recorded."""
        kind = type(self.optimizer)
        asked = {"fused": True, "foreach": False} if kind in _FUSED else {"capturable": True}
        if kind in _FUSED and self._rates and self._rates[0].is_cuda and kind is not torch.optim.SGD:
            asked["capturable"] = True
        before = [dict(group) for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group.update({"lr": rate, **asked})
        try:
            yield
        finally:
            for group, values in zip(self.optimizer.param_groups, before, strict=True):
                group.update({key: values[key] for key in ("lr", *asked)})


def counted_rounding(optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """Return the relative error of an update that torch's own optimizers make compiled, where they count in float32.

    Uncompiled they compute 1 - beta^t in Python's numbers. In float32 that loses digits while it is small: AdamW's
    updates were off by 2e-5, with beta2 = 0.9999 by 1e-4. RAdam subtracts once more, and was off by 6e-3.
    """
    error = 0.0
    for optimizer in optimizers:
        for group in optimizer.param_groups if _is_torchs_own(optimizer) else ():
            least = min((1 - float(beta) for beta in group.get("betas", ())), default=1.0)
            one = 4 * 2.0**-24 / max(least, 2.0**-24)
            error = max(error, one * (100 if isinstance(optimizer, torch.optim.RAdam) else 1))
    return error


def _is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def repeatable(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `step_again` can take a step of this optimizer on copies.

    Its step must read only parameters, gradients, state and groups, and treat each parameter by itself.
    """
    return type(optimizer) in (*_FUSED, *_CAPTURABLE, torch.optim.Adagrad, torch.optim.Adafactor)


def step_again(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter], gradients: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, dict[str, Any]]]:
    """Take the optimizer's step, as eager does, on copies of some of its parameters; the originals do not change.

    Args:
        optimizer: an optimizer that is `repeatable`.
        parameters: some of its parameters, as they are before the step.
        gradients: the gradients of these parameters, on any device; they are copied.

    Returns:
        each parameter after the step, and the optimizer's state of the parameter.
    """
    copied = {}
    there = [shard_of(gradient).detach().to(one.device) for one, gradient in zip(parameters, gradients, strict=True)]
    own_values = copies([*map(shard_of, parameters)])
    for parameter, values, gradient in zip(parameters, own_values, copies(there), strict=True):
        copied[id(parameter)] = torch.nn.Parameter(values)
        copied[id(parameter)].grad = gradient
    # Not a copy of the optimizer: that would convert its state, and have its hooks.
    again = type(optimizer).__new__(type(optimizer))
    again.defaults = optimizer.defaults
    groups = [
        {**group, "params": [copied[id(one)] for one in group["params"] if id(one) in copied]}
        for group in optimizer.param_groups
    ]
    again.param_groups = [group for group in groups if group["params"]]
    again.state = collections.defaultdict(dict)
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    own = [shard_of(value) for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    own_copies = iter(copies(own))
    for parameter, state in zip(parameters, states, strict=True):
        again.state[copied[id(parameter)]] = {
            key: next(own_copies) if isinstance(value, torch.Tensor) else value for key, value in state.items()
        }
    step = type(again).step
    getattr(step, "__wrapped__", step)(again) if hasattr(step, "hooked") else step(again)  # without global hooks
    return [(copied[id(one)].detach(), again.state[copied[id(one)]]) for one in parameters]


def move_step_counts(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the numbers that unfused optimizers keep on the host (step counts) to the device of a recorded step."""
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items() if isinstance(entry, Mapping) else ():
            if isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type != device.type:
                _moved.setdefault(optimizer, set()).add((id(parameter), key))
                entry[key] = value.to(device)


def return_step_counts(optimizer: torch.optim.Optimizer) -> None:
    """Move these numbers back to the host; each waits once for the device."""
    moved = _moved.pop(optimizer, set())
    for parameter, entry in optimizer.state.items():
        for key in [key for key in entry if (id(parameter), key) in moved]:
            entry[key] = entry[key].cpu()


def with_host_step_counts(optimizer: torch.optim.Optimizer, document: dict[str, Any]) -> dict[str, Any]:
    """Move these numbers to the host in a checkpoint, as a state_dict post-hook: eager has them there."""
    moved = _moved.get(optimizer, set())
    try:
        return _on_host(optimizer, document, moved) if moved else document
    except Exception:  # noqa: BLE001 - none of it is worth the user's checkpoint, which holds the same numbers
        _log.warning("step counts stay on the device in this checkpoint", exc_info=True)
        return document


def _on_host(optimizer: torch.optim.Optimizer, document: dict[str, Any], moved: set[tuple[int, str]]) -> dict[str, Any]:
    pairs = zip(document["param_groups"], optimizer.param_groups, strict=True)
    ids = {
        index: id(parameter)
        for group, own in pairs
        for index, parameter in zip(group["params"], own["params"], strict=True)
    }
    state = {
        index: {key: value.cpu() if (ids.get(index), key) in moved else value for key, value in entry.items()}
        for index, entry in document["state"].items()
    }
    return {**document, "state": state}


class RecordedOptimizers:
    """The optimizers of a loop, some of whose step counts recordings move to the device.

    Attributes:
        outside: names of the optimizers that were left out of recordings.
        hooks: handles of the hooks that keep their checkpoints as eager writes them; to be removed at the end.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.outside: set[str] = set()
        optimizers = context.holdings.optimizers.values()
        hooked = filter(calls_hooks, optimizers)
        self.hooks = [optimizer.register_state_dict_post_hook(with_host_step_counts) for optimizer in hooked]

    def outside_of(self, stepped: Iterable[str]) -> set[str]:
        """Name the stepped optimizers that run outside of a recording, and log why."""
        names = self.outside & set(stepped)
        for name in stepped:
            why = recordable(self._context.holdings.optimizers[name], self._context.device)
            if why and name not in names:
                names.add(name)
                self._context.reports.say_once(f"{name} runs outside the captured step: {why}")
        return names

    def why_outside(self, stepped: Iterable[str]) -> str:
        """Say why a stepped optimizer runs outside of a recording; empty where none does."""
        names = self.outside_of(stepped)
        reasons = [recordable(self._context.holdings.optimizers[name], self._context.device) for name in names]
        return next(filter(None, reasons), "its settings change again and again") if names else ""

    def run_outside(self, name: str, why: str) -> None:
        """Leave an optimizer out of recordings from now on."""
        self.outside.add(name)
        self._context.reports.say_once(f"{name} runs outside the captured step from now on: {why}")

    def return_step_counts(self) -> None:
        """Move the counts of optimizers and averages back to where eager keeps them."""
        if self._context.engine is not None:
            for optimizer in self._context.holdings.optimizers.values():
                return_step_counts(optimizer)
            return_counts(self._context.holdings.modules)
