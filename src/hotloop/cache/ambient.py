"""The settings of a process that a compile depends on besides the code."""

from __future__ import annotations

import operator
import sys
from typing import TYPE_CHECKING, Any

import torch

from hotloop._torch.ledger import private

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _unless_mixed(get: Callable[[], Any]) -> Callable[[], Any]:
    """Wrap the getter of an older precision setting: None where torch refuses it, since newer settings differ."""

    def read() -> Any:
        try:
            return get()
        except RuntimeError:
            return None

    return read


_FUNCTIONS: Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    # These come first: torch refuses to read them once the newer settings are set one by one.
    "matmul precision": (_unless_mixed(torch.get_float32_matmul_precision), torch.set_float32_matmul_precision),
    "cudnn tf32": (
        _unless_mixed(lambda: torch.backends.cudnn.allow_tf32),
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (lambda: str(torch.get_default_device()), torch.set_default_device),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "math attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "cudnn attention": (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
}
_ATTRIBUTES = (
    "backends.cudnn.enabled",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cuda.matmul.allow_fp16_reduced_precision_reduction",
    "backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
    "backends.fp32_precision",
    "backends.cuda.matmul.fp32_precision",
    "backends.cudnn.conv.fp32_precision",
    "backends.cudnn.rnn.fp32_precision",
    "backends.mkldnn.enabled",
    "backends.mkldnn.matmul.fp32_precision",
    "backends.mkldnn.conv.fp32_precision",
    "utils.deterministic.fill_uninitialized_memory",
)
_COMPILERS = ("torch._dynamo:config", "torch._functorch:config", "torch._inductor:config")


def torch_settings() -> dict[str, Any]:
    """Return torch's own settings of this process, without the compiler's; None where a newer setting says more."""
    found = {name: get() for name, (get, _) in _FUNCTIONS.items()}
    return found | {name: operator.attrgetter(name)(torch) for name in _ATTRIBUTES}


def process_settings() -> dict[str, Any]:
    """Return the settings of this process, by name: plain data that pickles."""
    of_this_process = ("compile_threads", "worker_start_method", "quiesce_async_compile_pool")
    found = torch_settings()
    for path in _COMPILERS:
        if path.replace(":", ".") in sys.modules:  # else nobody has changed them, and importing them costs a second
            values = private(path).get_config_copy()
            found[path] = {
                name: value for name, value in values.items() if _is_plain(value) and name not in of_this_process
            }
    return found


def apply_process_settings(settings: Mapping[str, Any]) -> None:
    """Make this process's settings equal to another process's; equal settings are not touched."""
    now = {name: get() for name, (get, _) in _FUNCTIONS.items()}
    for name, (_, put) in _FUNCTIONS.items():
        if settings[name] is not None and settings[name] != now[name]:
            put(settings[name])
    for name in _ATTRIBUTES:
        if settings[name] != operator.attrgetter(name)(torch):
            home, _, attribute = name.rpartition(".")
            setattr(operator.attrgetter(home)(torch), attribute, settings[name])
    for path in _COMPILERS:
        if path in settings:
            config = private(path)
            own = config.get_config_copy()
            for name, value in settings[path].items():
                if value != own.get(name, value):
                    setattr(config, name, value)


def caches_compiles() -> str:
    """Return why Inductor keeps nothing on disk in this process; an empty text where it does keep its code."""
    config = private("torch._inductor:config")
    if config.force_disable_caches:
        return "Inductor's caches are off (force_disable_caches)"
    return "" if config.fx_graph_cache else "Inductor's graph cache is off (fx_graph_cache)"


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for pair in value.items() for item in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
