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

from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import compiled_by_user, validate
from hotloop.errors import ConfigError, missing_extra
from hotloop.integrations.accelerate_state import asks, set_aside, settings_of, share_autocast, tell_tf32
from hotloop.integrations.named import check_names

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.utils import DynamoBackend  # type: ignore[import-untyped]
except ImportError as error:
    raise missing_extra("hotloop.integrations.accelerate", "hf", error) from error

if TYPE_CHECKING:
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
            hotloop instead, once; ``preset`` and ``settings`` go before it, which is said.
        objects: what ``accelerator.prepare`` takes.
        preset: for each of the models; or a mapping of model to preset, in which models that are not named stay eager;
            ``"none"`` compiles nothing, for a `hotloop.Loop` that chooses by itself. Unset: what the accelerator was
            asked for, else ``"default"``.
        device_placement: as ``accelerator.prepare`` takes it.
        settings: as `hotloop.compile` takes them (``regions``, ``dynamic``, ``options``, ...).

    Returns:
        what ``accelerator.prepare`` returns: one object, or a tuple in the same order.

    Raises:
        ConfigError: there is no accelerator, a setting does not fit or there is none of that name, a preset or setting
            is given and no model for it, or a preset for a model that is not among the objects; nothing was prepared
            then.
    """
    _check(accelerator, objects, preset, settings)
    plugin = accelerator.state.dynamo_plugin
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
    if asks(plugin):
        _tell_which(plugin, preset, settings)
    if asks(plugin) and accelerator.mixed_precision == "no" and accelerator.device.type == "cuda":
        tell_tf32("accelerate (Accelerator with a dynamo backend)")
    wanted = {
        model: {**asked, **settings, "preset": one or asked.get("preset", "default")} for model, one in chosen.items()
    }
    for one in wanted.values():
        validate(**one, device=accelerator.device.type)
    bare = [
        _without_wrapper(one) if isinstance(one, torch.nn.Module) and wanted[one]["preset"] != "none" else one
        for one in objects
    ]
    with set_aside(plugin):
        prepared = accelerator.prepare(*bare, device_placement=device_placement)
    results = prepared if len(objects) > 1 else (prepared,)
    for given, result in zip(objects, results, strict=True):
        if isinstance(given, torch.nn.Module):
            _compile(accelerator, result, wanted[given])
    return prepared


def _check(accelerator: Any, objects: tuple[Any, ...], preset: Any, settings: Mapping[str, Any]) -> None:
    """Refuse what cannot be meant before anything is prepared."""
    if not isinstance(accelerator, Accelerator):
        raise ConfigError(
            f"prepare({type(accelerator).__name__}, ...): expected the Accelerator first, then what to prepare: "
            "prepare(accelerator, model, optimizer, loader)"
        )
    if not objects:
        raise ConfigError("prepare(accelerator): expected models, optimizers, loaders or schedulers to prepare")
    if "run" in settings:
        raise ConfigError(
            f"prepare(run={settings['run']!r}): prepare compiles in place and owns no step, so there is no run=: give "
            f"preset=..., or prepare with preset='none' and give the step to hotloop.Loop(model, optimizer, "
            f"run={settings['run']!r})"
        )
    check_names("prepare", settings, own=("preset", "device_placement"))
    if any(isinstance(one, torch.nn.Module) for one in objects):
        return
    handed = ", ".join(type(one).__name__ for one in objects)
    asked = {**({} if preset is None else {"preset": preset}), **settings}
    if asked:
        said = ", ".join(f"{name}={one!r}" for name, one in asked.items())
        raise ConfigError(f"prepare({said}): no model is among the objects ({handed}), expected the one to compile")
    _log.warning(
        "prepare: no model is among the objects (%s), so nothing is compiled: hand the model over with them, or use "
        "accelerator.prepare for these",
        handed,
    )


def _tell_which(plugin: Any, preset: Any, settings: Mapping[str, Any]) -> None:
    """Say which goes before the other: what the accelerator was given to compile with, or what `prepare` was."""
    backend = f"the accelerator's dynamo backend {plugin.backend.value}"
    if preset is not None:
        shown = "a preset for each model" if isinstance(preset, Mapping) else f"preset={preset!r}"
        _log.warning("prepare: %s goes before %s, whose other settings stay in force", shown, backend)
    elif settings:
        said = ", ".join(f"{name}={one!r}" for name, one in settings.items())
        _log.warning("prepare: %s goes before what %s asks for", said, backend)
    elif settings_of(plugin) is not None and plugin.backend == DynamoBackend.EAGER:
        _log.warning(
            "prepare: %s compiles nothing, and models run eager: leave it out for preset='default', or name a preset, "
            "prepare(..., preset='aot_eager')",
            backend,
        )


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
    for one in preset:
        if any(one is model for model in models):
            continue
        known = ", ".join(type(model).__name__ for model in models) or "no model"
        if isinstance(one, torch.nn.Module):
            raise ConfigError(
                f"preset names a {type(one).__name__} that is not among the objects to prepare: expected one of {known}"
            )
        raise ConfigError(
            f"preset={{{one!r}: {preset[one]!r}}}: expected models as keys, not a {type(one).__name__}: "
            f"preset={{model: {preset[one]!r}}}; the models are: {known}"
        )
    return {model: preset.get(model, "none") for model in models}


def _compile(accelerator: Accelerator, prepared: torch.nn.Module, settings: dict[str, Any]) -> None:
    """Compile a prepared model in place, below what Accelerate wrapped around it."""
    model = accelerator.unwrap_model(prepared)
    if settings["preset"] == "none" and (given := compiled_by_user(model)) is not None:  # not hotloop's to switch off
        _log.warning("prepare(preset='none'): %s (%s)", given.reason, given.hint)
        return
    share_autocast(model, accelerator.device, accelerator.mixed_precision, accelerator.autocast_handler)
    compile_in_place(model, **settings)
