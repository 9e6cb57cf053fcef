"""FSDP2: how a model is sharded over the devices, and its state as whole tensors in a checkpoint, and back.

A checkpoint has what one device would have written: it loads in plain PyTorch, and in a run of one device.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop.compiling.apply.regions import block_classes
from hotloop.errors import ConfigError
from hotloop.train.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterable

_OTHER_SHAPES = ("Adafactor", "LBFGS")
"""Optimizers whose state has other shapes than their parameters, so that nothing says how it is sharded."""


def strategy(devices: int) -> Any:
    """Return Fabric's strategy that shards the models which a program sets up."""
    kind = require("lightning.fabric.strategies", "A program that takes fabric").ModelParallelStrategy

    class Sharded(kind):  # type: ignore[misc, valid-type]
        """Shards a model; an optimizer that is set up with it trains the shares from then on."""

        def setup_module_and_optimizers(self, module: Any, optimizers: Any, *more: Any) -> Any:
            names = {id(one): name for name, one in module.named_parameters()}
            found = super().setup_module_and_optimizers(module, optimizers, *more)
            shares = dict(module.named_parameters())
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["params"] = [shares[names[id(one)]] if id(one) in names else one for one in group["params"]]
            return found

    return Sharded(shard, data_parallel_size=devices, tensor_parallel_size=1)


def shard(module: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    """Shard a model in place by ``fully_shard``: each of its repeated blocks, then the rest of it.

    A model that the program has sharded itself stays as it is.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: PLC0415 - takes a second to import

    if any(isinstance(one, FSDPModule) for one in module.modules()):
        return module
    names = block_classes(module)
    for block in module.modules():
        if block is not module and f"{type(block).__module__}.{type(block).__qualname__}" in names:
            fully_shard(block, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def check_optimizers(models: Mapping[str, torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that sharded models are trained by optimizers that go with them.

    Raises:
        ConfigError: an optimizer holds parameters from before they were sharded, or its state cannot be gathered.
    """
    if not any(_is_sharded(model.state_dict()) for model in models.values()):
        raise ConfigError(
            "run.strategy=fsdp2: the program has sharded none of its models. Set them up by net = fabric.setup(model), "
            "and give the Workload the model itself"
        )
    known = {id(one) for model in models.values() for one in model.parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if kind in _OTHER_SHAPES:
            raise ConfigError(
                f"run.strategy=fsdp2: the state of {kind} has other shapes than its parameters, and no checkpoint can "
                "gather it. Use another optimizer, such as AdamW, or run.strategy=ddp"
            )
        if any(id(one) not in known for group in optimizer.param_groups for one in group["params"]):
            raise ConfigError(
                f"run.strategy=fsdp2: the {kind} holds parameters that no model of the Workload has any more, since "
                "sharding replaced them. Set it up with its model, net, stepping = fabric.setup(model, optimizer), or "
                "make it after the model was set up"
            )


def state_of(one: Any, *, keep: bool = True) -> Any:
    """Return the ``state_dict`` of an object with each sharded tensor as a whole one on the CPU.

    All processes gather it together; one that does not ``keep`` it returns None in place of each such tensor.
    """
    state = one.state_dict()
    return _whole(state, keep) if _is_sharded(state) else state


def shares_of(one: Any, state: Any) -> Any:
    """Return a whole ``state_dict`` as the object can load it: this process's share of what it holds sharded."""
    if isinstance(one, torch.optim.Optimizer):
        return _of_optimizer(one, state)
    held = one.state_dict()
    return _shares(state, held) if _is_sharded(held) else state


def own(models: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Return what only this process knows of sharded models: their buffers, such as the running means of a norm."""
    found = {}
    for name, model in models.items():
        state, parameters = model.state_dict(), dict(model.named_parameters())
        if _is_sharded(state):
            found[name] = {key: one.cpu() for key, one in state.items() if key not in parameters and _is_plain(one)}
    return {"buffers": found} if any(found.values()) else {}


@torch.no_grad()
def load_own(models: Mapping[str, torch.nn.Module], kept: Mapping[str, Any]) -> None:
    """Put back what only this process knew of its models."""
    for name, buffers in kept.get("buffers", {}).items():
        held = models[name].state_dict()
        for key, value in buffers.items():
            held[key].copy_(value)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of all processes' shares, which gather it together; one that is not sharded as it is."""
    return tensor.full_tensor() if _is_share(tensor) else tensor  # type: ignore[attr-defined]


def _is_share(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "placements")


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not _is_share(value)


def _is_sharded(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(_is_sharded(one) for one in state.values())
    return any(_is_sharded(one) for one in state) if isinstance(state, list | tuple) else _is_share(state)


def _whole(state: Any, keep: bool) -> Any:
    if _is_share(state):
        found = whole(state)
        return found.cpu() if keep else None
    if isinstance(state, dict):
        return _changed(state, {key: _whole(one, keep) for key, one in state.items()})
    return type(state)(_whole(one, keep) for one in state) if type(state) in (list, tuple) else state


def _changed(state: dict[Any, Any], values: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping of the same kind with other values; a module's also tells the versions of its layers."""
    found = copy.copy(state)
    found.update(values)
    return found


def _share(value: Any, like: Any) -> Any:
    """Return this process's share of a whole tensor, as ``like`` is sharded; anything else as it is."""
    if not (_is_plain(value) and _is_share(like)) or value.shape != like.shape:
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415 - loaded by whoever has sharded

    # Every process has read the checkpoint, so that none has to send anything.
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def _shares(state: Any, held: Any) -> Any:
    if isinstance(state, dict) and isinstance(held, Mapping):
        return _changed(state, {key: _shares(one, held.get(key)) for key, one in state.items()})
    if type(state) in (list, tuple) and isinstance(held, list | tuple) and len(state) == len(held):
        return type(state)(_shares(one, other) for one, other in zip(state, held, strict=True))
    return _share(state, held)


def _of_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an optimizer's state with each tensor as its parameter is sharded; a new optimizer has none to go by."""
    held = [one for group in optimizer.param_groups for one in group["params"]]
    numbers = [one for group in state["param_groups"] for one in group["params"]]
    if not any(map(_is_share, held)) or len(held) != len(numbers):
        return state
    parameters = dict(zip(numbers, held, strict=True))
    shares = {
        number: {name: _share(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    return {**state, "state": shares}
