"""The public functions: compile in place, and take it off."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hotloop import events as ev
from hotloop import presets
from hotloop._torch.inductor_options import list_options
from hotloop._torch.versions import check
from hotloop.compiling.apply import (
    WORTH_CUTTING,
    Cut,
    block_classes,
    components_of,
    declared_blocks,
    sharded_units,
)
from hotloop.compiling.apply.targets import Target, denoisers, refuse_wrapped
from hotloop.compiling.control import boundary, rendezvous
from hotloop.compiling.control.component import CompiledFunction, Component, lane
from hotloop.compiling.control.installed import attach, take_off
from hotloop.compiling.fallback import first_available, missing
from hotloop.compiling.observe import collector
from hotloop.config import ComponentConfig, Regions, component_config
from hotloop.errors import ConfigError, PresetUnavailableError
from hotloop.presets import Preset

if TYPE_CHECKING:
    import types

_log = logging.getLogger("hotloop")
_M = TypeVar("_M")
_Preset = str | Preset


def compile(  # noqa: A001, PLR0913 - the public name and settings are torch's own
    model: _M,
    preset: _Preset | Mapping[str, _Preset] = "default",
    *,
    inference: _Preset | Mapping[str, _Preset] | None = None,
    regions: Regions = "auto",
    dynamic: bool | types.EllipsisType | None = ...,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
    ladder: Iterable[_Preset] | None = None,
    strict: bool = False,
    strict_lifetime: bool = False,
) -> _M:
    """Compile a model in place: names, ``state_dict``, hooks and type stay as in eager.

    Args:
        model: an ``nn.Module`` (compiled in place and returned); a mapping of component name to module or callable
            (updated in place and returned; a ModuleDict is one); an object with a ``components`` mapping (a diffusers
            pipeline); or a plain callable (a new callable is returned). A LightningModule is compiled in its
            ``*_step`` methods, its forward and its children.
        preset: a name (in any case), a `hotloop.Preset`, or a mapping of component name to either. One preset for a
            mapping compiles all of it; for a pipeline only its denoiser (``unet`` or ``transformer``), and to have
            none is an error.
        inference: the preset while gradients are off; None takes ``preset``'s.
        regions: ``"whole"``; ``"blocks"``: each repeated block and the rest in pieces, equal blocks compiled once;
            ``"auto"``: whole, unless the class declares its repeated blocks and cutting there saves half of the graph.
        dynamic: None is torch's automatic kind, True forces dynamic shapes, False compiles once per size; unset takes
            the preset's.
        fullgraph: raise at the first graph break with file and line, as in torch.
        options: Inductor options, added to the preset's; one that is stepped down to has its own alone.
        ladder: the presets to step down to, in order; unset takes the preset's. ``none`` is always last.
        strict: raise `CompileFailedError` or `PresetUnavailableError` instead of stepping down.
        strict_lifetime: raise `StaleOutputError` where an output of a CUDA graph is still held when a later call is
            about to overwrite it. By default what leaves a CUDA graph is copied, so that it may be held for good.

    Returns:
        ``model`` itself, or the new callable.

    Raises:
        ConfigError: an unknown preset, component or option, or a value that does not fit (a ValueError).
        PresetUnavailableError: ``strict`` and this machine cannot run the preset.
        UnsupportedTorchError: torch is older than hotloop supports.
    """
    check()
    target = components_of(model)
    ladder = None if ladder is None else ladder if isinstance(ladder, str) else tuple(ladder)
    plan = _plan(target, preset, inference)
    configs = {
        name: component_config(
            chosen, inference=off, regions=regions, dynamic=dynamic, fullgraph=fullgraph, options=options,
            ladder=ladder, strict=strict, strict_lifetime=strict_lifetime,
        )
        for name, (chosen, off) in plan.items()
    }  # fmt: skip
    for config in configs.values():
        _check_options(config)
    built = {name: _build(name, target.components[name], config) for name, config in configs.items()}
    installed: _M = _install(model, target, built)
    return installed


def _plan(target: Target, preset: Any, inference: Any) -> dict[str, tuple[_Preset, _Preset | None]]:
    """Give the presets (training, inference) of each component that is to be compiled."""
    if isinstance(preset, Mapping):
        names = tuple(preset)
    else:
        names = denoisers(target) if target.kind == "pipeline" else tuple(target.components)
    per_name = {
        what: given for what, given in (("preset", preset), ("inference", inference)) if isinstance(given, Mapping)
    }
    for what, given in per_name.items():
        for name in given:
            if name not in target.components:
                known = ", ".join(target.components) or "none"
                raise ConfigError(f"{what} names component {name!r}, which does not exist: expected one of {known}")
    if not names:
        raise ConfigError("nothing to compile: the mapping holds no module or callable")
    if target.kind == "pipeline":
        refuse_wrapped(target, names)
    return {
        name: (
            preset[name] if isinstance(preset, Mapping) else preset,
            inference.get(name) if isinstance(inference, Mapping) else inference,
        )
        for name in names
    }


def validate(preset: _Preset, *, device: str = "cpu", **settings: Any) -> ComponentConfig:
    """Check a preset and the settings of `compile` without a model, so that a long run refuses them before it starts.

    Raises:
        ConfigError: as `compile` does.
        PresetUnavailableError: with ``strict=True``, this machine cannot run a preset on the device type.
    """
    config = component_config(preset, **settings)
    _check_options(config)
    for chosen in {config.training, config.inference} if config.strict else ():
        if lacking := missing(chosen, device):
            raise PresetUnavailableError(
                f"preset {chosen.name} cannot run here: {lacking}; strict=True forbids another"
            )
    return config


def _check_options(config: ComponentConfig) -> None:
    """Refuse an Inductor option that this torch does not know, before anything is touched."""
    given = [preset for preset in (config.training, config.inference) if preset.options]
    known = {option.name for option in list_options()} if given else set()
    for preset in given:
        for name in preset.options if known else ():
            if name.replace("-", "_") not in known:
                raise ConfigError(
                    f"preset {preset.name!r}: option {name!r} does not exist in torch {torch.__version__}: "
                    f"{presets.expected(name, known)} (hotloop presets --options lists them)"
                )


def _build(name: str, part: Any, config: ComponentConfig) -> Component:
    """Make a component's lanes; nothing is attached yet, so a refusal leaves everything as it was."""
    disabled = f"HOTLOOP_DISABLE={os.environ['HOTLOOP_DISABLE']} is set" if _disabled() else ""
    cut = _cut(name, part, config)
    lanes = tuple(
        lane(name, mode, preset, config, cut)
        for mode, preset in (("training", config.training), ("inference", config.inference))
    )
    lanes[1].tally.said = lanes[0].tally.said  # each reason once a component, not once a mode
    component = Component(name, config, (lanes[0], lanes[1]), disabled=disabled)
    device = _device(part)
    for made in lanes:
        _, lacking = first_available(made.rungs, device)
        if lacking and config.strict and not disabled:
            raise PresetUnavailableError(
                f"component {name!r}: preset {made.preset.name} cannot run here: {lacking}; strict=True forbids another"
            )
    return component


