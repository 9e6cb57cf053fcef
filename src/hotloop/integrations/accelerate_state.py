"""What Accelerate, and the Trainer that is built on it, have set up: the requested compile, TF32, autocast."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
import weakref
from typing import TYPE_CHECKING, Any

import torch

from hotloop import events as ev
from hotloop.compiling.observe import collector
from hotloop.errors import missing_extra

try:
    from accelerate.utils import DynamoBackend  # type: ignore[import-untyped]
    from accelerate.utils.operations import convert_to_fp32  # type: ignore[import-untyped]
except ImportError as error:
    raise missing_extra("hotloop.integrations.accelerate", "hf", error) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from accelerate.utils import TorchDynamoPlugin

_taken_over: list[tuple[weakref.ref[TorchDynamoPlugin], dict[str, Any]]] = []
"""The plugin that was taken over last, and the settings it asked for. All Accelerators of a process share it."""


def wants_compile(plugin: TorchDynamoPlugin) -> bool:
    """Return whether Accelerate was asked to compile what it prepares."""
    return bool(plugin.backend != DynamoBackend.NO and not plugin.disable)


def settings_of(plugin: TorchDynamoPlugin) -> dict[str, Any] | None:
    """Return the arguments for `hotloop.compile` that match a plugin; None for a backend that hotloop does not have."""
    settings: dict[str, Any] = {"fullgraph": bool(plugin.fullgraph)}
    if plugin.backend == DynamoBackend.INDUCTOR:
        settings["preset"] = "default" if plugin.options else (plugin.mode or "default")
        if plugin.options:
            settings["options"] = dict(plugin.options)
    elif plugin.backend == DynamoBackend.AOT_EAGER:
        settings["preset"] = "aot_eager"
    elif plugin.backend == DynamoBackend.EAGER:
        settings["preset"] = "none"
    else:
        return None
    if plugin.dynamic is not None:
        settings["dynamic"] = plugin.dynamic
    if plugin.use_regional_compilation:
        settings["regions"] = "blocks"
    return settings


def take_over(plugin: TorchDynamoPlugin) -> dict[str, Any] | None:
    """Stop Accelerate from compiling, and return the settings for `hotloop.compile` that it was asked for.

    Trainers of a process that have the same arguments share the plugin: each of them gets the settings.

    Returns:
        The settings, or None where no compile was asked for, or one with a backend that hotloop does not have.
    """
    if wants_compile(plugin):
        settings = settings_of(plugin)
        if settings is None:
            return None
        _taken_over[:] = [(weakref.ref(plugin), settings)]
        plugin.backend = DynamoBackend.NO
    return next((dict(settings) for taken, settings in _taken_over if taken() is plugin), None)


@contextlib.contextmanager
def set_aside(plugin: TorchDynamoPlugin) -> Iterator[None]:
    """Let Accelerate prepare models without compiling them while the block runs."""
    backend, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = backend


def report_tf32(by: str) -> None:
    """Report that a framework switched TF32 on, where it is on: an event for the watchers, and a line on the log."""
    try:
        after = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch refuses this call once the newer per-backend settings differ from each other
        after = torch.backends.cuda.matmul.fp32_precision
    if after in ("highest", "ieee", "none"):
        return
    event = ev.SettingSwitched(setting="float32_matmul_precision", after=after, by=by)
    collector.emit(event)
    logging.getLogger("hotloop").warning(
        "%s switched TF32 on (float32 matrix products keep 10 bits of each factor), since it was asked to compile; "
        'for float32: torch.set_float32_matmul_precision("highest"), after it',
        by,
    )


def share_autocast(model: torch.nn.Module, device: torch.device, mixed_precision: str, handler: Any) -> None:
    """Run the mixed precision of all models of a class through one function, so that compiled code is shared.

    Accelerate gives each model that it prepares an autocast object of its own inside ``model.forward``. Compiled code
    is guarded by the identity of this object: each trial of a search, and each model of a class, would compile anew,
    until torch's recompile limit leaves them eager. The shared function does the same to the same forward.

    Args:
        model: as Accelerate prepared it, without wrappers.
        device: the device that the model runs on.
        mixed_precision: ``fp16`` or ``bf16``; other values (``no``, ``fp8``) change nothing.
        handler: Accelerate's ``AutocastKwargs``, or None.
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mixed_precision)
    original = vars(model).get("_original_forward")
    if dtype is None or "forward" not in vars(model) or not isinstance(original, types.MethodType):
        return
    if original.__self__ is model:
        enabled, cache = getattr(handler, "enabled", True), getattr(handler, "cache_enabled", None)
        shared = _autocast(original.__func__, device.type, dtype, enabled, cache)
        model.forward = types.MethodType(shared, model)


@functools.lru_cache(maxsize=64)
def _autocast(
    forward: Callable[..., Any], device: str, dtype: torch.dtype, enabled: bool, cache: bool | None
) -> Callable[..., Any]:
    @functools.wraps(forward)  # Accelerate finds its way back by ``__wrapped__``
    def in_mixed_precision(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache):
            output = forward(self, *args, **kwargs)
        return convert_to_fp32(output)

    return in_mixed_precision
