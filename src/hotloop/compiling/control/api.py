"""The public functions: compile in place, take the compile off again, and keep outputs of CUDA graphs."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hotloop import events as ev
from hotloop import presets
from hotloop._torch import cudagraphs
from hotloop._torch.inductor_options import list_options
from hotloop._torch.versions import check
from hotloop.compiling.apply.regions import Cut, block_classes, declared_blocks
from hotloop.compiling.apply.targets import Target, components_of, sharded_units
from hotloop.compiling.control import boundary
from hotloop.compiling.control.component import CompiledFunction, Component
from hotloop.compiling.control.installed import attach, take_off
from hotloop.compiling.control.lane import Lane
from hotloop.compiling.fallback import first_available, missing
from hotloop.compiling.fallback.step_marks import copied_together, steps
from hotloop.compiling.observe import collector, watchdog
from hotloop.config import ComponentConfig, Regions, component_config
from hotloop.errors import ConfigError, PresetUnavailableError
from hotloop.measure import flatten, unflatten
from hotloop.presets import Preset

if TYPE_CHECKING:
    import types

_log = logging.getLogger("hotloop")
_T = TypeVar("_T")
_Preset = str | Preset


def compile(  # noqa: A001, PLR0913 - the public name and settings are torch's own
    model: _T,
    preset: _Preset | Mapping[str, _Preset] = "default",
    *,
    inference: _Preset | Mapping[str, _Preset] | None = None,
    regions: Regions = "auto",
    dynamic: bool | types.EllipsisType | None = ...,
    fullgraph: bool = False,
    options: Mapping[str, Any] | None = None,
    ladder: Iterable[_Preset] | None = None,
    strict: bool = False,
) -> _T:
    """Compile a model in place: names, ``state_dict``, hooks and type stay as in eager.

    Args:
        model: an ``nn.Module`` (compiled in place and returned); a mapping of component name to module or callable
            (updated in place and returned; a ModuleDict counts as a mapping); an object with a ``components`` mapping
            (a diffusers pipeline); or a plain callable (a new callable is returned). A LightningModule is compiled in
            its ``*_step`` methods, its forward and its children.
        preset: a name (in any case), a `hotloop.Preset`, or a mapping of component name to either. For a mapping, one
            preset compiles all of it. For a pipeline, one preset compiles only its denoiser (``unet`` or
            ``transformer``); a pipeline without a denoiser is an error.
        inference: the preset while gradients are off; None takes ``preset``'s.
        regions: ``"whole"``; ``"blocks"``: each repeated block and the rest in pieces, equal blocks compiled once;
            ``"auto"``: whole, unless the class declares its repeated blocks and cutting there saves half of the graph.
        dynamic: None is torch's automatic setting, True forces dynamic shapes, False compiles once per size; unset
            takes the preset's.
        fullgraph: raise at the first graph break with file and line, as in torch.
        options: Inductor options, added to the preset's; presets further down the ladder do not get them.
        ladder: the presets to step down to, in order; unset takes the preset's. ``none`` is always last.
        strict: raise `CompileFailedError` or `PresetUnavailableError` instead of stepping down.

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
    configs = {
        name: component_config(
            training, inference=off, regions=regions, dynamic=dynamic, fullgraph=fullgraph, options=options,
            ladder=ladder, strict=strict,
        )
        for name, (training, off) in _plan(target, preset, inference).items()
    }  # fmt: skip
    for config in configs.values():
        _check_options(config)
    built = {name: _build(name, target.components[name], config) for name, config in configs.items()}
    installed: _T = _install(model, target, built)
    return installed


def _plan(target: Target, preset: Any, inference: Any) -> dict[str, tuple[_Preset, _Preset | None]]:
    """Return the presets (training, inference) of each component that is to be compiled."""
    if isinstance(preset, Mapping):
        names = tuple(preset)
    else:
        names = target.denoisers() if target.kind == "pipeline" else tuple(target.components)
    for setting, value in (("preset", preset), ("inference", inference)):
        for name in value if isinstance(value, Mapping) else ():
            if name not in target.components:
                known = ", ".join(target.components) or "none"
                raise ConfigError(f"{setting} names component {name!r}, which does not exist: expected one of {known}")
    if not names:
        raise ConfigError("nothing to compile: the mapping holds no module or callable")
    if target.kind == "pipeline":
        target.refuse_wrapped(names)
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
    with_options = [preset for preset in (config.training, config.inference) if preset.options]
    known = {option.name for option in list_options()} if with_options else set()
    for preset in with_options:
        for name in preset.options if known else ():
            if name.replace("-", "_") not in known:
                raise ConfigError(
                    f"preset {preset.name!r}: option {name!r} does not exist in torch {torch.__version__}: "
                    f"{presets.expected(name, known)} (hotloop presets --options lists them)"
                )