def _disabled() -> bool:
    return os.environ.get("HOTLOOP_DISABLE", "").strip().lower() not in ("", "0", "false", "no")


def _cut(name: str, part: Any, config: ComponentConfig) -> Cut:
    if config.regions == "whole" or not isinstance(part, torch.nn.Module) or sharded_units(part):
        return Cut()
    if config.regions == "auto":
        return Cut(block_classes(part), WORTH_CUTTING) if declared_blocks(part) else Cut()
    blocks = block_classes(part)
    if not blocks:
        _log.warning("%s: regions='blocks', but %s has no repeated blocks: compiled whole", name, type(part).__name__)
    return Cut(blocks)


def _device(part: Any) -> str:
    """Give the device type that a component lives on; a callable is taken to run where torch's default device is."""
    if isinstance(part, torch.nn.Module):
        first = next(itertools.chain(part.parameters(), part.buffers()), None)
        return first.device.type if first is not None else str(torch.get_default_device().type)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _install(model: Any, target: Target, built: dict[str, Component]) -> Any:
    if any(component.asks for component in built.values()):  # what stays eager does not cost the compiler's import
        collector.install()
        boundary.install()
        rendezvous.follow()
    functions: dict[str, CompiledFunction] = {}
    for name, component in built.items():
        part = target.components[name]
        device = _device(part)
        for each in component.lanes:
            if component.disabled:
                each.eager = True
            else:
                each.start(device)
        boundary.follow(component)
        if isinstance(part, torch.nn.Module):
            attach(part, component)
        else:
            functions[name] = CompiledFunction(_plain(part), component)
    if target.kind == "callable":
        return functions[next(iter(functions))]
    if target.place is not None:
        target.place.update(functions)
    left = [name for name in (*target.components, *target.skipped) if name not in built]
    if left:
        _log.info("compiled %s; left eager: %s", ", ".join(built), ", ".join(left))
    return model


def _plain(function: Any) -> Callable[..., Any]:
    """Compiling a compiled function again replaces the compile, as it does for a module."""
    return function.__wrapped__ if isinstance(function, CompiledFunction) else function


def leave_eager(name: str, part: torch.nn.Module, config: ComponentConfig, why: ev.NoEffect) -> None:
    """Leave a module as it is where a compile was asked for and cannot take effect; its status says why.

    Modules inside of it may be compiled each by itself; they have a line of their own in the status.
    """
    component = _build(name, part, config)
    component.left, asked = True, component.asks
    for one in component.lanes:
        one.eager = True
    attach(part, component)
    if asked:
        collector.emit(why, component.lanes[0].tally)


def uncompile(model: Any) -> Any:
    """Take a compile off again: the model runs as if hotloop had never compiled it.

    That is eager, or what the user's own ``module.compile()`` had put in force before.

    Takes what `compile` takes, and gives it back; for a compiled callable that is the plain one. What was not compiled
    stays as it is.
    """
    if isinstance(model, CompiledFunction):
        return model.__wrapped__
    target = components_of(model)
    for name, part in target.components.items():
        if isinstance(part, torch.nn.Module):
            for module in part.modules():
                take_off(module)
        elif isinstance(part, CompiledFunction) and target.place is not None:
            target.place[name] = part.__wrapped__
    return model
