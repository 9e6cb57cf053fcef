"""What a user hands to `hotloop.compile`, as named components and the callables that lead into each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

from hotloop.errors import ConfigError

_DENOISERS = ("unet", "transformer")
_WRAPPERS = ("_FabricModule", "DistributedDataParallel")
"""Classes, by name, that hold the model that they call under ``module``."""


@dataclasses.dataclass
class Target:
    """The named components of what was handed over.

    ``kind`` is ``module``, ``mapping``, ``pipeline`` or ``callable``; ``skipped`` names what is in ``components`` and
    is nothing that can be compiled; ``place`` is the mapping to put new callables into.
    """

    kind: str
    components: dict[str, Any]
    skipped: tuple[str, ...] = ()
    place: MutableMapping[str, Any] | None = None


def components_of(model: Any) -> Target:
    """Name the components of a module, a mapping, a pipeline or a callable.

    Raises:
        ConfigError: it is none of these, or a module that ``torch.compile(model)`` wrapped.
    """
    if isinstance(model, torch.nn.Module):
        if hasattr(model, "_orig_mod"):
            raise ConfigError(
                f"{type(model).__name__} is a wrapper made by torch.compile(model): hand hotloop.compile the module "
                "itself (model._orig_mod), which keeps its names and its state_dict"
            )
        if isinstance(model, torch.nn.ModuleDict):
            return Target("mapping", dict(model.items()))
        return Target("module", {"model": model})
    if isinstance(model, Mapping):
        return _mapping(model)
    components = getattr(model, "components", None)
    if isinstance(components, Mapping):
        modules = {name: part for name, part in components.items() if isinstance(part, torch.nn.Module)}
        return Target("pipeline", modules, tuple(name for name in components if name not in modules))
    if isinstance(model, type):
        raise ConfigError(f"cannot compile the class {model.__name__}: hand over an instance, {model.__name__}(...)")
    if callable(model):
        return Target("callable", {getattr(model, "__name__", type(model).__name__): model})
    raise ConfigError(
        f"cannot compile {type(model).__name__}: expected an nn.Module, a mapping of name to module, an object with a "
        "components mapping (a diffusers pipeline), or a callable"
    )


def _mapping(model: Mapping[str, Any]) -> Target:
    odd = [key for key in model if not isinstance(key, str)]
    if odd:
        raise ConfigError(f"component names {odd!r}: expected strings, which settings and status can name")
    wrapped = [name for name, part in model.items() if isinstance(part, torch.nn.Module) and hasattr(part, "_orig_mod")]
    if wrapped:
        raise ConfigError(
            f"components {', '.join(wrapped)} were wrapped by torch.compile(model): hand over the modules themselves"
        )
    parts = {name: part for name, part in model.items() if isinstance(part, torch.nn.Module) or callable(part)}
    skipped = tuple(name for name in model if name not in parts)
    place = model if isinstance(model, MutableMapping) else None
    functions = [name for name, part in parts.items() if not isinstance(part, torch.nn.Module)]
    if functions and place is None:
        raise ConfigError(
            f"components {', '.join(functions)} are plain callables, whose compiled form is a new callable: hand over "
            f"a mapping that can be updated, not a {type(model).__name__}"
        )
    return Target("mapping", parts, skipped, place)


def denoisers(target: Target) -> tuple[str, ...]:
    """Give the components that one preset for a pipeline compiles: its denoiser, or everything where it has none."""
    return tuple(name for name in _DENOISERS if name in target.components) or tuple(target.components)


def entry_points(component: Any) -> list[Any]:
    """Give the modules whose call leads into a component.

    For a LightningModule these are its own forward, where it defines one, and its children that have parameters: its
    ``training_step`` is called by the trainer, not through ``__call__``, and may use either. For a wrapper that a
    framework puts around a model (Fabric's, DistributedDataParallel) it is the model itself: precision, hooks on what
    leaves the wrapper and communication stay outside of compiled code.
    """
    if not isinstance(component, torch.nn.Module):
        return [component]
    if (inner := wrapped_by(component)) is not None:
        return entry_points(inner)
    if not is_lightning(component):
        return [component]
    children = [child for child in component.children() if any(True for _ in child.parameters())]
    own_forward: Callable[..., Any] = type(component).forward
    defines = not own_forward.__module__.startswith(("lightning", "pytorch_lightning", "torch."))
    return [*([component] if defines else []), *children] or [component]


def wrapped_by(module: torch.nn.Module) -> torch.nn.Module | None:
    """Give the model inside a framework's wrapper; None where the module is no wrapper."""
    if not any(base.__name__ in _WRAPPERS for base in type(module).__mro__):
        return None
    inner = module.module
    return inner if isinstance(inner, torch.nn.Module) else None


def compiled_by_torch(module: torch.nn.Module) -> list[str]:
    """Name the modules inside one that ``torch.compile(module)`` wrapped, the module itself included, by path."""
    return [name for name, one in module.named_modules() if "_orig_mod" in dict(one.named_children())]


def is_lightning(module: torch.nn.Module) -> bool:
    """Tell whether a module is a LightningModule, of either package name."""
    return any(base.__name__ == "LightningModule" for base in type(module).__mro__)
