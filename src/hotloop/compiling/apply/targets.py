"""What a user hands to `hotloop.compile`, as named components and the callables that lead into each."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

_DENOISERS = ("unet", "transformer")
_WRAPPERS = ("_FabricModule", "DistributedDataParallel")
"""Classes, by name, of modules that frameworks put around a model."""
_HOOKS = ("_hf_hook", "_diffusers_hook")
"""Where Accelerate and diffusers keep the hooks that they run a module's forward between; offloading is one."""
_HELD_AS = ("_original_module", "_forward_module", "module")
"""What a wrapper may hold the model as, the model itself before a wrapper around it; equal ones are listed once."""


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
        if "" in compiled_by_torch(model):  # not by hasattr: wrappers of frameworks pass attributes through
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
    """Give the components that one preset for a pipeline compiles: its denoiser, and nothing else.

    Raises:
        ConfigError: it has none.
    """
    found = tuple(name for name in _DENOISERS if name in target.components)
    if not found:
        known = ", ".join(target.components) or "none"
        first = next(iter(target.components), "unet")
        raise ConfigError(
            f"there is no denoiser ({' or '.join(_DENOISERS)}) among the parts, and by default nothing else is "
            f"compiled; the parts are: {known}; name what to compile, preset={{{first!r}: 'default'}}"
        )
    return found


def refuse_wrapped(target: Target, names: Iterable[str]) -> None:
    """Refuse parts of a pipeline that ``torch.compile(part)`` wrapped: which of the two compiles it is to be said.

    Raises:
        ConfigError: one of them is.
    """
    for name in names:
        part = target.components[name]
        if isinstance(part, torch.nn.Module) and "" in compiled_by_torch(part):
            raise ConfigError(
                f"component {name!r} was wrapped by torch.compile(): hand over the module itself "
                f"(pipeline.{name} = pipeline.{name}._orig_mod), or name other components in preset"
            )


def entry_points(component: Any) -> list[Any]:
    """Give the modules whose call leads into a component.

    For a LightningModule these are its own forward, where it defines one, and its children that have parameters, beside
    its `step_methods`, which may be left to them. For a wrapper that a framework puts around a model (Fabric's,
    DistributedDataParallel) it is the model itself: precision, hooks on what leaves the wrapper and communication stay
    outside of compiled code. For a model that FSDP has sharded these are its `sharded_units`. For an autoencoder,
    whose ``encode`` and ``decode`` are called instead of it, its encoder and decoder as well.
    """
    if not isinstance(component, torch.nn.Module):
        return [component]
    if (inner := wrapped_by(component)) is not None:
        return entry_points(inner)
    if units := sharded_units(component):
        return units
    if not is_lightning(component):
        return [component, *_coders(component)]
    children = [child for child in component.children() if any(True for _ in child.parameters())]
    defines = not of_library(type(component).forward)
    return [*([component] if defines else []), *children] or [component]


def _coders(component: torch.nn.Module) -> list[torch.nn.Module]:
    """Give the encoder and decoder that a module's ``encode`` and ``decode`` call; none of another kind of module."""
    children = dict(component.named_children())
    pairs = (("encode", "encoder"), ("decode", "decoder"))
    return [children[name] for method, name in pairs if name in children and callable(getattr(component, method, None))]


def of_library(function: Any) -> bool:
    """Tell whether a function is no user's: Lightning's own, or torch's."""
    return function is None or function.__module__.startswith(("lightning", "pytorch_lightning", "torch."))


def sharded_units(component: torch.nn.Module) -> list[torch.nn.Module]:
    """Give the innermost modules whose parameters FSDP gathers one by one, as torchtitan compiles them.

    Of FSDP2 (``fully_shard``) these are the modules that it was called with; of FSDP1 (``FullyShardedDataParallel``)
    what its wrappers hold: a wrapper gathers in its own forward, which is not for the compiler. Single layers of
    torch's own are none: there is nothing in them to compile together.
    """
    sharded: dict[torch.nn.Module, torch.nn.Module] = {}
    for one in component.modules():
        unit = one if _is_fsdp("FSDPModule", one) else _held_by_fsdp1(one)
        if unit is not None and next(unit.children(), None) is not None:
            sharded[one] = unit
    innermost = (one for one in sharded if not any(part in sharded for part in one.modules() if part is not one))
    return [sharded[one] for one in innermost]


def sharded_flat(component: torch.nn.Module) -> bool:
    """Tell whether FSDP1 has put parameters of a module into flat ones, of which each process holds a part."""
    return any(_held_by_fsdp1(one) is not None for one in component.modules())


def _held_by_fsdp1(module: torch.nn.Module) -> torch.nn.Module | None:
    """Give what a wrapper of FSDP1 holds, without its activation checkpointing; None of another module."""
    if not _is_fsdp("FullyShardedDataParallel", module):
        return None
    wrapper: Any = module
    held: torch.nn.Module = wrapper.module
    return held


def _is_fsdp(name: str, module: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by who shards; a second of imports for nobody else
    kind = getattr(fsdp, name, None)
    return kind is not None and isinstance(module, kind)


def wrapped_by(module: torch.nn.Module) -> torch.nn.Module | None:
    """Give the model inside a framework's wrapper; None where the module is no wrapper."""
    if not _is_wrapper(module):
        return None
    # Not by module.module: Fabric asks there whether a module is true, which one wrapped by torch.compile refuses.
    children = dict(module.named_children())
    return next((children[name] for name in _HELD_AS if name in children), None)


def _is_wrapper(module: torch.nn.Module) -> bool:
    return any(base.__name__ in _WRAPPERS for base in type(module).__mro__)


def compiled_by_torch(module: torch.nn.Module) -> list[str]:
    """Name the modules inside one that ``torch.compile(module)`` wrapped, the module itself included, by path."""
    return [name for name, one in module.named_modules() if "_orig_mod" in dict(one.named_children())]


def without_wrappers(module: torch.nn.Module, path: str) -> str:
    """Give the path of a module inside a model, without the wrappers of frameworks and of ``torch.compile``."""
    parts = [one for one in path.split(".") if one not in ("", "_orig_mod")]
    while parts and _is_wrapper(module) and parts[0] in _HELD_AS:
        del parts[0]
    return ".".join(parts)


def hooked(module: torch.nn.Module) -> set[str]:
    """Give the paths of the modules whose forward runs between a framework's hooks; its own is empty."""
    return {path for path, one in module.named_modules() if any(name in vars(one) for name in _HOOKS)}


def offloaded(module: torch.nn.Module) -> set[str]:
    """Give the paths of those whose hooks move them to the device and back; diffusers has other hooks as well."""
    of_diffusers = {path: vars(one).get("_diffusers_hook") for path, one in module.named_modules()}
    by_groups = {path for path, one in of_diffusers.items() if "group_offloading" in getattr(one, "hooks", ())}
    return by_groups | {path for path, one in module.named_modules() if "_hf_hook" in vars(one)}


def is_lightning(module: torch.nn.Module) -> bool:
    """Tell whether a module is a LightningModule, of either package name."""
    return any(base.__name__ == "LightningModule" for base in type(module).__mro__)
