"""What Accelerate and the Trainer that is built on it have set up: the compile they were asked for, TF32, autocast."""

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

_log = logging.getLogger("hotloop")
_PRESETS = {DynamoBackend.AOT_EAGER: "aot_eager", DynamoBackend.EAGER: "none"}


def asks(plugin: TorchDynamoPlugin) -> bool:
    """Tell whether Accelerate was asked to compile what it prepares."""
    return bool(plugin.backend != DynamoBackend.NO and not plugin.disable)


def settings_of(plugin: TorchDynamoPlugin) -> dict[str, Any] | None:
    """Give the arguments for `hotloop.compile` that ask for what a plugin asks for; None for a backend of others."""
    if plugin.backend == DynamoBackend.INDUCTOR:
        options = dict(plugin.options or {})
        preset = "default" if options else (plugin.mode or "default")
    elif plugin.backend in _PRESETS:
        options, preset = {}, _PRESETS[plugin.backend]
    else:
        return None
    found: dict[str, Any] = {"preset": preset, "fullgraph": bool(plugin.fullgraph)}
    if options:
        found["options"] = options
    if plugin.dynamic is not None:
        found["dynamic"] = plugin.dynamic
    if plugin.use_regional_compilation:
        found["regions"] = "blocks"
    return found


_taken: list[tuple[weakref.ref[TorchDynamoPlugin], dict[str, Any]]] = []
"""The plugin that was taken over last, and what it asked for: there is one of all Accelerators in a process."""


def take_over(plugin: TorchDynamoPlugin) -> dict[str, Any] | None:
    """Have Accelerate compile nothing from now on, and give what it was asked for; None where that was nothing of ours.

    Trainers of a process that have the same arguments share the plugin: each of them is given what was asked.
    """
    if asks(plugin):
        found = settings_of(plugin)
        if found is None:
            return None
        _taken[:] = [(weakref.ref(plugin), found)]
        plugin.backend = DynamoBackend.NO
    return next((dict(found) for taken, found in _taken if taken() is plugin), None)


@contextlib.contextmanager
def set_aside(plugin: TorchDynamoPlugin) -> Iterator[None]:
    """Have Accelerate prepare models without compiling them while the block runs."""
    asked, plugin.backend = plugin.backend, DynamoBackend.NO
    try:
        yield
    finally:
        plugin.backend = asked


def tell_tf32(by: str) -> None:
    """Say that a framework switched TF32 on, where it is on: an event for the watchers, and a line on the log."""
    try:
        after = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer settings, one by one, say more than this one can
        after = torch.backends.cuda.matmul.fp32_precision
    if after in ("highest", "ieee", "none"):
        return
    event = ev.SettingSwitched(
        component=None,
        setting="float32_matmul_precision",
        before="highest, or what was set before",
        after=after,
        by=by,
    )
    collector.emit(event)
    _log.warning(
        "%s switched TF32 on (float32 matrix products keep 10 bits of each factor), since it was asked to compile; "
        'for float32: torch.set_float32_matmul_precision("highest"), after it',
        by,
    )


def share_autocast(model: torch.nn.Module, device: torch.device, mixed_precision: str, handler: Any) -> None:
    """Have all models of a class run their mixed precision through one function, so that compiled code is shared.

    Accelerate gives each model that it prepares an autocast object of its own inside of ``model.forward``. Compiled
    code is guarded by that object's identity: each trial of a search, and each model of a class, would compile anew,
    until torch's recompile limit leaves them eager. The function put in its place does the same to the same forward.

    Args:
        model: as Accelerate prepared it, without wrappers.
        device: that it runs on.
        mixed_precision: ``fp16`` or ``bf16``; what else there is (``no``, ``fp8``) is left alone.
        handler: Accelerate's ``AutocastKwargs``, or None.
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(mixed_precision)
    original = vars(model).get("_original_forward")
    bound = isinstance(original, types.MethodType) and original.__self__ is model
    if dtype is None or not bound or "forward" not in vars(model):
        return
    assert isinstance(original, types.MethodType)
    enabled, cache = getattr(handler, "enabled", True), getattr(handler, "cache_enabled", None)
    shared = _autocast(original.__func__, device.type, dtype, enabled, cache)
    model.forward = types.MethodType(shared, model)


@functools.lru_cache(maxsize=64)
def _autocast(
    forward: Callable[..., Any], device: str, dtype: torch.dtype, enabled: bool, cache: bool | None
) -> Callable[..., Any]:
    @functools.wraps(forward)  # ``__wrapped__`` is how Accelerate finds its way back
    def in_mixed_precision(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache):
            found = forward(self, *args, **kwargs)
        return convert_to_fp32(found)

    return in_mixed_precision
