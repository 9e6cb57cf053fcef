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

_HELD_AS = ("_original_module", "_forward_module", "module")
"""Attributes that a wrapper may hold the model as, the model itself before a wrapper around it."""


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

    def denoisers(self) -> tuple[str, ...]:
        """Return the components that one preset for a pipeline compiles: its denoiser, and nothing else.

        Raises:
            ConfigError: the pipeline has no denoiser.
        """
        found = tuple(name for name in ("unet", "transformer") if name in self.components)
        if not found:
            known = ", ".join(self.components) or "none"
            first = next(iter(self.components), "unet")
            raise ConfigError(
                "there is no denoiser (unet or transformer) among the parts, and by default nothing else is "
                f"compiled; the parts are: {known}; name what to compile, preset={{{first!r}: 'default'}}"
            )
        return found

    def refuse_wrapped(self, names: Iterable[str]) -> None:
        """Refuse parts of a pipeline that ``torch.compile(part)`` wrapped: the user has to choose who compiles them.

        Raises:
            ConfigError: ``torch.compile(part)`` wrapped one of the parts.
        """
        for name in names:
            part = self.components[name]
            if isinstance(part, torch.nn.Module) and "" in compiled_by_torch(part):
                raise ConfigError(
                    f"component {name!r} was wrapped by torch.compile(): hand over the module itself "
                    f"(pipeline.{name} = pipeline.{name}._orig_mod), or name other components in preset"
                )


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


def entry_points(component: Any) -> list[Any]:
    """Return the modules whose call leads into a component; for most modules and functions, the component itself.

    - For a LightningModule: its own forward, where it defines one, and its children that have parameters, beside its
      `step_methods`, which may be left to them.
    - For a wrapper that a framework puts around a model (Fabric's, DistributedDataParallel): the model. Precision,
      hooks on what leaves the wrapper, and communication stay outside of compiled code.
    - For a model that FSDP has sharded: its `sharded_units`.
    - For an autoencoder, whose ``encode`` and ``decode`` are called instead of it: its encoder and decoder as well.
    """
    if not isinstance(component, torch.nn.Module):
        return [component]
    children = dict(component.named_children())
    if _is_wrapper(component):
        # Not by component.module: Fabric asks there whether a module is true, which an OptimizedModule refuses.
        held = next((children[name] for name in _HELD_AS if name in children), None)
        if held is not None:
            return entry_points(held)
    if units := sharded_units(component):
        return units
    if is_lightning(component):
        trained = [child for child in component.children() if next(child.parameters(), None) is not None]
        own = [] if of_library(type(component).forward) else [component]
        return [*own, *trained] or [component]
    coders = (("encode", "encoder"), ("decode", "decoder"))
    called = [part for method, part in coders if part in children and callable(getattr(component, method, None))]
    return [component, *(children[part] for part in called)]


def of_library(function: Any) -> bool:
    """Return whether a function is Lightning's own or torch's, not the user's."""
    return function is None or function.__module__.startswith(("lightning", "pytorch_lightning", "torch."))


def sharded_units(component: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the innermost modules whose parameters FSDP gathers one by one, as torchtitan compiles them.

    For FSDP2 (``fully_shard``) these are the modules that it was called with. For FSDP1 (``FullyShardedDataParallel``)
    they are the modules inside its wrappers: a wrapper gathers in its own forward, which is not for the compiler.
    Single layers of torch's own are left out: there is nothing in them to compile together.
    """
    sharded: dict[torch.nn.Module, torch.nn.Module] = {}
    for module in component.modules():
        unit = module if _is_fsdp("FSDPModule", module) else None
        if _is_fsdp("FullyShardedDataParallel", module):
            wrapper: Any = module
            unit = wrapper.module  # without its activation checkpointing
        if unit is not None and next(unit.children(), None) is not None:
            sharded[module] = unit
    return [
        unit
        for module, unit in sharded.items()
        if not any(part in sharded for part in module.modules() if part is not module)
    ]


def sharded_flat(component: torch.nn.Module) -> bool:
    """Return whether FSDP1 has put parameters of a module into flat ones, of which each process holds a part."""
    return any(_is_fsdp("FullyShardedDataParallel", module) for module in component.modules())


def _is_fsdp(name: str, module: torch.nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whoever shards has imported it; the import takes a second
    kind = getattr(fsdp, name, None)
    return kind is not None and isinstance(module, kind)


def _is_wrapper(module: torch.nn.Module) -> bool:
    """Return whether a module is one that frameworks put around a model, recognised by the name of its class."""
    return any(base.__name__ in ("_FabricModule", "DistributedDataParallel") for base in type(module).__mro__)


def compiled_by_torch(module: torch.nn.Module) -> list[str]:
    """List the modules that ``torch.compile(module)`` wrapped, by path: the module itself ("") or inside it."""
    return [path for path, part in module.named_modules() if "_orig_mod" in dict(part.named_children())]


def without_wrappers(module: torch.nn.Module, path: str) -> str:
    """Return the path of a module inside a model, without the wrappers of frameworks and of ``torch.compile``."""
    parts = [name for name in path.split(".") if name not in ("", "_orig_mod")]
    while parts and _is_wrapper(module) and parts[0] in _HELD_AS:
        del parts[0]
    return ".".join(parts)


def hooked(module: torch.nn.Module) -> set[str]:
    """Return the paths of the modules whose forward runs between hooks of Accelerate or diffusers; "" is its own."""
    return {path for path, part in module.named_modules() if vars(part).keys() & {"_hf_hook", "_diffusers_hook"}}


def is_lightning(module: torch.nn.Module) -> bool:
    """Return whether a module is a LightningModule, of either package name."""
    return any(base.__name__ == "LightningModule" for base in type(module).__mro__)
