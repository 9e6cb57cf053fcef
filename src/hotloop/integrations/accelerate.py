"""Accelerate: `prepare`, called instead of ``accelerator.prepare``.

::

    from hotloop.integrations.accelerate import prepare

    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)

Models are compiled in place, behind Accelerate's wrappers: after activation checkpointing, inside of DDP, and unit by
unit under FSDP2. The wrapper of several processes is made on a CUDA stream of its own, so that a loop may capture
their steps. Keys carry no ``_orig_mod.``, and ``eval()`` reaches the model that runs.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from hotloop.compiling.control import compile as compile_in_place
from hotloop.compiling.control import compiled_by_user, validate
from hotloop.errors import ConfigError, missing_extra
from hotloop.integrations.accelerate_state import report_tf32, set_aside, settings_of, share_autocast, wants_compile
from hotloop.integrations.setting_names import check_names
from hotloop.integrations.several import own_stream

try:
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.utils import DistributedType  # type: ignore[import-untyped]
except ImportError as error:
    raise missing_extra("hotloop.integrations.accelerate", "hf", error) from error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hotloop.presets import Preset

_log = logging.getLogger("hotloop")


def prepare(
    accelerator: Accelerator,
    *objects: Any,
    preset: str | Preset | None = None,
    device_placement: list[bool] | None = None,
    **settings: Any,
) -> Any:
    """Prepare models, optimizers, loaders and schedulers with Accelerate, and compile the models in place.

    Args:
        accelerator: if it was given a ``dynamo_backend`` or ``dynamo_plugin``, hotloop makes this compile instead,
            once; ``preset`` and ``settings`` override it, with a line on the log.
        objects: what ``accelerator.prepare`` takes.
        preset: for each of the models; ``"none"`` compiles nothing, for a `hotloop.Loop` that chooses by itself. Unset:
            the compile that the accelerator was asked for, else ``"default"``.
        device_placement: as ``accelerator.prepare`` takes it.
        settings: as `hotloop.compile` takes them (``regions``, ``dynamic``, ``options``, ...).

    Returns:
        The result of ``accelerator.prepare``: one object, or a tuple in the same order.

    Raises:
        ConfigError: there is no accelerator, a setting does not fit or does not exist, or a preset or setting is given
            without a model. Nothing was prepared then.
    """
    _check(accelerator, objects, preset, settings)
    plugin = accelerator.state.dynamo_plugin
    requested: dict[str, Any] = {}
    if wants_compile(plugin):
        backend = f"the accelerator's dynamo backend {plugin.backend.value}"
        known = settings_of(plugin)
        if known is None:
            raise ConfigError(f"prepare: {backend} is not hotloop's to apply: leave it out, or use accelerator.prepare")
        requested = known
        if preset is not None or settings:
            _log.warning("prepare: %s goes before %s", _shown(preset, settings), backend)
        if accelerator.mixed_precision == "no" and accelerator.device.type == "cuda":
            report_tf32("accelerate (Accelerator with a dynamo backend)")

    wanted = {"preset": "default", **requested, **settings}
    if preset is not None:
        wanted["preset"] = preset
    validate(**wanted, device=accelerator.device.type)
    compiles = wanted["preset"] != "none"
    bare = [_without_wrapper(given) if compiles else given for given in objects]
    several = accelerator.distributed_type != DistributedType.NO
    with set_aside(plugin), own_stream(accelerator.device) if several else contextlib.nullcontext():
        prepared = accelerator.prepare(*bare, device_placement=device_placement)
    for given, result in zip(objects, prepared if len(objects) > 1 else (prepared,), strict=True):
        if isinstance(given, torch.nn.Module):
            _compile(accelerator, result, wanted)
    return prepared


def _check(accelerator: Any, objects: tuple[Any, ...], preset: Any, settings: Mapping[str, Any]) -> None:
    """Refuse arguments that cannot be meant, before anything is prepared."""
    if not isinstance(accelerator, Accelerator) or not objects:
        raise ConfigError(
            f"prepare({type(accelerator).__name__}, ...): expected the Accelerator first, then what to prepare: "
            "prepare(accelerator, model, optimizer, loader)"
        )
    if "run" in settings:
        raise ConfigError(
            f"prepare(run={settings['run']!r}): prepare compiles in place: prepare with preset='none', "
            f"and give the step to hotloop.Loop(model, optimizer, run={settings['run']!r})"
        )
    check_names("prepare", settings, own=("preset", "device_placement"))
    if not any(isinstance(given, torch.nn.Module) for given in objects) and (preset is not None or settings):
        kinds = ", ".join(type(given).__name__ for given in objects)
        raise ConfigError(f"prepare({_shown(preset, settings)}): no model is among the objects ({kinds})")


def _shown(preset: Any, settings: Mapping[str, Any]) -> str:
    named = {**({} if preset is None else {"preset": preset}), **settings}
    return ", ".join(f"{name}={value!r}" for name, value in named.items())


def _without_wrapper(given: Any) -> Any:
    """Return the module that ``torch.compile(model)`` wrapped; anything else as it is."""
    inner = getattr(given, "_orig_mod", None) if isinstance(given, torch.nn.Module) else None
    if not isinstance(inner, torch.nn.Module):
        return given
    _log.warning(
        "%s was wrapped by torch.compile(model): the module itself is prepared, and hotloop compiles it; leave "
        "torch.compile out",
        type(inner).__name__,
    )
    return inner


def _compile(accelerator: Accelerator, prepared: torch.nn.Module, settings: dict[str, Any]) -> None:
    """Compile a prepared model in place, inside Accelerate's wrappers."""
    model = accelerator.unwrap_model(prepared)
    if settings["preset"] == "none" and (given := compiled_by_user(model)) is not None:  # not ours to switch off
        _log.warning("prepare(preset='none'): %s (%s)", given.reason, given.hint)
        return
    share_autocast(model, accelerator.device, accelerator.mixed_precision, accelerator.autocast_handler)
    compile_in_place(model, **settings)