def _build(name: str, part: Any, config: ComponentConfig) -> Component:
    """Make a component and its lanes; nothing is attached yet, so a refusal leaves everything as it was."""
    switch = os.environ.get("HOTLOOP_DISABLE", "")
    disabled = "" if switch.strip().lower() in ("", "0", "false", "no") else f"HOTLOOP_DISABLE={switch} is set"
    cut = _cut(name, part, config)
    training = Lane(name, "training", config.training, config, cut)
    inference = Lane(name, "inference", config.inference, config, cut)
    inference.tally.said = training.tally.said  # each reason is logged once a component, not once a mode
    component = Component(name, config, (training, inference), disabled=disabled)
    device = _device(part)
    for built in component.lanes:
        _, lacking = first_available(built.rungs, device)
        if lacking and config.strict and not disabled:
            raise PresetUnavailableError(
                f"component {name!r}: preset {built.preset.name} cannot run here: {lacking}; "
                "strict=True forbids another"
            )
    return component


def _cut(name: str, part: Any, config: ComponentConfig) -> Cut:
    if config.regions == "whole" or not isinstance(part, torch.nn.Module) or sharded_units(part):
        return Cut()
    if config.regions == "auto":
        return Cut(block_classes(part), least_saving=0.5) if declared_blocks(part) else Cut()
    blocks = block_classes(part)
    if not blocks:
        _log.warning("%s: regions='blocks', but %s has no repeated blocks: compiled whole", name, type(part).__name__)
    return Cut(blocks)


def _device(part: Any) -> str:
    """Return the device type that a component lives on; a callable is taken to run on the GPU where there is one."""
    if isinstance(part, torch.nn.Module):
        first = next(itertools.chain(part.parameters(), part.buffers()), None)
        return first.device.type if first is not None else str(torch.get_default_device().type)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _install(model: Any, target: Target, built: dict[str, Component]) -> Any:
    """Start the components' lanes and put them on their modules; return the model, or the new callable."""
    if any(component.asks for component in built.values()):  # else the import of the compiler is saved
        watchdog.limit()  # a wrong value is refused here, and not in the midst of a compile
        collector.install()
        boundary.install()
    functions: dict[str, CompiledFunction] = {}
    for name, component in built.items():
        part = target.components[name]
        device = _device(part)
        for started in component.lanes:
            if component.disabled:
                started.eager = True
            else:
                started.start(device)
        boundary.follow(component)
        if isinstance(part, torch.nn.Module):
            attach(part, component)
        else:  # compiling a compiled function again replaces the compile, as it does for a module
            plain = part.__wrapped__ if isinstance(part, CompiledFunction) else part
            functions[name] = CompiledFunction(plain, component)
    if target.kind == "callable":
        return functions[next(iter(functions))]
    if target.place is not None:
        target.place.update(functions)
    left = [name for name in (*target.components, *target.skipped) if name not in built]
    if left:
        _log.info("compiled %s; left eager: %s", ", ".join(built), ", ".join(left))
    return model


def leave_eager(name: str, part: torch.nn.Module, config: ComponentConfig, why: ev.NoEffect) -> None:
    """Leave a module eager where a compile was asked for and cannot take effect; its status says why.

    Modules inside of it may be compiled each by itself; they have lines of their own in the status.
    """
    component = _build(name, part, config)
    component.left, asked = True, component.asks
    for left in component.lanes:
        left.eager = True
    attach(part, component)
    if asked:
        collector.emit(why, component.lanes[0].tally)


def uncompile(model: Any) -> Any:
    """Undo a compile: the model runs as if hotloop had never compiled it.

    It runs eager, or by your own ``module.compile()`` from before. Modules that were not compiled stay as they are.

    Args:
        model: anything that `compile` takes or returns.

    Returns:
        ``model`` itself; for a compiled callable, the plain one.
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


def own(output: _T) -> _T:
    """Copy the outputs of a compiled call that the next call would overwrite, and return them.

    For modules that ``torch.compile`` compiled with CUDA graphs (``mode="reduce-overhead"``): a later call overwrites
    their outputs. Tensors in the memory of such graphs are copied; everything else (parameters, inputs, numbers) is
    returned as it is. Copies stay in the autograd graph; tensors that share memory still share it. If no backward is
    pending, a step is marked, so that the next call may reuse the memory: at once for outputs without gradients, after
    each optimizer step for others. A module that `hotloop.compile` compiled does all this by itself, and nothing is
    copied twice.

    Args:
        output: a tensor, or tensors nested in tuples, lists, mappings and dataclasses; gradients as well
            (``hotloop.own([p.grad for p in model.parameters()])``).

    Returns:
        the same structure.
    """
    leaves, structure = flatten(output)
    memory = cudagraphs.memory()
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and memory.holds(leaf)]
    for place, copy in zip(places, copied_together([leaves[place] for place in places]), strict=True):
        leaves[place] = copy
    if any(leaves[place].requires_grad for place in places):
        boundary.install()
        steps.mark_after_optimizer()
    elif places:
        steps.mark_where_safe()
    result: _T = unflatten(structure, leaves) if places else output
    return result
