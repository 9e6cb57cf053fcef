"""Accelerate: one call in the place of ``accelerator.prepare``.

::

    from hotloop.integrations.accelerate import prepare

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

What Accelerate prepares is compiled in place, behind its wrappers: after activation checkpointing, inside of DDP, and
unit by unit under FSDP2. So keys carry no ``_orig_mod.``, and ``eval()`` reaches the model that runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hotloop.control import compile as compile_in_place
from hotloop.control import validate
from hotloop.errors import ConfigError
from hotloop.integrations.accelerate_state import asks, set_aside, settings_of, share_autocast, tell_tf32

if TYPE_CHECKING:
    from accelerate import Accelerator  # type: ignore[import-untyped]

    from hotloop.presets import Preset

_log = logging.getLogger("hotloop")


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    preset: str | Preset | Mapping[torch.nn.Module, str | Preset] | None = None,
    device_placement: list[bool] | None = None,
    **settings: Any,
) -> Any:
    """Prepare models, optimizers, loaders and schedulers with Accelerate, and compile the models in place.

    Args:
        accelerator: where it was given a ``dynamo_backend`` or ``dynamo_plugin``, what that asks for is compiled by
            hotloop instead, once; ``preset`` and ``settings`` go before it.
        objects: what ``accelerator.prepare`` takes.
        preset: for each of the models; or a mapping of model to preset, in which models that are not named stay eager;
            ``"none"`` compiles nothing, for a `hotloop.Loop` that chooses by itself. Unset: what the accelerator was
            asked for, else ``"default"``.
        device_placement: as ``accelerator.prepare`` takes it.
        settings: as `hotloop.compile` takes them (``regions``, ``dynamic``, ``options``, ...).

    Returns:
        what ``accelerator.prepare`` returns: one object, or a tuple in the same order.

    Raises:
        ConfigError: a setting does not fit, or a preset is given for a model that is not among the objects; nothing was
            prepared then.
    """
    if not objects:
        raise ConfigError("prepare(accelerator): expected models, optimizers, loaders or schedulers to prepare")
    plugin = accelerator.state.dynamo_plugin
    given_as = {one: _without_wrapper(one) for one in objects if isinstance(one, torch.nn.Module)}
    objects = tuple(given_as[one] if isinstance(one, torch.nn.Module) else one for one in objects)
    if isinstance(preset, Mapping):
        preset = {given_as.get(model, model): one for model, one in preset.items()}
    chosen = _chosen(objects, preset)
    asked = settings_of(plugin) if asks(plugin) else {}
    if asked is None:
        if preset is not None or settings:
            raise ConfigError(
                f"the accelerator's dynamo backend is {plugin.backend.value}, which hotloop does not have: leave it "
                "out, or leave preset and settings out"
            )
        _log.warning("dynamo backend %s is Accelerate's to apply: hotloop compiles nothing", plugin.backend.value)
        return accelerator.prepare(*objects, device_placement=device_placement)
    if asks(plugin) and accelerator.mixed_precision == "no" and accelerator.device.type == "cuda":
        tell_tf32("accelerate (Accelerator with a dynamo backend)")
    wanted = {
        model: {**asked, **settings, "preset": one or asked.get("preset", "default")} for model, one in chosen.items()
    }
    for one in wanted.values():
        validate(**one, device=accelerator.device.type)
    with set_aside(plugin):
        prepared = accelerator.prepare(*objects, device_placement=device_placement)
    results = prepared if len(objects) > 1 else (prepared,)
    for given, result in zip(objects, results, strict=True):
        if isinstance(given, torch.nn.Module):
            _compile(accelerator, result, wanted[given])
    return prepared


def _without_wrapper(given: Any) -> Any:
    """Give the module that ``torch.compile(model)`` wrapped."""
    inner = getattr(given, "_orig_mod", None) if isinstance(given, torch.nn.Module) else None
    if not isinstance(inner, torch.nn.Module):
        return given
    _log.warning(
        "%s was wrapped by torch.compile(model): the module itself is prepared, and hotloop compiles it; leave "
        "torch.compile out",
        type(inner).__name__,
    )
    return inner


def _chosen(objects: tuple[Any, ...], preset: Any) -> dict[torch.nn.Module, Any]:
    models = [one for one in objects if isinstance(one, torch.nn.Module)]
    if not isinstance(preset, Mapping):
        return dict.fromkeys(models, preset)
    if strange := [one for one in preset if all(one is not model for model in models)]:
        raise ConfigError(f"preset names a {type(strange[0]).__name__} that is not among the objects to prepare")
    return {model: preset.get(model, "none") for model in models}


def _compile(accelerator: Accelerator, prepared: torch.nn.Module, settings: dict[str, Any]) -> None:
    """Compile a prepared model in place, below what Accelerate wrapped around it."""
    model = accelerator.unwrap_model(prepared)
    share_autocast(model, accelerator.device, accelerator.mixed_precision, accelerator.autocast_handler)
    compile_in_place(model, **settings)
